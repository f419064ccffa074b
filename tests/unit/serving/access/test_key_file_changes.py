"""Keys are made and revoked in a file: atomically, for the owner only, despite other changes."""

import concurrent.futures
import datetime
import os
import stat

import pytest

from loraplex.core.errors import ConfigError
from loraplex.serving.access.api_keys import digest_of
from loraplex.serving.access.key_file import read_key_file
from loraplex.serving.access.key_file_changes import create_key, revoke_key
from support.naming import naming, refused

NOW = datetime.datetime(2026, 1, 31, 12, tzinfo=datetime.UTC)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "keys.toml"


def test_the_first_key_makes_the_file(path):
    key_id, key, is_new = create_key(path, "acme", NOW)
    assert is_new
    (entry,) = read_key_file(path).keys
    assert (entry.id, entry.tenant, entry.created) == (key_id, "acme", NOW)
    assert bytes.fromhex(entry.sha256) == digest_of(key)
    assert key not in path.read_text()
    assert path.read_text().startswith("# Tenants of loraplex")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    rights = read_key_file(path).tenants["acme"].rights
    assert all((rights.use, rights.list, rights.models))
    assert not any((rights.manage, rights.operator))


def test_an_operator(path):
    create_key(path, "ops", NOW, is_operator=True)
    assert read_key_file(path).tenants["ops"].rights.operator
    create_key(path, "ops", NOW, is_operator=True)
    create_key(path, "acme", NOW)
    with refused(ConfigError, "'acme'", path, "operator"):
        create_key(path, "acme", NOW, is_operator=True)


def test_an_operators_own_lines_stay(path):
    path.write_text("# mine\n[tenants.acme]\nmax_n = 3 # three\n")
    path.chmod(0o640)
    *_, is_new = create_key(path, "acme", NOW)
    assert not is_new
    assert path.read_text().startswith("# mine\n[tenants.acme]\nmax_n = 3 # three\n")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    path.chmod(0o666)
    create_key(path, "acme", NOW)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640 & 0o600 | 0o040


def test_a_link_stays_a_link(path, tmp_path):
    target = tmp_path / "target.toml"
    create_key(target, "acme", NOW)
    path.symlink_to(target)
    create_key(path, "acme", NOW)
    assert path.is_symlink()
    assert len(read_key_file(target).keys) == 2


def test_revoking(path):
    key_id, *_ = create_key(path, "acme", NOW)
    other_id, *_ = create_key(path, "acme", NOW)
    revoke_key(path, key_id)
    revoke_key(path, key_id)
    assert [key.id for key in read_key_file(path).valid_keys] == [other_id]
    assert path.read_text().count("[[revoked]]") == 1
    with refused(ConfigError, path, "'nope'"):
        revoke_key(path, "nope")


def test_the_time_is_written_in_utc(path):
    create_key(path, "acme", NOW.astimezone(datetime.timezone(datetime.timedelta(hours=5))))
    assert "created = 2026-01-31T12:00:00Z" in path.read_text()


def test_one_key_too_many_changes_nothing(path, monkeypatch):
    create_key(path, "acme", NOW)
    before = path.read_text()
    monkeypatch.setattr("loraplex.serving.access.key_file.MAX_KEYS", 1)
    with refused(ConfigError, path, 2, 1):
        create_key(path, "acme", NOW)
    assert path.read_text() == before


def test_what_cannot_take_the_files_place_is_not_left(path, monkeypatch):
    create_key(path, "acme", NOW)
    before = path.read_text()

    def fail(*_):
        raise OSError("no room")

    monkeypatch.setattr(os, "replace", fail)
    with refused(ConfigError, path, "no room"):
        create_key(path, "acme", NOW)
    assert path.read_text() == before
    assert {file.name for file in path.parent.iterdir()} == {path.name, path.name + ".lock"}


def test_many_at_once_lose_nothing(path):
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda i: create_key(path, f"t{i % 3}", NOW), range(24)))
    file = read_key_file(path)
    assert {key.id for key in file.keys} == {key_id for key_id, *_ in made}
    assert sum(is_new for *_, is_new in made) == 3


def test_a_broken_file_is_not_touched(path):
    path.write_text("[tenants")
    with refused(ConfigError, path, "TOML"):
        create_key(path, "acme", NOW)
    assert path.read_text() == "[tenants"


@pytest.mark.parametrize("tenant", ["", "a b", "a\n[x]", "../x", "x" * 129, '"'])
def test_odd_tenants(path, tenant):
    with refused(ConfigError, "--tenant", 128):
        create_key(path, tenant, NOW)
    assert not path.exists()


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_a_folder_that_takes_no_files(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match=naming("api_keys_file", "Permission denied")):
        create_key(tmp_path / "keys.toml", "acme", NOW)
    tmp_path.chmod(0o700)


def test_a_folder_that_is_not_there(tmp_path):
    with refused(ConfigError, tmp_path / "nowhere" / "keys.toml"):
        create_key(tmp_path / "nowhere" / "keys.toml", "acme", NOW)
