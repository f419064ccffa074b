"""Place of a process that the server starts: out of the terminal's reach, in the server's session.

A Ctrl-C in a terminal goes to the foreground group, and is for the server alone. A session of their
own would keep it from the others, too. But Linux shares the processor among sessions first
(sched_autogroup(7)): one process that checks grammars would get as much of it as all threads that
serve, and its priority would count for nothing.
"""

import os
import signal
from typing import Final

_NICENESS: Final = 10
"""A tenth of the processor time of a thread that serves, where both want a core."""


def leave_group() -> None:
    """Make this process a group of its own, if it is none yet.

    What it writes to a terminal does not stop it, as it would after `stty tostop`.
    """
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)


def let_others_go_first() -> None:
    """Run when threads that serve leave a core, or for a small share of it."""
    os.nice(_NICENESS)
