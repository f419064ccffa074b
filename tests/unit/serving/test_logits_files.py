"""Files of logits are read once, and none of them is left."""

import tempfile

import pytest

from loraplex.core.errors import EngineRestartedError
from loraplex.core.output import EngineOutput, Logits, LogitsFile, SequenceDelta
from loraplex.serving.logits_files import (
    LogitsFolder,
    discard,
    files_of,
    first_rows,
    read_and_delete,
)
from support.naming import naming


@pytest.fixture
def make(tmp_path):
    def file(name: str, data: bytes = b"abcd", num_rows: int = 1) -> LogitsFile:
        path = tmp_path / name
        path.write_bytes(data)
        return LogitsFile(str(path), num_rows)

    return file


def test_what_was_read_is_deleted(make, tmp_path):
    first, second = make("a", b"1111"), make("b", b"22222222", 2)
    logits = read_and_delete([first, second])
    assert logits == {first.path: Logits(b"1111", 1), second.path: Logits(b"22222222", 2)}
    assert list(tmp_path.iterdir()) == []


def test_a_lost_file_is_an_error_and_the_others_are_deleted(make, tmp_path):
    lost = LogitsFile(str(tmp_path / "lost"), 1)
    with pytest.raises(EngineRestartedError, match=naming("logits")):
        read_and_delete([lost, make("b")])
    assert list(tmp_path.iterdir()) == []


def test_every_file_of_an_output_is_found_and_discarded(make, tmp_path):
    prompt, new = make("prompt"), make("new")
    output = EngineOutput(
        1, (SequenceDelta(0, (5,), logits=(new,)),), prompt_logits=(prompt,), finished=True
    )
    assert set(files_of([output])) == {prompt, new}
    discard([output])
    assert list(tmp_path.iterdir()) == []
    discard([output])  # it is no matter that they are gone


def test_first_rows():
    pieces = (Logits(b"aabb", 2), Logits(b"cc", 1))
    assert first_rows(pieces, 3) == pieces
    assert first_rows(pieces, 2) == (Logits(b"aabb", 2),)
    assert first_rows(pieces, 1) == (Logits(b"aa", 1),)
    assert first_rows(pieces, 0) == ()


def test_kept_files_outlive_the_engines_folder(make, tmp_path, tmp_path_factory, monkeypatch):
    temporary = tmp_path_factory.mktemp("t")
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    folder = LogitsFolder()
    plain = EngineOutput(1, (SequenceDelta(0, (5,)),))
    assert folder.keep(plain) is plain
    assert list(temporary.iterdir()) == []
    deltas = (SequenceDelta(0, (5,), logits=(make("new", b"new"),)), SequenceDelta(1, (6,)))
    kept = folder.keep(EngineOutput(1, deltas, prompt_logits=(make("prompt", b"old", 3),)))
    assert list(tmp_path.iterdir()) == []
    assert [delta.token_ids for delta in kept.deltas] == [(5,), (6,)]
    assert set(read_and_delete(files_of([kept])).values()) == {Logits(b"new", 1), Logits(b"old", 3)}
    folder.keep(EngineOutput(2, prompt_logits=(make("unread"),)))
    folder.close()
    assert list(temporary.iterdir()) == []


def test_a_file_that_cannot_be_kept_is_reported_by_its_reader(tmp_path):
    lost = LogitsFile(str(tmp_path / "lost"), 1)
    kept = LogitsFolder().keep(EngineOutput(1, prompt_logits=(lost,)))
    assert kept.prompt_logits == (lost,)
