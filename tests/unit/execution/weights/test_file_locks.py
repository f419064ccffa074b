"""Files in use are found by their locks."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from loraplex.execution.weights.file_locks import holders, unused, use


@pytest.fixture
def used(tmp_path: Path) -> Iterator[Path]:
    file = tmp_path / "used"
    file.touch()
    descriptor = os.open(file, os.O_RDONLY)
    use(descriptor)
    yield file
    os.close(descriptor)


def is_unused(*files: Path) -> bool:
    with unused(files) as result:
        return result


def test_a_used_file(used: Path) -> None:
    assert not is_unused(used)
    assert holders([used]) == (os.getpid(),)


def test_unused_files(tmp_path: Path) -> None:
    (tmp_path / "free").touch()
    files = [tmp_path / "free", tmp_path / "missing"]
    assert is_unused(*files)
    assert is_unused(*files), "the first look left no lock"
    assert holders(files) == ()


def test_one_used_file_is_enough(tmp_path: Path, used: Path) -> None:
    (tmp_path / "free").touch()
    assert not is_unused(tmp_path / "free", used)


def test_a_use_during_a_removal_waits(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with unused([file]) as result:
        assert result
        assert not is_unused(file)


def test_lines_of_the_kernel(used: Path, tmp_path: Path) -> None:
    inode = used.stat().st_ino
    locks = tmp_path / "locks"
    locks.write_text(
        f"1: FLOCK  ADVISORY  READ 12 08:01:{inode} 0 EOF\n"
        f"1: -> FLOCK  ADVISORY  WRITE 13 08:01:{inode} 0 EOF\n"
        f"2: POSIX  ADVISORY  WRITE 14 08:01:{inode} 0 EOF\n"
        f"3: FLOCK  ADVISORY  WRITE 15 08:01:{inode + 1} 0 EOF\n"
        f"4: FLOCK  ADVISORY  WRITE -1 08:01:{inode} 0 EOF\n"
    )
    assert holders([used], locks) == (12,)
    assert holders([used], tmp_path / "missing") == ()
    with contextlib.suppress(FileNotFoundError):
        assert holders([tmp_path / "missing"]) == ()
