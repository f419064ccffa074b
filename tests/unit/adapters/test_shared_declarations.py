"""Declarations in a shared folder or bucket: what is valid, who wins, what is left out."""

import errno
import json
import logging
import os
import sys
import threading
from typing import ClassVar

import msgspec
import pytest

from loraplex.adapters.declaration import MAX_DOCUMENT_BYTES, Declaration, read_declaration
from loraplex.adapters.declaration_places import FolderPlace, ObjectPlace, open_place
from loraplex.adapters.shared_declarations import (
    KEPT_VERSIONS,
    REMOVED_SECONDS,
    SharedDeclarations,
)
from loraplex.core.errors import (
    AdapterExistsError,
    AdapterLoadError,
    ConfigError,
    InvalidAdapterError,
    PermissionDeniedError,
    UnsupportedFeatureError,
)
from support.naming import naming, refused

URI = "/adapters/zh"


def declared(name="zh", version=1, **fields):
    return Declaration(**{"name": name, "version": version, "uri": URI, "model": "base"} | fields)


@pytest.fixture(params=["folder", "bucket"])
def open_shared(request, tmp_path, monkeypatch):
    """A function () -> SharedDeclarations: each is another server with the same place."""
    if request.param == "bucket":
        memory = pytest.importorskip("fsspec.implementations.memory")

        class Bucket(memory.MemoryFileSystem):
            """Exclusive as S3 is; it lists without a cache."""

            protocol = ("s3",)
            store: ClassVar = {}
            pseudo_dirs: ClassVar = [""]

            @classmethod
            def _strip_protocol(cls, path):
                return "/" + path.removeprefix("s3://").strip("/")

        monkeypatch.setitem(sys.modules["fsspec.registry"]._registry, "s3", Bucket)
        place = "s3://bucket/truth"
    else:
        place = str(tmp_path)

    def make(max_documents=100, **options):
        return SharedDeclarations(open_place(place), place, max_documents, **options)

    return make


@pytest.fixture
def put(tmp_path):
    """A function (file name, body) which writes a document as a person does."""

    def write(name, body):
        text = body if isinstance(body, str | bytes) else json.dumps(body)
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())

    return write


@pytest.fixture
def folder(tmp_path):
    return SharedDeclarations(FolderPlace(tmp_path), str(tmp_path), 100)


def names_of(valid):
    return {name: one.version for (_, _, name), one in valid.items()}


def test_one_server_sees_what_another_declares(open_shared):
    one, other = open_shared(), open_shared()
    assert other.read() == {}
    one.write(declared(digest="abc", aliases=("cn",)))
    (seen,) = other.read().values()
    assert seen == declared(digest="abc", aliases=("cn",))
    other.write(declared(version=2, is_removed=True))
    assert one.read()["base", "default", "zh"].is_removed


def test_of_two_writers_of_one_version_one_wins_and_the_other_learns_both(open_shared):
    one, other = open_shared(), open_shared()
    one.write(declared(digest="a" * 64))
    other.read()
    one.write(declared(version=2, digest="b" * 64))
    with refused(AdapterExistsError, "zh", "version 2", "bbbbbbbbbbbb", param="name"):
        other.write(declared(version=2, digest="c" * 64))
    assert other.read()["base", "default", "zh"].digest == "b" * 64
    with refused(AdapterExistsError, "zh", "version 1", "version 2", param="name"):
        other.write(declared(version=1))


