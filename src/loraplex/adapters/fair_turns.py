"""Order in which the tenants' loads and changes have their turns. It knows no process."""

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import AsyncIterator

from loraplex.core.errors import QueueFullError

EXTRA_TENANTS = 12
"""Loads in addition to the limit, one for each tenant that would have none in progress."""
MAX_WAITING = 1000
"""Maximum number of a tenant's loads, or changes, that wait."""


class FairTurns:
    """Limit of loads in progress, under which no tenant waits for the loads of another.

    A load begins while fewer than `limit` are in progress; the first one of a tenant also while
    fewer than `limit + num_extra` are. Of those that wait, the next one is of the tenant with
    the fewest loads in progress.
    """

    def __init__(self, limit: int, num_extra: int = EXTRA_TENANTS) -> None:
        self._limit = limit
        self._num_extra = num_extra
        self._running: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @contextlib.asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[int]:
        """Wait for a turn, and end it on exit; yields the tenant's loads in progress, this one too.

        Raises QueueFullError if too many loads wait.
        """
        if self._may_begin(tenant):
            self._running[tenant] += 1
        else:
            await self._wait(tenant)
        try:
            yield self._running[tenant]
        finally:
            self._end(tenant)

    async def _wait(self, tenant: str) -> None:
        queue = self._waiting.setdefault(tenant, deque())
        if len(queue) >= MAX_WAITING:
            raise QueueFullError(
                f"{len(queue)} adapters wait to be loaded or changed, which is the maximum: load "
                "or change fewer at a time",
                retry_after_seconds=1,
            )
        begun = asyncio.get_running_loop().create_future()
        queue.append(begun)
        try:
            await begun
        except asyncio.CancelledError:
            if begun.done() and not begun.cancelled():
                self._end(tenant)  # its turn came at the same moment
            else:
                queue.remove(begun)
                if not self._waiting[tenant]:
                    del self._waiting[tenant]
            raise

    def _may_begin(self, tenant: str) -> bool:
        extra = 0 if self._running[tenant] else self._num_extra
        return self._running.total() < self._limit + extra

    def _end(self, tenant: str) -> None:
        self._running[tenant] -= 1
        self._running = +self._running
        while waiting := [one for one in self._waiting if self._may_begin(one)]:
            # A tenant that was served goes to the end of the dict: equals take turns.
            following = min(waiting, key=self._running.__getitem__)
            queue = self._waiting.pop(following)
            self._running[following] += 1
            queue.popleft().set_result(None)
            if queue:
                self._waiting[following] = queue
