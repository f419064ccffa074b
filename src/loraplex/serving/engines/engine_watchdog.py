"""Detection of engines that hang: stopped by a signal, in a deadlock, or waiting for a device.

A process that hangs cannot report it. So an engine counts its turns in shared memory
(`engine.step_marker`), and serving compares what it reads there with its own clock. An engine of
several ranks counts a turn between steps only when all ranks have replied (`engine.loop`).
"""

import collections
from typing import Final, NamedTuple

from loraplex.core.clock import Clock
from loraplex.core.stats import StepRecord
from loraplex.engine.step_marker import Progress

LOOK_SECONDS: Final = 0.5
_MAX_LOOK_SECONDS: Final = 2.0
"""Maximum time that one look adds: if serving itself was stopped, or its clock jumped, it has not
seen whether the engine worked meanwhile."""
_FACTOR: Final = 20
"""How many times longer than expected a step may take: the machine may be busy."""
_FIRST_STEP_SECONDS: Final = 300.0
"""Limit of a step before any was measured."""
_IDLE_SECONDS: Final = 10.0
"""Limit between two steps, when an engine shows that it is alive every second, and for a process
that a signal stopped, whatever it does."""
_NUM_RECENT: Final = 100


class StepLimits(NamedTuple):
    """Times in seconds after which an engine that made no progress is ended."""

    step_seconds: float = 0.0
    """Limit of a step; 0: derived from the measured steps."""
    start_seconds: float = 3600.0
    """Limit of the time to load a model, to record steps and to be ready."""
    least_seconds: float = 10.0
    """Lower bound of the derived limit: long, where a step may have to compile kernels."""


class StepTimes:
    """Times of the steps of a model, and what they let expect of a next step."""

    def __init__(self) -> None:
        self._recent: collections.deque[int] = collections.deque(maxlen=_NUM_RECENT)
        self._best_ns_per_token: float | None = None

    def note(self, record: StepRecord) -> None:
        if record.num_tokens and record.duration_ns:
            self._recent.append(record.duration_ns)
            rate = record.duration_ns / record.num_tokens
            self._best_ns_per_token = min(rate, self._best_ns_per_token or rate)

    def expected_seconds(self, num_tokens: int) -> float | None:
        """Return the time that a step should take at most; None before any was measured.

        A long prompt may follow many steps of one token: therefore a step of more tokens than those
        before it is expected to take each token's time at the best rate ever seen.
        """
        if self._best_ns_per_token is None:
            return None
        return max(*self._recent, num_tokens * self._best_ns_per_token) / 1e9


class EngineWatchdog:
    """Watchdog of one model's engines, of which one lives at a time."""

    def __init__(self, clock: Clock, limits: StepLimits = StepLimits()) -> None:  # noqa: B008
        self._clock = clock
        self._limits = limits
        self._times = StepTimes()
        """Kept across engines: the next one computes the same model."""
        self._is_ready = False
        self._progress: Progress | None = None
        self._silent_ns = 0
        self._looked_ns = 0

    def begin(self) -> None:
        """A new engine starts."""
        self._is_ready, self._progress, self._silent_ns = False, None, 0

    def note_ready(self) -> None:
        self._is_ready, self._silent_ns = True, 0

    def note_step(self, record: StepRecord) -> None:
        self._times.note(record)

    def problem(self, progress: Progress) -> str:
        """Return what is wrong with the engine; empty if nothing is. Called every LOOK_SECONDS."""
        now_ns = self._clock.now_ns()
        if progress == self._progress:
            seen_ns = min(now_ns - self._looked_ns, int(_MAX_LOOK_SECONDS * 1e9))
            self._silent_ns += seen_ns
        else:
            self._progress, self._silent_ns = progress, 0
        self._looked_ns = now_ns
        limit = self._limit_seconds(progress)
        if self._silent_ns <= limit * 1e9:
            return ""
        doing = "in a step" if progress.num_tokens else "between two steps"
        return (
            f"hung: no progress {doing if self._is_ready else 'at its start'} for more than "
            f"{limit:g} s"
        )

    def _limit_seconds(self, progress: Progress) -> float:
        limit = self._limit_of_running_seconds(progress)
        return min(limit, _IDLE_SECONDS) if progress.is_stopped else limit

    def _limit_of_running_seconds(self, progress: Progress) -> float:
        limits = self._limits
        if not self._is_ready:
            return limits.start_seconds
        if limits.step_seconds:
            return limits.step_seconds
        if not progress.num_tokens:
            return max(_IDLE_SECONDS, _FACTOR * (self._times.expected_seconds(0) or 0.0))
        expected = self._times.expected_seconds(progress.num_tokens)
        least = limits.least_seconds
        return _FIRST_STEP_SECONDS if expected is None else max(least, _FACTOR * expected)
