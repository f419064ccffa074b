"""`loraplex run` on a pseudo terminal, with the shipped model."""

import os
import pty
import select
import subprocess
import sys
import time

import pytest

from loraplex.demo import ADAPTER_PATHS, BASE_PATH

SECONDS = 120
"""Deadline of each output."""
PROGRAM = """
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from loraplex.cli.main import app
app(sys.argv[1:])
"""
PROMPT = "What is the capital of France?\r"


class Terminal:
    def __init__(self, arguments, variables):
        self._end, inner = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *arguments],
            stdin=inner,
            stdout=inner,
            stderr=inner,
            start_new_session=True,
            env=os.environ | {"TERM": "dumb", "COLUMNS": "200"} | variables,
        )
        os.close(inner)
        self._unread = b""

    def write(self, text):
        os.write(self._end, text.encode())

    def until(self, text):
        """Return what was printed up to a text."""
        deadline = time.monotonic() + SECONDS
        while text.encode() not in self._unread:
            assert time.monotonic() < deadline, (text, self._unread)
            if select.select([self._end], [], [], 1)[0]:
                self._unread += os.read(self._end, 4096)
        before, _, self._unread = self._unread.partition(text.encode())
        return before.decode()

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self._end)


@pytest.fixture
def terminal(tmp_path):
    adapters = [f"--adapter={name}={path}" for name, path in ADAPTER_PATHS.items()]
    arguments = ["run", str(BASE_PATH), *adapters, "--temperature", "0", "--verbose"]
    variables = {"XDG_STATE_HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    opened = Terminal(arguments, variables)
    yield opened
    opened.close()


@pytest.mark.slow
def test_a_conversation(terminal, tmp_path):
    assert "/help lists the commands" in terminal.until("chinese> ")
    terminal.write(PROMPT)
    assert "巴黎" in terminal.until("tokens/s")
    terminal.until("chinese> ")
    terminal.write("/adapter jap\t\r")
    terminal.until("japanese> ")
    terminal.write(PROMPT)
    assert "パリ" in terminal.until("japanese> ")
    terminal.write("/base\r")
    terminal.until("base> ")
    terminal.write("/compare " + PROMPT)
    compared = terminal.until("base> ").replace("\r", "")
    assert all(text in compared for text in ("Paris", "巴黎", "パリ"))
    assert compared.index("--- base") < compared.index("--- chinese") < compared.index("--- jap")

    # These make the model repeat itself up to its length.
    terminal.write("/set presence_penalty -2\r/set frequency_penalty -2\r")
    terminal.until("base> ")
    terminal.until("base> ")
    terminal.write("Go on\r")
    terminal.until("ススススス")
    terminal.write("\x03")
    terminal.until("(stopped)")
    terminal.until("base> ")
    terminal.write("/set presence_penalty none\r/set frequency_penalty none\r/clear\r" + PROMPT)
    assert "Paris" in terminal.until("tokens/s")
    terminal.until("base> ")
    terminal.write("\x04")
    assert terminal.process.wait(SECONDS) == 0
    assert "/adapter japanese" in (tmp_path / "loraplex" / "chat_history").read_text("utf-8")
