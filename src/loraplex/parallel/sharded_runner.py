"""A runner of several ranks: rank 0's own, and the others, which compute the same plans."""

import logging
from collections.abc import Callable, Mapping

import msgspec

from loraplex.core.adapter import AdapterHandle
from loraplex.core.errors import DeviceLost, ErrorInfo
from loraplex.core.plan import Capacity, StepPlan, StepResult
from loraplex.engine.runner import Runner, StepHandle
from loraplex.parallel.messages import Plan, StepReport, Wait, for_other_ranks, rows_digest
from loraplex.parallel.ranks import Ranks

logger = logging.getLogger(__name__)


class ShardedRunner:
    """Implements engine.runner.Runner on rank 0.

    The results of rows are rank 0's. A step that fails on one rank may have left the others in a
    collective: every failure ends the engine, and the next engine continues its requests.
    """

    def __init__(
        self, own: Runner, ranks: Ranks, capacity: Capacity, wait_ns: Callable[[], int]
    ) -> None:
        """capacity: the one that all ranks agreed on. wait_ns: rank 0's time of waiting."""
        self._own = own
        self._ranks = ranks
        self._capacity = capacity
        self._own_wait_ns = wait_ns
        self._absorbed: tuple[int, bytes] | None = None
        """Id and digest of the last step whose reports are not compared yet."""
        self._copies: dict[AdapterHandle, int] = {}
        """Adapters whose copies have not ended on all ranks: how many have them."""
        self._wait_ns: dict[int, int] = {}

    def capacity(self) -> Capacity:
        return self._capacity

    def launch(self, plan: StepPlan) -> StepHandle:
        """Raises DeviceLost if a rank is gone."""
        self._ranks.last_step_id = plan.step_id
        self._copies.update(dict.fromkeys((copy.handle for copy in plan.adapter_copies), 0))
        self._ranks.broadcast(Plan(for_other_ranks(plan)))
        try:
            return _ShardedStep(self, plan, self._own.launch(plan))
        except Exception as error:
            raise self._lost(f"step {plan.step_id} failed on rank 0: {error}") from error

    def close(self) -> None:
        """Close rank 0's runner, and stop the other ranks."""
        try:
            self._own.close()
        finally:
            self._ranks.close()

    def wait(self, plan: StepPlan, handle: StepHandle) -> StepResult:
        """Wait for a step on rank 0; compare what the ranks sampled in the step before it.

        Ranks that sample differently compute nonsense from the next step on, so its result must not
        be used.
        """
        self._ranks.broadcast(Wait(plan.step_id))
        try:
            result = handle.wait()
        except Exception as error:
            raise self._lost(f"step {plan.step_id} failed on rank 0: {error}") from error
        before, self._absorbed = self._absorbed, (plan.step_id, rows_digest(result))
        if before is not None:
            self._compare(*before)
        if self._copies:
            result = self._with_copies(result, self._compare(*self._absorbed))
            self._absorbed = None
        return msgspec.structs.replace(
            result,
            timing=msgspec.structs.replace(result.timing, rank_wait_ns=self._rank_waits()),
        )

    def _compare(self, step_id: int, digest: bytes) -> Mapping[int, StepReport]:
        reports = self._ranks.reports_of(step_id)
        for rank, report in reports.items():
            self._wait_ns[rank] = report.wait_ns
            if report.rows != digest:
                raise self._lost(f"rank {rank} sampled other tokens than rank 0 in step {step_id}")
        return reports

    def _with_copies(self, result: StepResult, reports: Mapping[int, StepReport]) -> StepResult:
        """Return the result with the copies that ended on all ranks, or failed on one."""
        failed: dict[AdapterHandle, ErrorInfo] = {}
        done: list[AdapterHandle] = []
        outcomes: tuple[StepResult | StepReport, ...] = (result, *reports.values())
        for outcome in outcomes:
            failed.update(outcome.copies_failed)
            for handle in outcome.copies_done:
                self._copies[handle] = self._copies.get(handle, 0) + 1
                if self._copies[handle] == self._ranks.world.size:
                    done.append(handle)
        for handle in (*done, *failed):
            self._copies.pop(handle, None)
        return msgspec.structs.replace(
            result,
            copies_done=tuple(handle for handle in done if handle not in failed),
            copies_failed=tuple(failed.items()),
        )

    def _rank_waits(self) -> tuple[int, ...]:
        others = (self._wait_ns.get(rank, 0) for rank in range(1, self._ranks.world.size))
        return (self._own_wait_ns(), *others)

    def _lost(self, reason: str) -> DeviceLost:
        logger.error("%s", reason)
        self._ranks.give_up(reason)
        return DeviceLost(reason)


class _ShardedStep:
    """Implements engine.runner.StepHandle."""

    def __init__(self, runner: ShardedRunner, plan: StepPlan, handle: StepHandle) -> None:
        self._runner = runner
        self._plan = plan
        self._handle = handle

    def wait(self) -> StepResult:
        """Raises DeviceLost."""
        return self._runner.wait(self._plan, self._handle)
