"""A runner without a model or tensors, that keeps the rules of core.plan and checks them.

It writes into each KV block what a model would compute there, and reads it back through the block
tables: a block that was freed too early, is stale, or belongs to other adapters is seen at once.
"""

import dataclasses

from loraplex.core.adapter import AdapterHandle
from loraplex.core.errors import ErrorInfo, RowFailedError, StepFailedError
from loraplex.core.output import TokenLogprob
from loraplex.core.plan import (
    AdapterCopy,
    BlockId,
    Capacity,
    KVGroupCapacity,
    KVGroupId,
    LogitsNeeded,
    PageGeometry,
    PageId,
    RowAdded,
    RowResult,
    RowStep,
    Slot,
    StepPlan,
    StepResult,
)
from loraplex.memory.adapter_pages import place
from support.fake_blocks import PlanViolation, empty_blocks, move_blocks, require
from support.fake_loader import FakeLoader
from support.fake_model import EMPTY_STATE, FakeModel, State

SPOILT: State = b"spoilt by a row that failed"

FAKE_CAPACITY = Capacity(
    block_size=16,
    kv_groups=(KVGroupCapacity(num_blocks=256),),
    max_num_seqs=8,
    max_num_batched_tokens=512,
    max_model_len=2048,
    vocab_size=1000,
    page_geometry=PageGeometry(slot_elements=8, slots_per_page=16),
    num_adapter_pages=16,
    adapter_page_bytes=256,
    keeps_host_copy=True,
)


@dataclasses.dataclass(slots=True, eq=False)
class _Row:
    added: RowAdded
    adapters: tuple[tuple[str, float], ...]
    token_ids: list[int]
    states: list[State]
    """One per token: what its position must hold."""
    block_tables: list[list[BlockId]]
    """One for each KV group."""
    num_computed_tokens: int | None = None
    has_sampled: bool = False
    failed_at: int | None = None
    """The step of the failure. A plan made before its result was known may have the row again."""


@dataclasses.dataclass(slots=True)
class _Copy:
    digest: str
    page_ids: tuple[PageId, ...]
    first_step_id: int