def test_writers_at_the_same_time(tmp_path):
    servers = [SharedDeclarations(FolderPlace(tmp_path), "f", 100) for _ in range(8)]
    start, results = threading.Barrier(len(servers)), []

    def write(number, server):
        start.wait()
        try:
            server.write(declared(digest=str(number)))
            results.append(number)
        except AdapterExistsError:
            pass

    threads = [threading.Thread(target=write, args=one) for one in enumerate(servers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = results
    assert {server.read()["base", "default", "zh"].digest for server in servers} == {str(winner)}
    assert len(list(tmp_path.iterdir())) == 1


def test_a_writer_far_behind_does_not_bring_an_old_version_back(open_shared, tmp_path):
    late, busy = open_shared(), open_shared()
    late.write(declared())
    for version in range(2, KEPT_VERSIONS + 5):
        busy.write(declared(version=version))
    assert len(busy._place.documents()) == KEPT_VERSIONS
    with refused(
        AdapterExistsError, "version 2", f"version {KEPT_VERSIONS + 4}", "zh", param="name"
    ):
        late.write(declared(version=2))
    assert names_of(late.read()) == {"zh": KEPT_VERSIONS + 4}


def test_documents_of_unloaded_adapters_go_after_a_week(open_shared):
    now = 1e9
    server = open_shared(unix_seconds=lambda: now)
    server.write(declared())
    server.write(declared(version=2, is_removed=True, created=int(now)))
    server.write(declared("de"))
    assert names_of(server.read()) == {"zh": 2, "de": 1}
    now += REMOVED_SECONDS + 1
    server.write(declared("de", 2))
    assert names_of(open_shared().read()) == {"de": 2}


def test_the_greatest_version_is_valid_whatever_its_document_is_named(folder, put):
    put("anything.json", {"name": "zh", "version": 3, "uri": "s3://bucket/zh"})
    put("b.json", {"name": "zh", "version": 2, "uri": URI})
    put("c.json", {"name": "zh", "version": 3, "uri": URI})
    (valid,) = folder.read("base").values()
    assert valid.uri == "s3://bucket/zh"
    assert valid.model == "base"
    folder.write(declared(version=4))
    assert names_of(folder.read("base")) == {"zh": 4}


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b"{", ("truncated", "bad.json")),
        (b"\xff\xfe", ("bad.json",)),
        (b"[" * 50000, ("bad.json",)),
        ({"name": "../../etc", "version": 1, "uri": URI}, ("bad.json", "../../etc")),
        ({"name": "a\nb", "version": 1, "uri": URI}, ("U+000A", "bad.json")),
        ({"name": "", "version": 1, "uri": URI}, (1, 256, "bad.json")),
        ({"name": "zh", "version": 0, "uri": URI}, ("$.version", "bad.json")),
        ({"name": "zh", "version": 1 << 60, "uri": URI}, ("$.version", "bad.json", 2**53)),
        ({"name": "zh", "version": 1}, ("uri", "bad.json", "zh")),
        ({"name": "zh", "version": 1, "uri": "zh"}, ("URL", "bad.json", "zh")),
        ({"name": "zh", "version": 1, "uri": "ftp://host/zh"}, ("ftp://", "bad.json")),
        ({"name": "zh", "version": 1, "uri": URI, "task_id": -1}, ("bad.json", "task id", -1)),
        ({"name": "zh", "version": 1, "uri": URI, "aliases": ["a/../b"]}, ("bad.json", "a/../b")),
        (
            {"name": "zh", "version": 1, "uri": URI, "aliases": ["a"] * 65},
            ("$.aliases", "bad.json"),
        ),
        ({"name": "zh", "version": 1, "uri": URI, "url": URI}, ("url", "bad.json")),
        (
            {"name": "zh", "version": 1, "uri": URI, "aliases": ["a" * MAX_DOCUMENT_BYTES]},
            ("bad.json",),
        ),
    ],
)
def test_a_bad_document_is_left_out_by_name(folder, put, caplog, body, named):
    put("good.json", {"name": "de", "version": 1, "uri": URI})
    put("bad.json", body)
    assert names_of(folder.read()) == {"de": 1}
    (record,) = caplog.records
    assert "bad.json" in record.getMessage()
    with pytest.raises(ConfigError, match=naming(*named)):
        read_declaration(folder._place.read("bad.json"), "bad.json")


def test_a_document_that_is_being_written_means_what_it_meant(folder, put, caplog):
    put("zh.json", {"name": "zh", "version": 1, "uri": URI})
    folder.read()
    put("zh.json", '{"name": "zh", "ver')
    assert names_of(folder.read()) == {"zh": 1}
    assert "its earlier content stays in force" in caplog.text
    put("zh.json", {"name": "zh", "version": 2, "uri": URI})
    assert names_of(folder.read()) == {"zh": 2}


def test_a_written_document_has_the_version_of_its_name(folder, tmp_path, caplog):
    folder.write(declared())
    (document,) = tmp_path.iterdir()
    document.rename(tmp_path / document.name.replace(".1.json", ".7.json"))
    assert folder.read() == {}
    assert "its name has version 7" in caplog.text


