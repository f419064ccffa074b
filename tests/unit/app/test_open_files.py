"""The limit of open files: raised as far as it goes, reported where that is not enough."""

import resource

import pytest

from loraplex.app.open_files import raise_open_file_limit
from loraplex.core.errors import ConfigError


@pytest.mark.parametrize(
    ("soft", "hard", "then"),
    [(1024, 4096, 1224), (2000, 4096, None), (1024, 1100, 1100), (-1, -1, None), (1024, -1, 1224)],
)
def test_capacity_for_connections(monkeypatch, soft, hard, then):
    limits_set = []
    monkeypatch.setattr(resource, "getrlimit", lambda what: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda what, limits: limits_set.append(limits))
    raise_open_file_limit(100)
    assert limits_set == ([] if then is None else [(then, hard)])


@pytest.mark.parametrize(("hard", "is_reported"), [(1100, True), (1224, False), (-1, False)])
def test_a_limit_below_max_connections_is_reported(monkeypatch, caplog, hard, is_reported):
    monkeypatch.setattr(resource, "getrlimit", lambda what: (hard, hard))
    raise_open_file_limit(100)
    assert ("may open 1100 files" in caplog.text) is is_reported


def test_a_limit_that_no_server_can_live_with(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda what: (24, 24))
    with pytest.raises(ConfigError, match=r"may open 24 files .* needs at least 128; 1224 suffice"):
        raise_open_file_limit(100)
