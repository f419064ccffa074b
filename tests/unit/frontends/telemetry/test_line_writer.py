"""Lines into a file that others move away, fill up, or do not read."""

import os

import pytest

from loraplex.core.errors import ConfigError
from loraplex.frontends.telemetry import line_writer
from loraplex.frontends.telemetry.line_writer import LineWriter
from support.eventually import eventually
from support.naming import naming


@pytest.fixture(autouse=True)
def _often(monkeypatch):
    monkeypatch.setattr(line_writer, "_LOOK_SECONDS", 0.01)


def test_lines_are_appended_in_order(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"before\n")
    log = LineWriter(str(path))
    for number in range(100):
        log.write(b"%d\n" % number)
    log.close()
    assert path.read_bytes() == b"before\n" + b"".join(b"%d\n" % n for n in range(100))
    assert log.num_dropped == 0


def test_a_new_file_is_not_for_everybody(tmp_path):
    LineWriter(str(tmp_path / "log")).close()
    assert os.stat(tmp_path / "log").st_mode & 0o007 == 0


@pytest.mark.parametrize("is_reported", [False, True])
def test_a_file_that_was_moved_away(tmp_path, is_reported, monkeypatch):
    path, old = tmp_path / "log", tmp_path / "log.1"
    log = LineWriter(str(path))
    log.write(b"one\n")
    assert eventually(lambda: path.read_bytes() == b"one\n")
    path.rename(old)
    if is_reported:
        log.reopen()
    assert eventually(path.exists)
    log.write(b"two\n")
    log.close()
    assert (old.read_bytes(), path.read_bytes()) == (b"one\n", b"two\n")


def test_reopening_a_file_that_exists(tmp_path):
    path = tmp_path / "log"
    log = LineWriter(str(path))
    log.write(b"one\n")
    log.reopen()
    log.write(b"two\n")
    log.close()
    assert path.read_bytes() == b"one\ntwo\n"


def test_no_caller_waits_for_a_slow_disk(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    log = LineWriter(str(fifo), max_waiting=10)
    for _ in range(5000):  # more than the pipe holds: a caller that waited would wait for ever
        log.write(b"x" * 999 + b"\n")
    assert eventually(lambda: log.num_dropped > 0)
    [family] = log.collect()
    assert family.samples[0].value == log.num_dropped
    os.close(reader)
    assert eventually(lambda: log.num_waiting == 0)
    log.close()


def test_a_full_disk(caplog):
    log = LineWriter("/dev/full")
    for _ in range(3):
        log.write(b"x\n")
        assert eventually(lambda: log.num_waiting == 0)
    log.close()
    assert log.num_dropped == 3
    assert caplog.text.count("cannot be written") == 1


def test_standard_output(capfdbinary):
    log = LineWriter("-")
    log.write(b"one\n")
    log.reopen()
    log.close()
    assert capfdbinary.readouterr().out == b"one\n"


def test_a_file_that_cannot_be(tmp_path):
    with pytest.raises(ConfigError, match=naming("access_log", tmp_path / "no" / "log")):
        LineWriter(str(tmp_path / "no" / "log"))


def test_a_disk_that_takes_a_part_of_a_line(tmp_path, caplog):
    path = tmp_path / "log"
    log = LineWriter(str(path))
    real, capacity = log._file, [7]

    class NearlyFull:
        def write(self, data):
            if capacity[0] == 0:
                raise OSError(28, "No space left on device")
            taken = real.write(data[: min(capacity[0], 4)])
            capacity[0] -= taken
            return taken

        def __getattr__(self, name):
            return getattr(real, name)

    log._file = NearlyFull()
    log.write(b"one\ntwo\nthree\n")
    assert eventually(lambda: log.num_dropped == 2)
    capacity[0] = 10_000
    log.write(b"four\n")
    log.close()
    assert path.read_bytes() == b"one\ntwo\nfour\n"
    assert log.num_dropped == 2
    assert "cannot be written" in caplog.text
