"""Start message of an engine process. The rest is tested with serving."""

import io
import subprocess
import sys

import pytest

from loraplex.engine.process import EngineStart, framed, read_framed

START = EngineStart("ipc:///tmp/x/engine", 2**64 - 1, b"\x00\xff" * 1000)


class Dribble(io.RawIOBase):
    """A pipe that gives a few bytes at a time."""

    def __init__(self, data: bytes) -> None:
        self._data = io.BytesIO(data)

    def read(self, size: int = -1) -> bytes:
        return self._data.read(min(size, 7))


def test_the_start_is_read_from_pieces():
    assert read_framed(Dribble(framed(START) + b"later"), EngineStart) == START


@pytest.mark.parametrize("num_bytes", [0, 3, 4, 100])
def test_serving_may_be_gone_before_it_said_all(num_bytes):
    with pytest.raises(EOFError):
        read_framed(Dribble(framed(START)[:num_bytes]), EngineStart)


def test_a_process_without_a_start_message_ends_quietly():
    command = [sys.executable, "-m", "support.fake_engine_process"]
    done = subprocess.run(command, input=b"", capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
