"""The store on a disk: what is there after it was opened again, and who may open it."""

import hashlib
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from loraplex.adapters.database import AdapterDatabase
from loraplex.adapters.durable_files import write_atomically
from loraplex.adapters.staged import StagedAdapter
from loraplex.adapters.state_files import StateLock, canonical_path
from loraplex.adapters.store import AdapterStore, VersionOrigin
from loraplex.core.adapter import AdapterRef, AdapterSource, ByDigest, ByName, ByTaskId, LoraTarget
from loraplex.core.errors import (
    AdapterLoadError,
    ConfigError,
    InternalError,
    StorageUnavailableError,
)
from support.naming import naming


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def state_dir(tmp_path):
    return tmp_path / "state"


@pytest.fixture
def open_store(state_dir, clock):
    """Opens it; the one before is closed."""
    opened = []

    def open_it():
        while opened:
            opened.pop().close()
        opened.append(AdapterStore.open(state_dir, clock))
        return opened[-1]

    yield open_it
    while opened:
        opened.pop().close()


@pytest.fixture
def store(open_store):
    return open_store()


def digest_of(content):
    return hashlib.sha256(content.encode()).hexdigest()


def put_file(state_dir, content):
    path = canonical_path(state_dir, digest_of(content))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return path


def staged(state_dir, content):
    path = put_file(state_dir, content)
    targets = (LoraTarget(0, "q_proj", 4, 8, 8),)
    return StagedAdapter(
        source=AdapterSource(digest_of(content), str(path), len(content), targets),
        dtypes=("BF16",),
        num_tensors=2,
        warnings=("a warning",),
    )


def add(store, state_dir, name, content, **kwargs):
    return store.register(
        "m", "t", name, staged(state_dir, content), path=f"/{name}", **kwargs
    ).version


def by_name(name):
    return AdapterRef("m", "t", ByName(name))


def files_in(state_dir):
    return sorted(path.read_text() for path in state_dir.glob("adapters/*/*.safetensors"))


class TestOpeningAgain:
    def test_finds_all_that_there_was(self, store, open_store, state_dir):
        add(store, state_dir, "cats", "one", task_id=2**64 - 1)
        add(store, state_dir, "cats", "two", replace=True)
        add(store, state_dir, "dogs", "three", task_id=0)
        store.pin(by_name("cats"), 1)
        store.rollback(by_name("cats"))
        store.alias(by_name("dogs"), "pets")
        store.register(
            "m", "u", "cats", staged(state_dir, "two"), path="/u", origin=VersionOrigin.CONFIGURED
        )
        before = store.list("t"), store.list("u"), store.history(by_name("cats"))
        again = open_store()
        assert (again.list("t"), again.list("u"), again.history(by_name("cats"))) == before
        assert [v.is_pinned for v in again.history(by_name("cats"))] == [False, False, True]
        assert again.resolve(AdapterRef("m", "t", ByTaskId(2**64 - 1))).restored == 1
        assert again.resolve(AdapterRef("m", "t", ByTaskId(0))).name == "dogs"
        assert again.resolve(AdapterRef("m", "u", ByDigest(digest_of("two")))).tenant == "u"
        assert again.aliases("t", "m") == {"pets": "dogs"}
        assert again.list("u")[0].origin is VersionOrigin.CONFIGURED

    def test_what_was_removed_stays_away(self, store, open_store, state_dir):
        add(store, state_dir, "cats", "one", task_id=7)
        store.alias(by_name("cats"), "pets")
        store.remove(by_name("cats"))
        again = open_store()
        assert again.list("t") == []
        assert again.aliases("t", "m") == {}
        assert add(again, state_dir, "pets", "two", task_id=7).number == 1

    def test_an_alias_or_a_pin_that_was_taken_back(self, store, open_store, state_dir):
        add(store, state_dir, "cats", "one")
        add(store, state_dir, "dogs", "two")
        store.alias(by_name("cats"), "pets")
        store.alias(by_name("cats"), "live")
        store.alias(by_name("dogs"), "live", replace=True)
        store.remove(by_name("pets"))
        store.pin(by_name("cats"))
        store.unpin(by_name("cats"))
        again = open_store()
        assert again.aliases("t", "m") == {"live": "dogs"}
        assert not again.resolve(by_name("cats")).is_pinned

    def test_a_changed_configuration(self, store, open_store, state_dir):
        for name, task_id in (("cats", 7), ("dogs", 8)):
            store.register(
                "m",
                "t",
                name,
                staged(state_dir, name),
                path="/",
                task_id=task_id,
                origin=VersionOrigin.CONFIGURED,
            )
        store.alias(by_name("dogs"), "pets")
        store.apply_configuration("m", "t", {"dogs": 7, "pets": None})
        again = open_store()
        assert [(v.name, v.task_id) for v in again.list("t")] == [("dogs", None)]
        assert again.aliases("t", "m") == {}

    def test_somewhere_else(self, store, state_dir, tmp_path):
        add(store, state_dir, "cats", "one")
        store.close()
        moved = tmp_path / "moved"
        shutil.move(state_dir, moved)
        again = AdapterStore.open(moved)
        source = again.resolve(by_name("cats")).source
        assert source.path == str(canonical_path(moved, digest_of("one")))
        assert again.history(by_name("cats"))[0].source == source
        again.close()


