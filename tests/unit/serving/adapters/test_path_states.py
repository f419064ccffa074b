"""States of paths, by which a scan is not repeated without a change."""

import os

import pytest

from loraplex.serving.adapters.path_states import PathStates


@pytest.fixture
def file(tmp_path):
    """A file in a folder, both last changed long ago."""
    file = tmp_path / "folder" / "file"
    file.parent.mkdir()
    file.write_text("one")
    for path in (file, file.parent):
        os.utime(path, (1, 1))
    return file


def noted(*paths):
    states = PathStates()
    for path in paths:
        states.note(path)
    return states


def test_nothing_changed(file):
    states = noted(file, file.parent, file.parent / "none", "a\0b")
    assert states.are_unchanged()
    assert states.are_unchanged()


@pytest.mark.parametrize(
    "change",
    [
        lambda file: file.write_text("two"),
        lambda file: file.unlink(),
        lambda file: file.parent.chmod(0o700),
        lambda file: (file.parent / "none").write_text("now there"),
        lambda file: (file.parent / "another").write_text(""),
    ],
)
def test_a_change(file, change):
    states = noted(file, file.parent, file.parent / "none")
    change(file)
    assert not states.are_unchanged()


def test_a_path_that_changed_just_now_may_change_again_unseen(file):
    """Two changes within one tick of the file system's clock have the same time."""
    os.utime(file.parent)
    assert not noted(file, file.parent).are_unchanged()


def test_the_state_before_the_first_reading_counts(file):
    states = noted(file)
    file.write_text("two")
    states.note(file)
    assert not states.are_unchanged()


def test_the_status(file):
    assert PathStates().note(file).st_size == 3
    assert PathStates().note(file.parent / "none") is None
