"""The keys that a server takes, and how they change under it."""

import asyncio
import datetime
import logging
import os
import threading

import pytest

from loraplex.core.errors import ConfigError, UnauthenticatedError
from loraplex.core.principal import Principal
from loraplex.serving.access import api_key_ring
from loraplex.serving.access.api_key_ring import ApiKeys
from loraplex.serving.access.api_keys import new_key
from loraplex.serving.access.key_file_changes import create_key, revoke_key
from support.eventually import eventually

NOW = datetime.datetime(2026, 1, 31, 12, tzinfo=datetime.UTC)

FIXED_KEY = "lpx_0123456789abcdefghijklmnopqrstuvwxyzABCDEFG"
"""Appears in the ids of tests, which must not change."""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "keys.toml"


def make(path, tenant="acme"):
    return create_key(path, tenant, NOW)[1]


def refused(keys, key):
    with pytest.raises(UnauthenticatedError) as raised:
        keys.principal(key)
    assert key == "" or key not in raised.value.message
    return True


def test_several_keys_of_several_tenants(path):
    one, two, other = make(path), make(path), make(path, "other")
    keys = ApiKeys(path)
    assert [keys.principal(key).tenant for key in (one, two, other)] == ["acme", "acme", "other"]
    for wrong in ("", "x", one[:-1], one + "x", one.upper(), new_key()):
        assert refused(keys, wrong)


def test_rotation_without_a_restart(path):
    old = make(path)
    keys = ApiKeys(path)
    new = make(path)
    assert refused(keys, new)
    keys.refresh()
    assert keys.principal(new) == keys.principal(old)
    revoke_key(path, path.read_text().split('id = "')[1][:8])
    keys.refresh()
    assert refused(keys, old)
    assert keys.principal(new).tenant == "acme"


def test_changed_rights_and_limits(path):
    key = make(path)
    keys = ApiKeys(path)
    text = path.read_text()
    path.write_text(text.replace('manage = "none"', 'manage = ["x-*"]\nmax_n = 4'))
    keys.refresh()
    assert "x-1" in keys.principal(key).rights.manage
    assert keys.principal(key).limits.max_n == 4


@pytest.mark.parametrize(
    "broken",
    [
        *("[tenants", None, "[[keys]]\nid = 1", "x = " + "[" * 9999, "x = " + "1" * 9999),
        *("", "# written from here on\n", "[tenants.acme]\n", "keys = []\n"),
    ],
)
def test_a_broken_file_keeps_the_old_keys_and_says_so_once(path, caplog, broken):
    key = make(path)
    good = path.read_text()
    keys = ApiKeys(path)
    path.unlink() if broken is None else path.write_text(broken)
    for _ in range(3):
        keys.refresh()
    assert keys.principal(key).tenant == "acme"
    (record,) = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert "the API keys stay as they were" in record.message
    assert str(path) in record.message
    path.write_text(good.replace("acme", "umbrella"))
    keys.refresh()
    assert keys.principal(key).tenant == "umbrella"


def test_every_beginning_of_a_file_keeps_the_keys_that_it_begins_with(path):
    """A writer truncates the file, and then writes it piece by piece."""
    first = make(path)
    keys = ApiKeys(path)
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        keys.refresh()
        assert keys.principal(first).tenant == "acme"


def test_the_rights_of_keys_of_the_environment_stay_while_the_file_is_written(path):
    own = new_key()
    path.write_text("[tenants.acme]\nmax_n = 4\n")
    keys = ApiKeys(path, f"acme:{own}")
    path.write_text("")
    keys.refresh()
    assert keys.principal(own).limits.max_n == 4


def test_all_keys_can_be_revoked(path):
    key = make(path)
    keys = ApiKeys(path)
    revoke_key(path, path.read_text().split('id = "')[1][:8])
    keys.refresh()
    assert refused(keys, key)


def test_a_reader_of_an_older_file_does_not_win(path, monkeypatch):
    revoked, key_id = make(path), path.read_text().split('id = "')[1][:8]
    keys = ApiKeys(path)
    reads, may_go_on = threading.Event(), threading.Event()
    read = api_key_ring.read_key_file

    def slowly(file):
        """The first who reads; others are not kept."""
        content = read(file)
        if not reads.is_set():
            reads.set()
            assert may_go_on.wait(60)
        return content

    monkeypatch.setattr(api_key_ring, "read_key_file", slowly)
    make(path)
    follower = threading.Thread(target=keys.refresh)
    follower.start()
    assert reads.wait(60)
    revoke_key(path, key_id)
    hangup = threading.Thread(target=keys.refresh)
    hangup.start()
    hangup.join(0.1)
    may_go_on.set()
    follower.join()
    hangup.join()
    assert refused(keys, revoked)


