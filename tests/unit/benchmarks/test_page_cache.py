import os

from comparison.page_cache import drop_from_page_cache


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
