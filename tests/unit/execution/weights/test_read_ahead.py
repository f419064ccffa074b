"""Files are read in their order, ahead of those who look at a mapping."""

import queue
from pathlib import Path

import pytest

from loraplex.execution.weights import read_ahead
from loraplex.execution.weights.read_ahead import ReadAhead


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(read_ahead, "_PIECE_BYTES", 4)
    monkeypatch.setattr(read_ahead, "_AHEAD_BYTES", 8)
    path = tmp_path / "file"
    path.write_bytes(bytes(22))
    return path


def test_it_reads_a_little_ahead_and_what_is_cached_not_again(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probed: queue.Queue[int] = queue.Queue()
    read: list[int] = []

    def is_cached(descriptor: int, position: int) -> bool:
        probed.put(position)
        return position == 4

    def preadv(descriptor: int, buffers: list[bytearray], position: int) -> int:
        read.append(position)
        return max(0, min(len(buffers[0]), 22 - position))

    monkeypatch.setattr(read_ahead, "_is_cached", is_cached)
    monkeypatch.setattr("os.preadv", preadv)
    reading = ReadAhead(file)
    reading.want(1)
    assert [probed.get(timeout=60) for _ in range(3)] == [0, 4, 8]
    reading.want(5)
    assert probed.get(timeout=60) == 12
    reading.close()
    assert probed.empty()
    assert read == [0, 8, 12]


def test_it_ends_with_the_file(file: Path) -> None:
    reading = ReadAhead(file)
    reading.want(1000)
    reading._thread.join(60)
    assert not reading._thread.is_alive()
    reading.close()


def test_a_close_ends_it_before(file: Path) -> None:
    ReadAhead(file).close()
