"""Processes of the server: a group of their own, the server's session, and a low priority."""

import subprocess
import sys

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