def test_only_changed_documents_are_read_again(folder, put, monkeypatch):
    put("zh.json", {"name": "zh", "version": 1, "uri": URI})
    put("de.json", {"name": "de", "version": 1, "uri": URI})
    for name in ("zh.json", "de.json"):
        os.utime(folder._place._folder / name, (1, 1))
    before = folder.read()
    reads = []
    read = folder._place.read
    monkeypatch.setattr(folder._place, "read", lambda name: reads.append(name) or read(name))
    assert folder.read() is before
    put("de.json", {"name": "de", "version": 2, "uri": URI})
    assert names_of(folder.read()) == {"zh": 1, "de": 2}
    assert reads == ["de.json"]


def test_a_change_within_the_resolution_of_the_file_system_is_seen(folder, put):
    put("zh.json", {"name": "zh", "version": 1, "uri": URI})
    folder.read()
    status = (folder._place._folder / "zh.json").stat()
    put("zh.json", {"name": "zh", "version": 2, "uri": URI})
    os.utime(folder._place._folder / "zh.json", ns=(status.st_atime_ns, status.st_mtime_ns))
    assert names_of(folder.read()) == {"zh": 2}


def test_links_out_of_the_folder_pipes_and_hidden_files_are_no_documents(
    folder, put, tmp_path_factory, tmp_path
):
    put("zh.json", {"name": "zh", "version": 1, "uri": URI})
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "de.json"
    elsewhere.write_text(json.dumps({"name": "de", "version": 1, "uri": URI}))
    (tmp_path / "de.json").symlink_to(elsewhere)
    (tmp_path / "inside.json").symlink_to("zh.json")
    (tmp_path / "gone.json").symlink_to("nothing.json")
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "folder.json").mkdir()
    put(".hidden.json", {"name": "fr", "version": 1, "uri": URI})
    put("readme.txt", "text")
    assert names_of(folder.read()) == {"zh": 1}


@pytest.fixture
def fail_at(monkeypatch):
    """Call it with the name of a function of os, of a file, and an error number."""

    def fail(function, file_name, number):
        real = getattr(os, function)

        def failing(path, *args, **kwargs):
            if os.path.basename(os.fspath(path)) == file_name:
                raise OSError(number, os.strerror(number), path)
            return real(path, *args, **kwargs)

        monkeypatch.setattr(os, function, failing)

    return fail


def test_a_link_to_itself_is_left_out_and_named_once(folder, put, tmp_path, caplog):
    put("zh.json", {"name": "zh", "version": 1, "uri": URI})
    (tmp_path / "loop.json").symlink_to("loop.json")
    for _ in range(3):
        assert names_of(folder.read()) == {"zh": 1}
    (record,) = caplog.records
    assert "loop.json" in record.getMessage()
    folder.write(declared("de"))
    assert names_of(folder.read()) == {"zh": 1, "de": 1}


@pytest.mark.parametrize("number", [errno.EACCES, errno.ELOOP, errno.EPERM])
def test_a_document_that_cannot_be_opened_means_what_it_meant(
    folder, put, caplog, fail_at, monkeypatch, number
):
    put("zh.json", {"name": "zh", "version": 1, "uri": URI})
    put("de.json", {"name": "de", "version": 1, "uri": URI})
    folder.read()
    with monkeypatch.context():
        fail_at("open", "de.json", number)
        put("de.json", {"name": "de", "version": 2, "uri": URI})
        put("zh.json", {"name": "zh", "version": 2, "uri": URI})
        for _ in range(3):
            assert names_of(folder.read()) == {"zh": 2, "de": 1}
    (record,) = caplog.records
    assert os.strerror(number) in record.getMessage()
    monkeypatch.undo()
    assert names_of(folder.read()) == {"zh": 2, "de": 2}


@pytest.mark.parametrize("number", [errno.EACCES, errno.ELOOP, errno.ENAMETOOLONG, errno.EIO])
def test_a_document_without_a_state_is_left_out(folder, put, tmp_path, caplog, fail_at, number):
    put("zh.json", {"name": "zh", "version": 1, "uri": URI})
    (tmp_path / "link.json").symlink_to("zh.json")
    fail_at("readlink", "link.json", number)
    assert names_of(folder.read()) == {"zh": 1}
    (record,) = caplog.records
    assert "link.json" in record.getMessage()
    assert os.strerror(number) in record.getMessage()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO])
