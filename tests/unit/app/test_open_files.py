"""The limit of open files: raised as far as it goes, reported where that is not enough."""

import resource

import pytest

from loraplex.app.serving_process import raise_open_file_limit
from loraplex.core.errors import ConfigError
from support.naming import naming


@pytest.mark.parametrize(
    ("soft", "hard", "then"),
    [(1024, 4096, 1324), (2000, 4096, None), (1024, 1100, 1100), (-1, -1, None), (1024, -1, 1324)],
)
def test_capacity_for_connections(monkeypatch, soft, hard, then):
    limits_set = []
    monkeypatch.setattr(resource, "getrlimit", lambda what: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda what, limits: limits_set.append(limits))
    raise_open_file_limit(100)
    assert limits_set == ([] if then is None else [(then, hard)])


@pytest.mark.parametrize(("hard", "is_reported"), [(1100, True), (1324, False), (-1, False)])
def test_a_limit_below_max_connections_is_reported(monkeypatch, caplog, hard, is_reported):
    monkeypatch.setattr(resource, "getrlimit", lambda what: (hard, hard))
    raise_open_file_limit(100)
    assert ("may open 1100 files" in caplog.text) is is_reported


@pytest.mark.parametrize("hard", [128, 256, 1024, 4096, 12000])
def test_connections_leave_files_for_everything_else(monkeypatch, hard):
    monkeypatch.setattr(resource, "getrlimit", lambda what: (hard, hard))
    number = raise_open_file_limit(4096)
    assert 8 <= number < 4096
    assert hard - 3 * number >= min(1024, 3 * hard // 8)
    assert raise_open_file_limit(2) == 2


def test_all_connections_are_taken_where_there_are_files(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda what: (65536, 65536))
    assert raise_open_file_limit(4096) == 4096


def test_a_limit_that_no_server_can_live_with(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda what: (24, 24))
    with pytest.raises(ConfigError, match=naming(24, 128, 1324)):
        raise_open_file_limit(100)
