"""Pool of staging processes, which tenants share fairly."""

import asyncio
from collections.abc import Sequence

from loraplex.adapters.fair_turns import FairTurns
from loraplex.adapters.staged import StageReply
from loraplex.adapters.staging_process import StagingProcess
from loraplex.core.closing import close_together
from loraplex.core.errors import AdapterLoadError


class StagingPool:
    """Processes that stage one adapter each at a time.

    A process takes half a second to start, and many on a busy machine. A load of a tenant without
    other loads takes the idle process that has run for longest, and another one starts for the load
    after it; further loads of a tenant leave that process to the other tenants.
    """

    def __init__(
        self, command: tuple[str, ...], timeout_seconds: float, max_idle: int, num_spare: int = 1
    ) -> None:
        """max_idle: number of loads that one tenant may run. num_spare: number of idle processes
        while loads run; with 2, one of them has been started before the last load began.

        Two processes more are kept: for the load of another tenant, and the spare one.
        """
        self._num_spare = num_spare
        self._command = command
        self._timeout_seconds = timeout_seconds
        self._max_idle = max_idle + 2
        self._turns = FairTurns(max_idle)
        self._idle: list[StagingProcess] = []
        """Those that have run for longest are the last ones."""
        self._busy: set[StagingProcess] = set()
        self._is_closed = False

    @property
    def processes(self) -> list[StagingProcess]:
        return [*self._idle, *self._busy]

    async def request(
        self, tenant: str, request_id: int, what: str, pieces: Sequence[memoryview]
    ) -> StageReply:
        """Stage an adapter in a process, in the tenant's turn. See StagingProcess.request."""
        async with self._turns.turn(tenant):
            if self._is_closed:
                raise AdapterLoadError(f"the server stops: {what} is not loaded")
            await self._end_stopped()
            process = self._take(is_first=self._turns.num_running(tenant) == 1)
            self._busy.add(process)
            try:
                if tenant:  # the server's own loads come at its start, before any tenant's
                    await self.keep_spare()
                return await process.request(request_id, what, pieces)
            finally:
                self._busy.discard(process)
                if process.is_running and len(self._idle) < self._max_idle:
                    self._idle.append(process)
                else:
                    await process.close()

    async def start(self) -> None:
        """Start a process for the next load, unless one is idle."""
        await self._keep(1)

    async def keep_spare(self) -> None:
        """Start the processes that are to be idle."""
        await self._keep(self._num_spare)

    async def close(self) -> None:
        """End the processes; loads in progress fail, and so do those that wait."""
        self._is_closed = True
        await close_together(*(process.close() for process in self.processes))

    async def _keep(self, number: int) -> None:
        new = [self._new_process() for _ in range(number - len(self._idle))]
        self._idle[:0] = new
        await asyncio.gather(*(process.start() for process in new))

    def _take(self, *, is_first: bool) -> StagingProcess:
        """Return an idle process, or a new one; is_first: the tenant has no other load."""
        num_left = 0 if is_first else 1
        if len(self._idle) > num_left:
            return self._idle.pop(-1 - num_left)
        return self._new_process()

    async def _end_stopped(self) -> None:
        """Kill the idle processes that a signal stopped, so that no load waits for one."""
        stopped = [process for process in self._idle if process.is_stopped]
        self._idle = [process for process in self._idle if process not in stopped]
        await asyncio.gather(*(process.kill_stopped() for process in stopped))

    def _new_process(self) -> StagingProcess:
        return StagingProcess(self._command, self._timeout_seconds)
