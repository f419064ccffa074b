"""Regular expressions of one adapter_config.json, matched within a limit of CPU time.

PEFT matches with `re`, which backtracks: a pattern such as (a+)+b takes time exponential in the
length of a name. RE2 would not, but has no lookaround and differs from `re` in details that decide
what an adapter changes. `re` checks for signals while it matches, so a timer can end it.
"""

import contextlib
import re
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType

from loraplex.core.errors import InvalidAdapterError

MATCHING_SECONDS = 3.0
"""CPU time for one adapter. A thousand modules and a hundred patterns need a tenth of it."""
_USUAL_SHARE = 0.1
"""Share of the CPU time after which patterns take long."""
_REPEAT_SECONDS = 0.05
"""Interval at which the timer rings. An error that is raised in a callback of Python is lost."""
_MAX_SHOWN = 200


_when_slow: list[Callable[[], None]] = []


def call_when_slow(function: Callable[[], None]) -> None:
    """Let a function be called when the patterns of an adapter take long, once for each adapter.

    For a process that only reads adapters, so that others go first; a user's own process keeps its
    priority.
    """
    _when_slow.append(function)


class _OutOfTimeError(Exception):
    """The timer rang while a pattern was compiled or matched."""


class Matcher:
    """Compiles and matches patterns until its CPU time is spent. Works in the main thread only."""

    def __init__(self, seconds: float | None = None) -> None:
        self._seconds = MATCHING_SECONDS if seconds is None else seconds
        self._left = self._seconds
        self._started = 0.0
        self._is_armed = self._is_slow = False
        self._compiled: dict[str, re.Pattern[str]] = {}
        self._pattern = ""

    def compile(self, pattern: str) -> re.Pattern[str]:
        """Return the compiled pattern. Raises InvalidAdapterError for one that is broken."""
        compiled = self._compiled.get(pattern)
        if compiled is None:
            try:
                with self.limited():
                    self._pattern = pattern
                    compiled = re.compile(pattern)
            except (re.error, OverflowError, RecursionError) as error:
                raise InvalidAdapterError(
                    f"{_shown(pattern)} is not a regular expression: {error}"
                ) from error
            self._compiled[pattern] = compiled
        return compiled

    def match(self, pattern: str, text: str) -> re.Match[str] | None:
        """Return re.match(pattern, text). Raises InvalidAdapterError once the time is spent."""
        compiled = self.compile(pattern)
        with self.limited():
            self._pattern = pattern
            return compiled.match(text)

    def fullmatch(self, pattern: str, text: str) -> re.Match[str] | None:
        """Return re.fullmatch(pattern, text). Raises InvalidAdapterError once the time is spent."""
        compiled = self.compile(pattern)
        with self.limited():
            self._pattern = pattern
            return compiled.fullmatch(text)

    @contextlib.contextmanager
    def limited(self) -> Iterator[None]:
        """Count the time of the block. Around many matches it is far faster than one for each.

        Raises InvalidAdapterError once the time is spent.
        """
        if self._is_armed:
            yield
            return
        self._started = time.thread_time()
        # The handler stays: a late signal must not meet the default, which ends the process.
        signal.signal(signal.SIGVTALRM, self._ring)
        try:
            self._is_armed = True
            if self._left <= 0:
                raise _OutOfTimeError
            # The timer counts CPU time of this process: a busy machine refuses no adapter.
            first = min(self._left, _REPEAT_SECONDS)
            signal.setitimer(signal.ITIMER_VIRTUAL, first, _REPEAT_SECONDS)
            yield
        except _OutOfTimeError:
            self._left = 0.0
            raise InvalidAdapterError(
                f"the regular expressions of the adapter took more than {self._seconds:g} s of CPU "
                f"time, the last one {_shown(self._pattern)}: write it without nested repeats, or "
                "list the names of the modules"
            ) from None
        finally:
            self._is_armed = False
            signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
            self._left -= time.thread_time() - self._started

    def _ring(self, _signal: int, _frame: FrameType | None) -> None:
        if not self._is_armed:  # it may ring just after the match ended
            return
        left = self._left - (time.thread_time() - self._started)
        if left <= 0:
            raise _OutOfTimeError
        if not self._is_slow and self._seconds - left >= _USUAL_SHARE * self._seconds:
            self._is_slow = True
            for function in _when_slow:
                function()


def _shown(pattern: str) -> str:
    return repr(pattern if len(pattern) <= _MAX_SHOWN else f"{pattern[:_MAX_SHOWN]}...")
