import os

import pytest
from comparison import page_cache
from comparison.page_cache import drop_from_page_cache, wait_for_files


def test_large_files_are_dropped_and_keep_their_content(monkeypatch, tmp_path):
    content = os.urandom(2 << 20)
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "weights").write_bytes(content)
    (tmp_path / "config").write_bytes(b"{}")
    (tmp_path / "link").symlink_to(tmp_path / "deep" / "weights")
    dropped = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *arguments: dropped.append(arguments))
    drop_from_page_cache(tmp_path)
    assert [arguments[1:] for arguments in dropped] == [(0, 0, os.POSIX_FADV_DONTNEED)]
    monkeypatch.undo()
    drop_from_page_cache(tmp_path)
    assert (tmp_path / "deep" / "weights").read_bytes() == content


def test_a_system_without_the_call_is_no_error(monkeypatch, tmp_path):
    monkeypatch.delattr(os, "posix_fadvise", raising=False)
    drop_from_page_cache(tmp_path)


async def test_waits_until_no_file_changes(monkeypatch, tmp_path):
    file = tmp_path / "deep" / "packed"
    file.parent.mkdir()
    sizes = iter([10, 20, 20])

    async def sleep(_seconds):
        file.write_bytes(bytes(next(sizes)))
        os.utime(file, (1, 1))

    monkeypatch.setattr(page_cache.asyncio, "sleep", sleep)
    await wait_for_files(tmp_path)
    assert next(sizes, None) is None


async def test_files_that_always_change_are_waited_for_in_vain(monkeypatch, tmp_path):
    monkeypatch.setattr(page_cache, "_MAX_WAIT_SECONDS", 0.0)

    async def sleep(_seconds):
        pytest.fail("the time is over")

    monkeypatch.setattr(page_cache.asyncio, "sleep", sleep)
    await wait_for_files(tmp_path)
