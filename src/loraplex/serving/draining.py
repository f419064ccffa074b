"""Draining: a server takes no more requests and lets in-flight ones end, before it stops or is
taken out of a load balancer.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from loraplex.core.clock import Clock
from loraplex.core.counts import counted
from loraplex.core.errors import NotReadyError

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.05
RETRY_SECONDS = 2.0
"""Retry-After of refused clients: by then another server replies, or this one again."""


class DrainReport(msgspec.Struct, frozen=True):
    """How far a drain has come."""

    draining: bool
    in_work: int
    """Number of prompts in flight."""
    drained: bool
    """Whether the server drains and no request is in flight."""
    elapsed_seconds: float | None = None
    """Since the drain began."""
    seconds_left: float | None = None
    """Time until in-flight requests are ended; None: no limit."""


class Draining:
    """Whether new requests are accepted, and which are in flight. One event loop calls it.

    A request is admitted inside `admission`, so that a drain never misses one that is
    on its way to an engine.
    """

    def __init__(
        self, clock: Clock, num_running: Callable[[], int], end_all: Callable[[NotReadyError], None]
    ) -> None:
        """num_running: requests that engines have. end_all: ends those with an error."""
        self._clock = clock
        self._num_running = num_running
        self._end_all = end_all
        self._num_admitting = 0
        self._began_ns: int | None = None
        self._deadline_ns: int | None = None
        self._is_final = False
        self._deadline_task: asyncio.Task[None] | None = None

    @property
    def is_active(self) -> bool:
        return self._began_ns is not None

    @property
    def reason(self) -> str:
        """Why there is no new work; empty if there is."""
        if self._is_final:
            return "the server is stopping"
        return "the server is draining" if self.is_active else ""

    @contextmanager
    def admission(self) -> Iterator[None]:
        """A request is on its way to an engine. Raises NotReadyError during a drain."""
        if self._began_ns is not None:
            raise NotReadyError(self.reason, retry_after_seconds=RETRY_SECONDS)
        self._num_admitting += 1
        try:
            yield
        finally:
            self._num_admitting -= 1

    def begin(self, timeout_seconds: float | None = None) -> DrainReport:
        """Refuse new requests. Those in flight at the end of the time are ended.

        Again: the time is set anew.
        """
        if self._is_final:
            return self.report()
        now_ns = self._clock.now_ns()
        if not self.is_active:
            logger.warning("draining: new requests are refused; in flight: %d", self.num_in_flight)
        self._began_ns = self._began_ns or now_ns
        self._stop_deadline()
        if timeout_seconds is not None:
            self._deadline_ns = now_ns + int(timeout_seconds * 1e9)
            self._deadline_task = asyncio.create_task(self._end_late_ones(timeout_seconds))
        return self.report()

    def cancel(self) -> DrainReport:
        """Take requests again. Raises NotReadyError if the server is stopping."""
        if self._is_final:
            raise NotReadyError(f"{self.reason}; that cannot be undone")
        self._stop_deadline()
        if self.is_active:
            logger.warning("the drain is cancelled: requests are taken again")
        self._began_ns = None
        return self.report()

    async def finish(self, timeout_seconds: float) -> None:
        """Wait before a stop until no request is in flight, or the time is up."""
        self.close()
        deadline_ns = self._clock.now_ns() + int(timeout_seconds * 1e9)
        self._deadline_ns = deadline_ns
        while self.num_in_flight:
            if self._clock.now_ns() > deadline_ns:
                logger.warning(
                    "stopping with requests in flight: the shutdown grace period is over"
                )
                return
            await asyncio.sleep(_POLL_SECONDS)

    def close(self) -> None:
        """Nothing new, for good."""
        self._stop_deadline()
        self._is_final = True
        self._began_ns = self._began_ns or self._clock.now_ns()

    @property
    def num_in_flight(self) -> int:
        return self._num_admitting + self._num_running()

    def report(self) -> DrainReport:
        in_work, now_ns = self.num_in_flight, self._clock.now_ns()
        if self._began_ns is None:
            return DrainReport(draining=False, in_work=in_work, drained=False)
        left = None if self._deadline_ns is None else max(0.0, (self._deadline_ns - now_ns) / 1e9)
        return DrainReport(
            draining=True,
            in_work=in_work,
            drained=not in_work,
            elapsed_seconds=(now_ns - self._began_ns) / 1e9,
            seconds_left=left,
        )

    async def _end_late_ones(self, timeout_seconds: float) -> None:
        await asyncio.sleep(timeout_seconds)
        while self.num_in_flight:
            if self._num_running():
                logger.warning(
                    "the drain's time is over: %s ended",
                    counted(self._num_running(), "running request is", "running requests are"),
                )
                self._end_all(
                    NotReadyError("the shutdown grace period is over", retry_after_seconds=1)
                )
            await asyncio.sleep(_POLL_SECONDS)

    def _stop_deadline(self) -> None:
        self._deadline_ns = None
        if self._deadline_task is not None:
            self._deadline_task.cancel()
            self._deadline_task = None
