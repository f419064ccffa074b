"""What is remembered of files that were read: it must never be wrong, and may be lost."""

from pathlib import Path

import pytest

from loraplex.adapters.seen_files import SeenFiles, identities_of


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(b"1")
    return path


def test_the_same_files(file: Path, tmp_path: Path) -> None:
    seen, identities = SeenFiles(tmp_path), identities_of([file])
    assert seen.find(identities) is None
    seen.remember(identities, "abc")
    assert seen.find(identities) == "abc"
    assert seen.find(identities, "another use") is None


def test_a_file_that_changed(file: Path, tmp_path: Path) -> None:
    seen = SeenFiles(tmp_path)
    seen.remember(identities_of([file]), "abc")
    file.write_bytes(b"12")
    assert seen.find(identities_of([file])) is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"version": "\xff"}'])
def test_a_damaged_note_is_forgotten(file: Path, tmp_path: Path, content: bytes) -> None:
    seen, identities = SeenFiles(tmp_path), identities_of([file])
    seen.remember(identities, "abc")
    (note,) = (tmp_path / "seen").glob("*/*.json")
    note.write_bytes(content)
    assert seen.find(identities) is None