@pytest.mark.parametrize("name", ["..%2f..%2fetc", "/etc/passwd", "...", "a/b", "a%00", "'; --"])
def test_hostile_names_make_no_path(open_store, state_dir, tmp_path, name):
    store = open_store()
    before = {path.name for path in tmp_path.iterdir()}
    add(store, state_dir, "cats", "one")
    store.alias(by_name("cats"), name)
    store.remove(by_name(name))
    version = store.register(name, name, name, staged(state_dir, "one"), path=name).version
    store = open_store()
    assert store.resolve(AdapterRef(name, name, ByName(name))) == version
    store.collect_garbage((), 0)
    assert {path.name for path in tmp_path.iterdir()} == before
    files = {str(path.relative_to(state_dir)) for path in state_dir.rglob("*") if path.is_file()}
    digest = digest_of("one")
    assert files == {
        "adapters.sqlite3",
        "adapters.sqlite3-wal",
        "adapters.sqlite3.reserve",
        "adapters.lock",
        "files.lock",
        f"adapters/{digest[:2]}/{digest}.safetensors",
    }


class TestMissingFiles:
    def test_are_reported_and_not_served(self, store, open_store, state_dir):
        version = add(store, state_dir, "cats", "one", task_id=7)
        add(store, state_dir, "dogs", "two")
        canonical_path(state_dir, version.digest).unlink()
        again = open_store()
        assert again.missing() == [version]
        assert version.digest in again.missing_digests
        assert again.find(by_name("cats")) == version
        assert again.list("t") == [version, again.resolve(by_name("dogs"))]
        for key in (ByName("cats"), ByTaskId(7), ByDigest(version.digest)):
            with pytest.raises(AdapterLoadError, match=r"'cats' \(version 1.* from /cats$"):
                again.resolve(AdapterRef("m", "t", key))

    def test_come_back_by_staging(self, store, open_store, state_dir):
        version = add(store, state_dir, "cats", "one")
        canonical_path(state_dir, version.digest).unlink()
        assert store.missing() == [version]
        again = staged(state_dir, "one")
        registration = store.register("m", "t", "cats", again, path="/cats", replace=True)
        assert registration.is_unchanged
        assert store.resolve(by_name("cats")) == version
        assert store.missing() == []

    def test_come_back_when_the_file_does(self, store, state_dir):
        version = add(store, state_dir, "cats", "one")
        path = canonical_path(state_dir, version.digest)
        path.rename(state_dir / "aside")
        assert store.missing() == [version]
        (state_dir / "aside").rename(path)
        assert store.missing() == []
        assert store.resolve(by_name("cats")) == version

    def test_such_a_version_can_be_removed_and_replaced(self, store, state_dir):
        for name in ("cats", "dogs"):
            canonical_path(state_dir, add(store, state_dir, name, name).digest).unlink()
        assert len(store.missing()) == 2
        store.remove(by_name("cats"))
        add(store, state_dir, "dogs", "other", replace=True)
        assert store.resolve(by_name("dogs")).number == 2

    def test_nothing_rolls_back_to_one(self, store, state_dir):
        first = add(store, state_dir, "cats", "one")
        second = add(store, state_dir, "cats", "two", replace=True)
        canonical_path(state_dir, first.digest).unlink()
        with pytest.raises(AdapterLoadError, match="version 3"):
            store.rollback(by_name("cats"))
        assert store.resolve(by_name("cats")) == second

    def test_a_file_that_went_before_it_was_registered(self, store, state_dir):
        adapter = staged(state_dir, "one")
        canonical_path(state_dir, adapter.source.digest).unlink()
        with pytest.raises(AdapterLoadError, match=naming("cats", "/cats")):
            store.register("m", "t", "cats", adapter, path="/cats")
        assert store.list("t") == []


