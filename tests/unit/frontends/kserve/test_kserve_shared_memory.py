import os
import socket

import pytest

from loraplex.core.errors import InvalidRequestError, PermissionDeniedError, RequestError
from loraplex.frontends.kserve import shared_memory
from loraplex.frontends.kserve.errors import AlreadyExistsError, NotFoundError
from loraplex.frontends.kserve.shared_memory import MemoryRegion, Place, SharedMemory, TenantMemory
from support.naming import naming, refused


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "shm"
    folder.mkdir()
    (folder / "key").write_bytes(bytes(range(100)))
    (tmp_path / "outside").write_bytes(b"secret")
    return folder


@pytest.fixture
def memory(folder):
    memory = SharedMemory(folder)
    yield memory
    memory.close()


def test_a_region_is_a_window(memory, folder):
    memory.register("t", "r", "/key", 10, 20)
    assert memory.read("t", Place("r", 0, 3)) == bytes([10, 11, 12])
    assert memory.read("t", Place("r", 17, 3)) == bytes([27, 28, 29])
    memory.write("t", Place("r", 5, 4), b"ab")
    assert (folder / "key").read_bytes()[14:18] == bytes([14]) + b"ab" + bytes([17])
    assert memory.status("t") == memory.status("t", "r") == [MemoryRegion("r", "/key", 10, 20)]


@pytest.mark.parametrize(
    "key",
    [
        "/../outside",
        "../outside",
        "//key",
        "/a/key",
        "",
        "/",
        ".",
        "..",
        "k\0",
        "k" * 256,
        "é" * 128,
    ],
)
def test_what_is_no_name_in_the_folder_is_no_key(memory, key):
    with refused(InvalidRequestError, "key", "1 to 255", param="key"):
        memory.register("t", "r", key, 0, 1)
    assert memory.status("t") == []


def test_only_plain_files_are_opened(memory, folder):
    (folder / "link").symlink_to(folder.parent / "outside")
    (folder / "folder").mkdir()
    os.mkfifo(folder / "pipe")
    bound = socket.socket(socket.AF_UNIX)
    bound.bind(str(folder / "socket"))
    for name in ("link", "folder", "pipe", "socket", "nope"):
        # Triton's text.
        with pytest.raises(InvalidRequestError, match="Unable to open shared memory region"):
            memory.register("t", "r", name, 0, 1)
    bound.close()


@pytest.mark.parametrize(("offset", "size"), [(0, 101), (100, 1), (-1, 5), (0, 0), (0, -1)])
def test_a_region_lies_within_its_file(memory, offset, size):
    with refused(InvalidRequestError, offset, size, 100, "'r'", param="byte_size"):
        memory.register("t", "r", "key", offset, size)


def test_names_are_a_tenants_own(memory):
    memory.register("t", "r", "key", 0, 10)
    # Triton's text.
    with pytest.raises(AlreadyExistsError, match="'r' already in manager"):
        memory.register("t", "r", "key", 0, 10)
    with refused(PermissionDeniedError, "'key'"):
        memory.register("other", "q", "key", 0, 10)
    with pytest.raises(PermissionDeniedError):
        memory.register("other", "q", "/key", 0, 10)
    with pytest.raises(NotFoundError):
        memory.read("other", Place("r", 0, 1))
    memory.unregister("other", "r")
    assert memory.status("other") == []
    memory.unregister("t")
    memory.register("other", "q", "key", 0, 10)


def test_unregistering(memory):
    for name in ("a", "b", "c"):
        memory.register("t", name, "key", 0, 10)
    memory.unregister("t", "b")
    memory.unregister("t", "nope")
    assert [region.name for region in memory.status("t")] == ["a", "c"]
    # Triton's text.
    with pytest.raises(NotFoundError, match="Unable to find system shared memory region: 'b'"):
        memory.status("t", "b")
    memory.unregister("t")
    assert memory.status("t") == []


def test_files_are_closed(folder):
    memory = SharedMemory(folder)
    before = len(os.listdir("/proc/self/fd"))
    memory.register("t", "r", "key", 0, 10)
    with pytest.raises(InvalidRequestError):
        memory.register("t", "q", "key", 0, 1000)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    memory.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_client_that_shrinks_its_memory_gets_an_error(memory, folder):
    memory.register("t", "r", "key", 0, 100)
    os.truncate(folder / "key", 50)
    with refused(InvalidRequestError, "'r'", "shorter"):
        memory.read("t", Place("r", 40, 20))
    with refused(InvalidRequestError, "'r'", "shorter"):
        memory.write("t", Place("r", 40, 20), bytes(20))
    assert (folder / "key").stat().st_size == 50


def test_limits(memory, monkeypatch):
    monkeypatch.setattr(shared_memory, "MAX_REGIONS", 2)
    memory.register("t", "a", "key", 0, 10)
    memory.register("t", "b", "key", 0, 10)
    with refused(InvalidRequestError, 2):
        memory.register("t", "c", "key", 0, 10)
    for name in ("", "n" * 256, "a\nb"):
        with pytest.raises(RequestError, match=naming(repr(name[:40]), "1 to 255")):
            memory.register("t", name, "key", 0, 10)


def test_what_one_request_reads_is_limited(memory, monkeypatch):
    monkeypatch.setattr(shared_memory, "MAX_REQUEST_BYTES", 15)
    memory.register("t", "r", "key", 0, 10)
    view = TenantMemory(memory, "t")
    view.read(Place("r", 0, 10))
    with refused(InvalidRequestError, 15):
        view.read(Place("r", 0, 10))
