"""Pool of staging processes, which tenants share fairly."""

import asyncio
from collections.abc import Sequence

from loraplex.adapters.fair_turns import FairTurns
from loraplex.adapters.staged import StageReply
from loraplex.adapters.staging_process import StagingProcess
from loraplex.core.errors import AdapterLoadError


class StagingPool:
    """Processes that stage one adapter each at a time. They start when they are needed."""

    def __init__(self, command: tuple[str, ...], timeout_seconds: float, max_idle: int) -> None:
        """max_idle: number of processes that are kept, and of loads that one tenant may run."""
        self._command = command
        self._timeout_seconds = timeout_seconds
        self._max_idle = max_idle
        self._turns = FairTurns(max_idle)
        self._idle: list[StagingProcess] = []
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
            process = self._idle.pop(0) if self._idle else self._new_process()
            self._busy.add(process)
            try:
                return await process.request(request_id, what, pieces)
            finally:
                self._busy.discard(process)
                if len(self._idle) < self._max_idle:
                    self._idle.append(process)
                else:
                    await process.close()

    async def start(self) -> None:
        """Start one process before it is needed."""
        if not self.processes:
            self._idle.append(self._new_process())
        for process in self._idle[:1]:
            await process.start()

    async def close(self) -> None:
        """End the processes; loads in progress fail, and so do those that wait."""
        self._is_closed = True
        await asyncio.gather(*(process.close() for process in self.processes))

    async def _end_stopped(self) -> None:
        """Kill the idle processes that a signal stopped, so that no load waits for one."""
        stopped = [process for process in self._idle if process.is_stopped]
        self._idle = [process for process in self._idle if process not in stopped]
        await asyncio.gather(*(process.kill_stopped() for process in stopped))

    def _new_process(self) -> StagingProcess:
        return StagingProcess(self._command, self._timeout_seconds)