class TestGarbage:
    def test_is_what_nothing_refers_to(self, store, state_dir):
        for content in ("one", "two", "three"):
            add(store, state_dir, "cats", content, replace=True)
        add(store, state_dir, "dogs", "four")
        store.remove(by_name("dogs"))
        put_file(state_dir, "orphan")
        put_file(state_dir, "running")
        collected = store.collect_garbage({digest_of("running")}, 0)
        assert files_in(state_dir) == ["one", "running", "three", "two"]
        assert (collected.num_files, collected.num_bytes) == (2, len("four" + "orphan"))

    def test_a_pinned_version_is_none_until_unpinned(self, store, state_dir):
        add(store, state_dir, "cats", "first")
        store.pin(by_name("cats"))
        for i in range(11):
            add(store, state_dir, "cats", str(i), replace=True)
        store.collect_garbage((), 0)
        assert files_in(state_dir) == sorted(["first", *map(str, range(1, 11))])
        store.unpin(by_name("cats"), 1)
        store.collect_garbage((), 0)
        assert "first" not in files_in(state_dir)

    def test_stays_for_a_while(self, store, clock, state_dir):
        young = put_file(state_dir, "young")
        for content in ("old", "dropped"):
            os.utime(put_file(state_dir, content), (0, 0))
        store.register("m", "t", "cats", staged(state_dir, "dropped"), path="/")
        os.utime(canonical_path(state_dir, digest_of("dropped")), (0, 0))
        store.remove(by_name("cats"))
        clock.now += 59
        assert store.collect_garbage((), 60).num_files == 1
        assert files_in(state_dir) == ["dropped", "young"]
        clock.now += 1
        store.collect_garbage((), 60)
        assert files_in(state_dir) == ["young"]
        os.utime(young, (0, 0))
        assert store.collect_garbage((), 60).num_files == 1

    def test_of_killed_writers_is_taken_too(self, store, state_dir):
        path = put_file(state_dir, "one")
        path.rename(path.with_name(f".{path.name}.4711.tmp"))
        assert store.collect_garbage((), 0).num_files == 1
        assert list(path.parent.iterdir()) == []

    def test_foreign_files_and_links_are_left_alone(self, store, state_dir, tmp_path):
        precious = tmp_path / "precious"
        precious.mkdir()
        target = precious / f"{'a' * 64}.safetensors"
        target.write_text("mine")
        folder = state_dir / "adapters"
        folder.mkdir()
        (folder / "aa").symlink_to(precious)
        (folder / "ab").mkdir()
        for name in ("notes.txt", "a.safetensors", f"{'A' * 64}.safetensors"):
            (folder / "ab" / name).write_text("")
        (folder / "ab" / f"{'b' * 64}.safetensors").symlink_to(target)
        assert store.collect_garbage((), 0).num_files == 0
        assert target.read_text() == "mine"
        assert len(list((folder / "ab").iterdir())) == 4

    def test_waits_for_others_that_use_the_files(self, store, state_dir):
        put_file(state_dir, "one")
        other = StateLock.use_files(state_dir)
        assert store.collect_garbage((), 0).is_refused
        assert files_in(state_dir) == ["one"]
        other.close()
        assert store.collect_garbage((), 0).num_files == 1

    def test_in_memory_there_is_none(self):
        assert AdapterStore().collect_garbage((), 0).num_files == 0