def test_a_file_without_keys_admits_no_caller(path, caplog):
    path.write_text("")
    assert refused(ApiKeys(path), "")
    assert "every request is refused" in caplog.text


def test_keys_of_the_environment(path):
    operator, own, files = new_key(), new_key(), make(path)
    keys = ApiKeys(None, f"{operator},\n acme:{own} ")
    assert keys.principal(operator) == Principal()
    assert keys.principal(own).tenant == "acme"
    assert not keys.principal(own).rights.operator
    keys.refresh()
    both = ApiKeys(path, f"acme:{own}")
    assert both.principal(own) == both.principal(files)


def test_keys_of_the_environment_stay_when_the_file_changes(path):
    own, files = new_key(), make(path)
    keys = ApiKeys(path, f"acme:{own}")
    more = make(path)
    keys.refresh()
    assert keys.principal(own) == keys.principal(files) == keys.principal(more)


def test_of_a_key_in_both_the_file_says_whose_it_is(path):
    key = make(path)
    assert ApiKeys(path, f"umbrella:{key}").principal(key).tenant == "acme"


@pytest.mark.parametrize("is_replaced", [True, False], ids=["replaced", "of another size"])
def test_a_change_within_the_clocks_step_is_seen(path, is_replaced):
    key = make(path)
    keys = ApiKeys(path)
    before = path.stat()
    text = path.read_text()
    if is_replaced:
        new = path.with_suffix(".new")
        new.write_text(text.replace("acme", "else"))
        new.replace(path)
    else:
        path.write_text(text.replace("acme", "umbrella"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    keys.refresh()
    assert keys.principal(key).tenant in ("else", "umbrella")


def test_a_revoked_key_is_not_taken_from_the_environment_either(path):
    key = make(path)
    revoke_key(path, path.read_text().split('id = "')[1][:8])
    assert refused(ApiKeys(path, f"acme:{key}"), key)


@pytest.mark.parametrize("variable", ["weak", "acme:weak", f"a/b:{FIXED_KEY}", f"{FIXED_KEY},x"])
def test_a_bad_variable(variable):
    with pytest.raises(ConfigError, match="LORAPLEX_API_KEYS") as raised:
        ApiKeys(None, variable)
    assert "weak" not in raised.value.message
    assert "a/b" not in raised.value.message  # it may be a part of a key


def test_a_key_of_a_flag_may_be_weak(caplog):
    assert ApiKeys(None, given=("weak",)).principal("weak") == Principal()
    assert "it is accepted anyway" in caplog.text
    assert "weak" not in caplog.text


async def test_following(path, monkeypatch):
    monkeypatch.setattr(api_key_ring, "LOOK_SECONDS", 0.001)
    make(path)
    keys = ApiKeys(path)
    task = asyncio.create_task(keys.follow())
    key = make(path)

    def is_known():
        try:
            return bool(keys.principal(key))
        except UnauthenticatedError:
            return False

    assert await asyncio.to_thread(eventually, is_known)
    task.cancel()


class CountedDigest(bytes):
    """Counts the digests that it is compared with."""

    num_comparisons = 0

    def __eq__(self, other):
        CountedDigest.num_comparisons += 1
        return bytes.__eq__(self, other)

    __hash__ = bytes.__hash__


@pytest.mark.parametrize("num_keys", [1, 10_000])
def test_a_lookup_does_not_depend_on_the_number_of_keys(monkeypatch, num_keys):
    made = [f"acme:{new_key()}" for _ in range(num_keys)]
    keys = ApiKeys(None, " ".join(made))
    digest_of = api_key_ring.digest_of
    monkeypatch.setattr(api_key_ring, "digest_of", lambda key: CountedDigest(digest_of(key)))
    monkeypatch.setattr(CountedDigest, "num_comparisons", 0)
    known = [each.removeprefix("acme:") for each in made[:: max(1, num_keys // 100)]]
    assert {keys.principal(key).tenant for key in known} == {"acme"}
    assert CountedDigest.num_comparisons == len(known)
    assert refused(keys, new_key())
    assert CountedDigest.num_comparisons == len(known)
