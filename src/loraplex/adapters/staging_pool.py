"""Pool of staging processes, which tenants share fairly."""

import asyncio
from collections.abc import Sequence

from loraplex.adapters.fair_turns import FairTurns
from loraplex.adapters.staged import StageReply
from loraplex.adapters.staging_process import StagingProcess
from loraplex.core.errors import AdapterLoadError


class StagingPool:
    """Processes that stage one adapter each at a time.

    They start when they are needed. While loads of a tenant run, a spare one is idle: a load of
    another tenant does not wait for a process to start, which takes half a second.
    """

    def __init__(self, command: tuple[str, ...], timeout_seconds: float, max_idle: int) -> None:
        """max_idle: number of loads that one tenant may run.

        Two processes more are kept: for the load of another tenant, and the spare one.
        """
        self._command = command
        self._timeout_seconds = timeout_seconds
        self._max_idle = max_idle + 2
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
            # The last idle process is left to a tenant that has no other load.
            num_left = 0 if self._turns.num_running(tenant) == 1 else 1
            # The one that was used last has been started for certain.
            process = self._idle.pop() if len(self._idle) > num_left else self._new_process()
            self._busy.add(process)
            try:
                if tenant:  # the server's own loads come at its start, before any tenant's
                    await self.start()
                return await process.request(request_id, what, pieces)
            finally:
                self._busy.discard(process)
                if process.is_running and len(self._idle) < self._max_idle:
                    self._idle.append(process)
                else:
                    await process.close()

    async def start(self) -> None:
        """Start a process for the next load, unless one is idle."""
        if not self._idle:
            spare = self._new_process()
            self._idle.append(spare)
            await spare.start()

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
