"""Threads for work that takes long, in which tenants take turns."""

import asyncio
import collections
import concurrent.futures
import contextlib
from collections.abc import Callable
from typing import Final, TypeVar

from loraplex.core.errors import QueueFullError
from loraplex.serving.wire_request import current_request

T = TypeVar("T")

MAX_WAITING_BYTES: Final = 1 << 26
"""Limit on the sizes of all tasks of one tenant that wait or run."""


class FairThreads:
    """Thread pool that serves the tenants in turn, whatever the number of their tasks.

    A tenant with one task waits for the running ones and one of each other tenant. The methods run
    on one event loop. Work without a request, as that of `LLM`, belongs to one more tenant.
    """

    def __init__(self, num_threads: int, work: str) -> None:
        """Create the pool. work: plural noun for error messages. No thread starts before a task."""
        self._work = work
        self._pool = concurrent.futures.ThreadPoolExecutor(num_threads, thread_name_prefix=work)
        self._num_free = num_threads
        self._waiting: collections.OrderedDict[str, collections.deque[asyncio.Future[None]]]
        self._waiting = collections.OrderedDict()
        """Tasks without a thread, by tenant; the first tenant is the next one."""
        self._num_bytes: collections.Counter[str] = collections.Counter()

    async def run(self, num_bytes: int, task: Callable[[], T]) -> T:
        """Return task(), called in a thread.

        A cancelled task has its thread until it ends. Raises QueueFullError if too much of this
        tenant waits.
        """
        request = current_request()
        tenant = "" if request is None else request.tenant
        if self._num_bytes[tenant] + num_bytes > MAX_WAITING_BYTES:
            raise QueueFullError(
                f"{self._work} of {self._num_bytes[tenant]} bytes wait to be processed",
                retry_after_seconds=2,
            )
        self._num_bytes[tenant] += num_bytes
        try:
            await self._turn(tenant)
            job = self._pool.submit(task)
        except BaseException:
            self._forget(tenant, num_bytes)
            raise
        loop = asyncio.get_running_loop()

        def ended(job: concurrent.futures.Future[T]) -> None:
            del job
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._end, tenant, num_bytes)

        job.add_done_callback(ended)
        return await asyncio.wrap_future(job)

    def close(self) -> None:
        """Accept no more tasks."""
        self._pool.shutdown(wait=False)

    async def _turn(self, tenant: str) -> None:
        """Wait for a thread."""
        if self._num_free:
            self._num_free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, collections.deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._pass_on()
            raise

    def _end(self, tenant: str, num_bytes: int) -> None:
        self._forget(tenant, num_bytes)
        self._pass_on()

    def _pass_on(self) -> None:
        """Give a free thread to the next tenant."""
        while self._waiting:
            tenant, turns = self._waiting.popitem(last=False)
            turn = turns.popleft()
            if turns:
                self._waiting[tenant] = turns
            if not turn.done():
                turn.set_result(None)
                return
        self._num_free += 1

    def _forget(self, tenant: str, num_bytes: int) -> None:
        self._num_bytes[tenant] -= num_bytes
        if not self._num_bytes[tenant]:
            del self._num_bytes[tenant]
