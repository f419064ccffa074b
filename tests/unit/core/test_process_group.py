"""Processes of the server: a group of their own, the server's session, and a low priority."""

import contextlib
import os
import pty
import subprocess
import sys
import termios

CALL = """
import os
from loraplex.core.process_group import leave_group, let_others_go_first
before = os.getpriority(os.PRIO_PROCESS, 0)
leave_group()
leave_group()
let_others_go_first()
print(os.getpid(), os.getpgrp(), os.getsid(0), os.getpriority(os.PRIO_PROCESS, 0) - before)
"""


def numbers(**options: bool) -> list[int]:
    done = subprocess.run(
        [sys.executable, "-c", CALL], check=True, capture_output=True, text=True, **options
    )
    return [int(number) for number in done.stdout.split()]


def test_a_process_leaves_the_group_and_stays_in_the_session():
    process, group, session, niceness = numbers()
    assert group == process
    assert session != process
    assert niceness == 10


def test_the_leader_of_a_session_has_a_group_already():
    process, group, session, _ = numbers(start_new_session=True)
    assert group == session == process


def test_no_terminal_stops_a_process_that_writes_to_it():
    """A terminal after `stty tostop` stops other processes of the background that write."""
    write = "from loraplex.core.process_group import leave_group; leave_group(); print('written')"
    server, terminal = pty.fork()
    if server == 0:
        with contextlib.suppress(BaseException):
            mode = termios.tcgetattr(0)
            mode[3] |= termios.TOSTOP
            termios.tcsetattr(0, termios.TCSANOW, mode)
            os._exit(subprocess.run([sys.executable, "-c", write], timeout=60).returncode)
        os._exit(1)
    written = b""
    with contextlib.suppress(OSError):  # Linux's end of a terminal
        while piece := os.read(terminal, 1000):
            written += piece
    assert os.waitstatus_to_exitcode(os.waitpid(server, 0)[1]) == 0
    assert b"written" in written
