"""Progress on standard error, in runs of a benchmark."""

import sys
import threading
from types import TracebackType
from typing import Final, Self

from tqdm import tqdm

from loraplex.core.clock import Clock, SystemClock

_BAR_SECONDS: Final = 1.0
_LINE_SECONDS: Final = 10.0


class RunBar:
    """A bar on a terminal, which moves each second; elsewhere, a line every 10 seconds."""

    def __init__(self, plan: str, clock: Clock | None = None) -> None:
        """Print what will be done. clock: None for the system's."""
        self._clock = clock or SystemClock()
        self._start_ns = self._runs_start_ns = self._clock.now_ns()
        self._what = "starting"
        self._num_done = self._num_runs = 0
        # disable=None: only on a terminal.
        self._bar = tqdm(desc=self._what, unit="run", leave=False, disable=None)
        self._is_over = threading.Event()
        self._ticking = threading.Thread(target=self._tick, name="progress", daemon=True)
        self.say(plan)

    def __enter__(self) -> Self:
        self._ticking.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_over.set()
        self._ticking.join()
        self._bar.close()

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        self._bar.write(line, file=sys.stderr)

    def begin_runs(self, num_runs: int) -> None:
        self._num_runs, self._runs_start_ns = num_runs, self._clock.now_ns()
        self._bar.reset(num_runs)
        self.describe("measuring")
        self.say(f"{num_runs} runs; the time left is known after the first one")

    def describe(self, what: str) -> None:
        """Set the description of what is being done."""
        self._what = what
        self._bar.set_description(what)

    def end_run(self, what: str = "") -> None:
        """Count one more run, of this workload."""
        self._num_done += 1
        self._bar.set_postfix_str(what, refresh=False)
        self._bar.update()

    def line(self) -> str:
        """Return what has been done, and the time that is left."""
        now_ns = self._clock.now_ns()
        passed = f"{(now_ns - self._start_ns) / 1e9:.0f} s"
        if not self._num_runs:
            return f"{self._what}, {passed} so far"
        done = f"{self._what}: {self._num_done} of {self._num_runs} runs in {passed}"
        if not self._num_done:
            return done
        seconds = (now_ns - self._runs_start_ns) / 1e9 / self._num_done
        return f"{done}, about {seconds * (self._num_runs - self._num_done):.0f} s left"

    def _tick(self) -> None:
        while not self._is_over.wait(_LINE_SECONDS if self._bar.disable else _BAR_SECONDS):
            if self._bar.disable:
                self.say(self.line())
            else:
                self._bar.refresh()