def test_a_place_that_fails_takes_no_name_away(folder, put, fail_at, number):
    put("zh.json", {"name": "zh", "version": 1, "uri": URI})
    fail_at("open", "zh.json", number)
    with pytest.raises(AdapterLoadError, match=os.strerror(number)):
        folder.read()


def test_a_folder_that_is_gone_or_empty_takes_no_name_away(folder, put, tmp_path):
    put("zh.json", {"name": "zh", "version": 1, "uri": URI})
    folder.read()
    (tmp_path / "zh.json").unlink()
    with pytest.raises(AdapterLoadError, match=naming(tmp_path)):
        folder.read()
    tmp_path.rmdir()
    with pytest.raises(AdapterLoadError, match=naming("FileNotFoundError", "[Errno 2]")):
        folder.read()
    tmp_path.mkdir()
    put("de.json", {"name": "de", "version": 1, "uri": URI})
    assert names_of(folder.read()) == {"de": 1}


def test_more_documents_than_the_limit_change_nothing(open_shared):
    server, small = open_shared(), open_shared(max_documents=2)
    small.write(declared("a"))
    small.write(declared("b"))
    with pytest.raises(PermissionDeniedError, match="max_adapter_declarations"):
        small.write(declared("c"))
    small.write(declared("b", 2))
    server.write(declared("c"))
    with pytest.raises(AdapterLoadError, match=naming(3, 2, "max_adapter_declarations")):
        small.read()


def test_a_read_only_folder_refuses_by_name(folder, monkeypatch):
    def refuse(name, body):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(folder._place, "create", refuse)
    with pytest.raises(PermissionDeniedError, match=naming("zh", "read-only")):
        folder.write(declared())


def test_a_server_declares_no_path_that_others_cannot_read(folder):
    with refused(InvalidAdapterError, "URL", "./adapters/zh", param="path"):
        folder.write(declared(uri="./adapters/zh"))


def test_a_store_that_replaces_objects_is_refused(monkeypatch):
    class Careless:
        def __init__(self):
            self.objects = {}

        def invalidate_cache(self):
            pass

        def pipe_file(self, path, body, mode):
            self.objects[path] = body

        def rm_file(self, path):
            del self.objects[path]

        def ls(self, path, detail):
            return []

    careless = Careless()
    place = ObjectPlace.__new__(ObjectPlace)
    place._url, place._files, place._path, place._is_exclusive = "s3://b/t", careless, "b/t", False
    with pytest.raises(UnsupportedFeatureError, match=naming("s3://b/t")):
        SharedDeclarations(place, "s3://b/t", 10).write(declared())
    assert careless.objects == {}


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("/nowhere", ("/nowhere", "adapter_declarations")),
        ("https://host/x", ("https://host/x", "adapter_declarations")),
        ("s3://", ("s3://", "adapter_declarations")),
    ],
)
def test_a_place_that_cannot_be(url, named):
    with pytest.raises(ConfigError, match=naming(*named)):
        open_place(url)


def test_a_store_without_its_package_is_named(monkeypatch):
    fsspec = pytest.importorskip("fsspec")

    def missing(url):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(
        ConfigError, match=naming("adapter_declarations", "s3://", "loraplex[remote]")
    ):
        open_place("s3://bucket/truth")


def test_names_of_any_kind_become_names_of_files(folder, tmp_path):
    for name in ("a/b", "zh:v1", "語", "a" * 256, "A", "a", "a-b", "a_b"):
        folder.write(declared(name))
    assert len(folder.read()) == 8
    assert all(len(os.fsencode(path.name)) < 128 for path in tmp_path.iterdir())


def test_a_damaged_document_in_the_way_is_named(folder, tmp_path, caplog):
    caplog.set_level(logging.CRITICAL)
    (tmp_path / declared().file_name).write_text("{")
    with refused(AdapterExistsError, "version 1", "zh", param="name"):
        folder.write(declared())


def test_what_a_server_writes_reads_back(folder):
    declaration = declared(tenant="acme", task_id=7, digest="d", aliases=("x",), created=9)
    body = msgspec.json.encode(declaration)
    assert read_declaration(body, declaration.file_name) == declaration