class FakeRunner:
    """Implements engine.runner.Runner.

    Its tokens are those of a FakeModel, so `model.output` returns what every request should give.
    With a FakeLoader, adapters are copied from that loader's host tier and known by their digest;
    without one they are known by their handle, and any copy succeeds.

    A copy is done `copy_steps` steps after the one that started it, at the latest with the next
    step that has no rows.
    """

    def __init__(
        self,
        capacity: Capacity = FAKE_CAPACITY,
        model: FakeModel | None = None,
        loader: FakeLoader | None = None,
        *,
        copy_steps: int = 0,
    ) -> None:
        self.model = model or FakeModel(vocab_size=capacity.vocab_size)
        self.copy_steps = copy_steps
        self.violations: list[PlanViolation] = []
        self.plans: list[StepPlan] = []
        self.is_closed = False
        self._capacity = capacity
        self._loader = loader
        self._rows: dict[Slot, _Row] = {}
        groups, size = capacity.kv_groups, capacity.block_size
        self._kv = [empty_blocks(group.num_blocks, size) for group in groups]
        self._host_kv = [empty_blocks(group.num_host_blocks, size) for group in groups]
        self._device: dict[AdapterHandle, tuple[str, tuple[PageId, ...]]] = {}
        self._copies: dict[AdapterHandle, _Copy] = {}
        self._last_step_id = 0
        self._num_failing_rows = 0
        self._num_deferred_rows = 0
        self._num_failing_copies = 0
        self._failing_steps: list[bool] = []
        self._step_failed = False

    def fail_rows(self, num_rows: int = 1) -> None:
        """Let the next rows fail, one after the other."""
        self._num_failing_rows += num_rows

    def defer_rows(self, num_rows: int = 1) -> None:
        """Let the next rows that sample be deferred, as rows are whose grammar is not ready."""
        self._num_deferred_rows += num_rows

    def fail_copies(self, num_copies: int = 1) -> None:
        """Let the next adapter copies fail."""
        self._num_failing_copies += num_copies

    def fail_step(self, *, early: bool = False) -> None:
        """Let the next step that has rows fail; early: before it changed anything."""
        self._failing_steps.append(early)

    def capacity(self) -> Capacity:
        return self._capacity

    def launch(self, plan: StepPlan) -> "FakeStep":
        """Raises PlanViolation."""
        try:
            return FakeStep(self._execute(plan))
        except PlanViolation as violation:
            self.violations.append(violation)
            raise

    def close(self) -> None:
        self.is_closed = True

    def _execute(self, plan: StepPlan) -> StepResult | StepFailedError:
        self.plans.append(plan)
        require(plan.step_id > self._last_step_id, "step ids grow")
        self._last_step_id = plan.step_id
        fails = bool(plan.rows) and bool(self._failing_steps)
        if fails and self._failing_steps.pop():
            self._step_failed = True
            return StepFailedError(f"step {plan.step_id} was planted to fail early")
        self._change_rows(plan)
        self._step_failed = fails
        if fails:
            for step in plan.rows:
                self._spoil(step)
            return StepFailedError(f"step {plan.step_id} was planted to fail")
        for copy in plan.adapter_copies:
            self._start_copy(copy, plan.step_id)
        slots = [step.slot for step in plan.rows]
        require(len(set(slots)) == len(slots), "a slot computes twice in one step")
        for step in plan.rows:
            self._check(step)
        rows = tuple(self._compute(step) for step in plan.rows)
        done, failed = self._end_copies(plan)
        return StepResult(plan.step_id, rows, done, failed)

    def _change_rows(self, plan: StepPlan) -> None:
        for slot in plan.removed:
            require(slot in self._rows or self._step_failed, f"slot {slot} is empty already")
            self._rows.pop(slot, None)
        for added in plan.added:
            require(added.slot not in self._rows, f"slot {added.slot} is taken")
            require(0 <= added.slot < self._capacity.max_num_seqs, f"there is no slot {added.slot}")
            adapters = tuple((self._digest(handle), scale) for handle, scale in added.adapters)
            states = self.model.extend(EMPTY_STATE, added.token_ids, adapters)
            self._rows[added.slot] = _Row(
                added, adapters, list(added.token_ids), states, [[] for _ in self._kv]
            )
        move_blocks(plan, self._kv, self._host_kv)

    def _digest(self, handle: AdapterHandle) -> str:
        require(handle in self._device, f"adapter {handle} is not on the device")
        return self._device[handle][0]

    def _start_copy(self, copy: AdapterCopy, step_id: int) -> None:
        digest = str(copy.handle)
        if self._loader is not None:
            source = self._loader.host.get(copy.handle)
            require(source is not None, f"adapter {copy.handle} is not on the host")
            assert source is not None
            digest = source.digest
            num_pages = place(source.targets, self._capacity.page_geometry).num_pages
            require(len(copy.page_ids) == num_pages, f"adapter {copy.handle} has {num_pages} pages")
        pages = set(copy.page_ids)
        require(len(pages) == len(copy.page_ids), "a page is named twice")
        require(pages <= set(range(self._capacity.num_adapter_pages)), "there is no such page")
        for handle, other in self._copies.items():
            require(handle == copy.handle or not pages & {*other.page_ids}, "pages of a copy")
        for handle, (_, page_ids) in list(self._device.items()):
            if handle == copy.handle or pages & {*page_ids}:
                del self._device[handle]
        self._copies[copy.handle] = _Copy(digest, copy.page_ids, step_id)

    def _end_copies(
        self, plan: StepPlan
    ) -> tuple[tuple[AdapterHandle, ...], tuple[tuple[AdapterHandle, ErrorInfo], ...]]:
        done, failed = [], []
        for handle, copy in list(self._copies.items()):
            age = plan.step_id - copy.first_step_id
            if age < self.copy_steps and (plan.rows or age == 0):
                continue
            del self._copies[handle]
            if self._num_failing_copies:
                self._num_failing_copies -= 1
                failed.append((handle, ErrorInfo("adapter_load_failed", "the copy failed")))
            else:
                self._device[handle] = (copy.digest, copy.page_ids)
                done.append(handle)
        return tuple(done), tuple(failed)

    def _check(self, step: RowStep) -> None:
        """Every row against what the earlier steps left: rows of one step run side by side."""
        row = self._row(step)
        for handle, _ in row.added.adapters:
            self._digest(handle)
        if row.failed_at is not None:
            num_steps = self._last_step_id - row.failed_at
            require(num_steps <= self._capacity.num_stages, "a row goes on that failed")
            return
        self._check_tokens(row, step)
        require(len(step.new_block_ids) == len(self._kv), "blocks for each KV group")
        for group, block_ids in enumerate(step.new_block_ids):
            row.block_tables[group].extend(block_ids)
            self._check_block_table(row, step, group)
            self._check_context(row, step, group)

    def _compute(self, step: RowStep) -> RowResult:
        row = self._row(step)
        if row.failed_at is not None:
            return RowResult(step.slot, error=RowFailedError("it failed before").to_info())
        if self._num_failing_rows:
            self._num_failing_rows -= 1
            row.failed_at = self._last_step_id
            self._spoil(step)
            return RowResult(step.slot, error=RowFailedError("told to fail").to_info())
        stop = step.start + step.num_tokens
        extended = self.model.extend(row.states[-1], step.draft_token_ids, row.adapters)
        for position, state in enumerate([*row.states, *extended][step.start : stop], step.start):
            self._write(row, position, state)
        if self._num_deferred_rows and step.logits is LogitsNeeded.LAST:
            self._num_deferred_rows -= 1
            row.num_computed_tokens = stop - len(step.draft_token_ids) - 1
            return RowResult(step.slot, is_deferred=True)
        result = self._result(row, step)
        # The state of a rejected draft token is not there.
        num_right = max(0, len(result.token_ids) - 1)
        row.num_computed_tokens = stop - len(step.draft_token_ids) + num_right
        return result

    def _row(self, step: RowStep) -> _Row:
        row = self._rows.get(step.slot)
        if row is None:
            raise PlanViolation(f"slot {step.slot} is empty")
        return row

    def _check_tokens(self, row: _Row, step: RowStep) -> None:
        stop = step.start + step.num_tokens - len(step.draft_token_ids)
        require(stop > step.start, "a row computes nothing")
        if row.added.sampling.beam is not None and stop == len(row.token_ids) + 1:
            self._append(row, (step.token_ids or ())[-1])
        require(stop <= len(row.token_ids), "a row computes tokens that are not known")
        if row.num_computed_tokens is None:
            # Of any other beginning _check_context sees whether it was copied or loaded back.
            require(step.start >= 0, "a row begins before its sequence")
        else:
            require(step.start == row.num_computed_tokens, "a row goes on where it stopped")
        if step.token_ids is None:
            require(row.has_sampled, "the row has sampled nothing that it could go on with")
            require(
                stop == step.start + 1 and stop == len(row.token_ids),
                "only the last token, and draft tokens after it",
            )
        else:
            require(not step.draft_token_ids, "draft tokens follow a token that was sampled")
            require(list(step.token_ids) == row.token_ids[step.start : stop], "other tokens")
        ends = stop == len(row.token_ids)
        require(
            ends == (step.logits is not LogitsNeeded.NONE) or step.logits is LogitsNeeded.ALL,
            "logits are needed exactly where a row ends",
        )

    def _check_block_table(self, row: _Row, step: RowStep, group: KVGroupId) -> None:
        table = row.block_tables[group]
        used = [b for i, b in enumerate(table) if self._is_used(i, step.start, group)]
        require(len(set(used)) == len(used), "a block twice in one table")
        require(all(0 <= b < len(self._kv[group]) for b in used), "no such block")
        num_positions = len(table) * self._capacity.block_size
        require(step.start + step.num_tokens <= num_positions, "the block table is too short")

    def _check_context(self, row: _Row, step: RowStep, group: KVGroupId) -> None:
        """Every earlier position holds its token, after the right ones, under these adapters."""
        size = self._capacity.block_size
        for first in range(0, step.start, size):
            if not self._is_used(first // size, step.start, group):
                continue
            last = min(first + size, step.start)
            block_id = row.block_tables[group][first // size]
            require(
                self._kv[group][block_id][: last - first] == row.states[first:last],
                f"block {block_id} of KV group {group} does not hold positions {first} to "
                f"{last - 1} of slot {step.slot}",
            )

    def _is_used(self, index: int, start: int, group: KVGroupId) -> bool:
        """Is any position of block `index` seen or written from position `start` on?"""
        limits, size = self._capacity.kv_groups[group], self._capacity.block_size
        window = limits.attention_window
        if window is None or index * size < limits.num_sink_tokens:
            return True
        return (index + 1) * size > start - window + 1

    def _result(self, row: _Row, step: RowStep) -> RowResult:
        stop = step.start + step.num_tokens - len(step.draft_token_ids)
        scores: tuple[TokenLogprob, ...] = ()
        if step.logits is LogitsNeeded.ALL:
            last = min(stop, len(row.token_ids) - 1)
            scores = tuple(fake_logprob(row.token_ids[p + 1]) for p in range(step.start, last))
        if stop < len(row.token_ids):
            return RowResult(step.slot, prompt_logprobs=scores)
        if row.added.sampling.beam is not None:
            return RowResult(
                step.slot, prompt_logprobs=scores, candidates=self._candidates(row, step)
            )
        token_ids = [self._sample(row)]
        for draft in step.draft_token_ids:
            if token_ids[-1] != draft:
                break
            token_ids.append(self._sample(row))
        logprobs: tuple[TokenLogprob, ...] = ()
        if step.num_logprobs is not None:
            logprobs = tuple(fake_logprob(token_id, step.num_logprobs) for token_id in token_ids)
        return RowResult(step.slot, tuple(token_ids), logprobs, scores)

    def _sample(self, row: _Row) -> int:
        """The row's next token, which is its newest then."""
        added = row.added
        token_id = self.model.sample(
            row.states[-1],
            added.sampling,
            added.seed,
            added.sequence_index,
            len(row.token_ids) - added.num_prompt_tokens,
            added.suppressed_token_ids,
        )
        self._append(row, token_id)
        row.has_sampled = True
        return token_id

    def _candidates(self, row: _Row, step: RowStep) -> tuple[tuple[int, float], ...]:
        added = row.added
        require(step.num_candidates > 0, "of a beam, candidates are wanted")
        return tuple(
            self.model.candidates(
                row.states[-1],
                step.num_candidates,
                added.sampling,
                len(row.token_ids) - added.num_prompt_tokens,
                added.suppressed_token_ids,
            )
        )

    def _append(self, row: _Row, token_id: int) -> None:
        row.token_ids.append(token_id)
        row.states.extend(self.model.extend(row.states[-1], [token_id], row.adapters))

    def _write(self, row: _Row, position: int, state: State) -> None:
        size = self._capacity.block_size
        for kv, table in zip(self._kv, row.block_tables, strict=True):
            kv[table[position // size]][position % size] = state

    def _spoil(self, step: RowStep) -> None:
        """Overwrite what a failed row wrote, as it is of no use."""
        row = self._row(step)
        for table, block_ids in zip(row.block_tables, step.new_block_ids, strict=True):
            table.extend(b for b in block_ids if b not in table)
        for position in range(step.start, step.start + step.num_tokens):
            self._write(row, position, SPOILT)


class FakeStep:
    """Implements engine.runner.StepHandle."""

    def __init__(self, outcome: StepResult | StepFailedError) -> None:
        self._outcome = outcome

    def wait(self) -> StepResult:
        if isinstance(self._outcome, StepFailedError):
            raise self._outcome
        return self._outcome


def fake_logprob(token_id: int, num_top: int = 0) -> TokenLogprob:
    """Return a log probability that identifies the token."""
    top = tuple((token_id + i, -(token_id + i + 1) / 1024) for i in range(num_top))
    return TokenLogprob(token_id, -(token_id + 1) / 1024, 1, top)