class TestOneServer:
    def test_a_second_one_is_refused_with_the_first_named(self, open_store, state_dir):
        open_store()
        with pytest.raises(ConfigError) as caught:
            AdapterStore.open(state_dir)
        assert f"process {os.getpid()}" in caught.value.message
        assert str(state_dir) in caught.value.message

    def test_a_second_one_may_follow(self, store, state_dir):
        store.close()
        AdapterStore.open(state_dir).close()

    def test_a_database_that_is_locked_by_another_program(self, store, state_dir):
        store.close()
        other = sqlite3.connect(state_dir / "adapters.sqlite3", timeout=0)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(ConfigError, match=naming("adapters.sqlite3")):
            AdapterStore.open(state_dir)
        other.close()
        AdapterStore.open(state_dir).close()

    def test_a_closed_store_returns_and_takes_nothing(self, store, state_dir):
        version = add(store, state_dir, "cats", "one")
        store.close()
        store.close()
        assert store.resolve(by_name("cats")) == version
        with pytest.raises(InternalError, match=naming("adapters.sqlite3")):
            store.remove(by_name("cats"))
        with pytest.raises(InternalError, match=naming("adapters.sqlite3")):
            store.history(by_name("cats"))
        assert store.resolve(by_name("cats")) == version


class TestBrokenDatabases:
    def test_one_of_another_schema(self, store, state_dir):
        store.close()
        with sqlite3.connect(state_dir / "adapters.sqlite3") as other:
            other.execute("PRAGMA user_version = 99")
        other.close()
        with pytest.raises(ConfigError, match=naming(99, 1)):
            AdapterStore.open(state_dir)

    def test_no_database_at_all(self, state_dir):
        state_dir.mkdir()
        (state_dir / "adapters.sqlite3").write_text("hello, this is not SQLite" * 100)
        for _ in range(2):  # the first pass released the lock
            with pytest.raises(ConfigError, match=naming("adapters.sqlite3")):
                AdapterStore.open(state_dir)

    def test_rows_that_cannot_be_read(self, store, state_dir):
        add(store, state_dir, "cats", "one")
        store.close()
        with sqlite3.connect(state_dir / "adapters.sqlite3") as other:
            other.execute("UPDATE versions SET staged = '{}'")
        other.close()
        with pytest.raises(ConfigError, match=naming("source")):
            AdapterStore.open(state_dir)

    def test_a_state_directory_that_cannot_be_made(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(ConfigError, match=naming("state")):
            AdapterStore.open(tmp_path / "file" / "state")

    def test_a_folder_in_its_place(self, state_dir):
        (state_dir / "adapters.sqlite3").mkdir(parents=True)
        with pytest.raises(ConfigError, match=naming("adapters.sqlite3")):
            AdapterStore.open(state_dir)


def test_a_transaction_is_all_or_nothing(store, state_dir):
    version = add(store, state_dir, "cats", "one")
    database = AdapterDatabase(":memory:")

    def fail_midway():
        with database.transaction():
            database.put(version)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail_midway()
    assert database.names.versions() == database.history(version) == []
    with database.transaction():
        database.put(version)
    assert database.names.versions() == database.history(version) == [version]
    database.close()


def test_many_threads_change_it_at_once(store, open_store, state_dir):
    adapters = [staged(state_dir, str(i)) for i in range(4)]

    def work(number):
        for adapter in adapters * 3:
            store.register("m", "t", f"own{number}", adapter, path="/", replace=True)
            store.register("m", "t", "shared", adapter, path="/", replace=True)
            assert store.resolve(by_name(f"own{number}")).source == adapter.source

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    before = store.list("t"), store.history(by_name("shared"))
    assert [v.number for v in before[0][:4]] == [12] * 4
    again = open_store()
    assert (again.list("t"), again.history(by_name("shared"))) == before


class TestAStateDirectoryThatIsGone:
    @pytest.mark.parametrize("is_made_again", [False, True])
    def test_nothing_is_acknowledged(self, store, state_dir, is_made_again):
        store.register("base", "t", "old", staged(state_dir, "old"), path="/old")
        shutil.rmtree(state_dir)
        if is_made_again:
            AdapterStore.open(state_dir).close()
        new = staged(state_dir, "new")
        with pytest.raises(StorageUnavailableError, match=naming("adapters.sqlite3")):
            store.register("base", "t", "new", new, path="/new")
        with pytest.raises(StorageUnavailableError, match=naming("adapters.sqlite3")):
            store.remove(AdapterRef("base", "t", ByName("old")))
        assert [version.name for version in store.list("t")] == ["old"]

    def test_nor_if_it_goes_during_the_write(self, store, state_dir, monkeypatch):
        put = AdapterDatabase.put

        def put_and_lose(self, version):
            put(self, version)
            shutil.rmtree(state_dir)

        monkeypatch.setattr(AdapterDatabase, "put", put_and_lose)
        with pytest.raises(StorageUnavailableError, match=naming("adapters.sqlite3")):
            store.register("base", "t", "new", staged(state_dir, "new"), path="/new")
        assert store.list("t") == []

    def test_every_verb_is_refused_alike(self, store, state_dir):
        kept = staged(state_dir, "old")
        store.register("base", "t", "old", kept, path="/old")
        store.register("base", "t", "old", staged(state_dir, "newer"), path="/newer", replace=True)
        before = store.list("t")
        shutil.rmtree(state_dir)
        old = AdapterRef("base", "t", ByName("old"))
        for change in (
            lambda: store.register("base", "t", "old", kept, path="/x", replace=True),
            lambda: store.remove(old),
            lambda: store.pin(old, 1),
            lambda: store.rollback(old),
            lambda: store.alias(old, "other"),
        ):
            with pytest.raises((StorageUnavailableError, AdapterLoadError)):
                change()
        assert store.list("t") == before

    def test_a_database_that_is_read_only(self, store, state_dir):
        store.register("base", "t", "old", staged(state_dir, "old"), path="/old")
        store._database._connection.execute("PRAGMA query_only = ON")
        with pytest.raises(StorageUnavailableError, match="readonly") as raised:
            store.remove(AdapterRef("base", "t", ByName("old")))
        assert raised.value.retry_after_seconds
        assert [version.name for version in store.list("t")] == ["old"]

    def test_the_log_alone_is_enough(self, store, state_dir):
        (state_dir / "adapters.sqlite3-wal").unlink()
        with pytest.raises(StorageUnavailableError, match=naming("adapters.sqlite3")):
            store.register("base", "t", "new", staged(state_dir, "new"), path="/new")


def test_the_names_of_new_folders_are_on_the_disk(tmp_path, monkeypatch):
    synced = []
    fsync = os.fsync

    def note(descriptor):
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    write_atomically(tmp_path / "a" / "b" / "file", [b"x"])
    assert set(synced) >= {str(tmp_path / "a" / "b"), str(tmp_path / "a"), str(tmp_path)}


ON_A_FULL_DISK = """
import sys
from pathlib import Path
from loraplex.core.errors import StorageFullError
from test_store_durable import AdapterRef, AdapterStore, ByName, staged

disk = Path(sys.argv[1])
store = AdapterStore.open(disk / "state")
for i in range(100):
    store.register("base", "t", str(i), staged(disk / "state", str(i)), path=str(i))
late = staged(disk / "state", "late")
with open(disk / "filling", "wb", buffering=0) as file:
    try:
        while True:
            file.write(bytes(512))
    except OSError:
        pass
try:
    for i in range(100):
        store.register("base", "t", f"late {i}", late, path="late")
    raise SystemExit("the disk is not full")
except StorageFullError as error:
    assert "disk is full" in error.message, error.message
for i in range(50):
    store.remove(AdapterRef("base", "t", ByName(str(i))))
store.close()
assert len(AdapterStore.open(disk / "state").list("t")) >= 50
"""


def test_names_are_removed_on_a_full_disk(tmp_path):
    """A small file system in memory, in a mount namespace of the subprocess."""
    namespace = ["unshare", "-Urm", "sh", "-c"]
    mount = f"mount -t tmpfs -o size=4m tmpfs {tmp_path}"
    if not shutil.which("unshare") or subprocess.run([*namespace, mount], check=False).returncode:
        pytest.skip("no mount namespaces here")
    program = [sys.executable, "-c", ON_A_FULL_DISK, str(tmp_path)]
    path = os.pathsep.join([*sys.path, str(Path(__file__).parent)])
    command = f'{mount} && exec "$0" "$@"'
    subprocess.run(
        [*namespace, command, *program], check=True, env=os.environ | {"PYTHONPATH": path}
    )
