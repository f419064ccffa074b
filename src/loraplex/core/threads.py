"""Threads that share an interpreter."""

import sys
from typing import Final

_SWITCH_SECONDS: Final = 0.0005


def switch_threads_often() -> None:
    """Give the interpreter to a thread that has waited for it for half a millisecond.

    Python's default is 5 ms, for which an event loop waits at each wake-up while a thread parses a
    body, and a step at each return from native code while another one compiles a grammar.
    """
    sys.setswitchinterval(_SWITCH_SECONDS)
