"""Files of logits are read once, and none of them is left."""

import pytest

from loraplex.core.errors import EngineRestartedError
from loraplex.core.output import EngineOutput, Logits, LogitsFile, SequenceDelta
from loraplex.serving.logits_files import discard, files_of, first_rows, read_and_delete


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
    with pytest.raises(EngineRestartedError, match="send it once more"):
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
