"""A runner without a model or tensors, that keeps the rules of core.plan and checks them.

It writes into each KV block what a model would compute there, and reads it back through the block
tables: a block that was freed too early, is stale, or belongs to other adapters is seen at once.
"""

import dataclasses
from collections.abc import Iterable

from loraplex.core.adapter import AdapterHandle
from loraplex.core.cache import Blocks, Chunk, Cross, States
from loraplex.core.errors import ErrorInfo, LoraplexError, RowFailedError, StepFailedError
from loraplex.core.output import TokenLogprob
from loraplex.core.plan import (
    NO_BLOCK,
    AdapterCopy,
    BlockId,
    CacheGroupCapacity,
    CacheGroupId,
    Capacity,
    CellId,
    EncodeImage,
    EncodeText,
    PageGeometry,
    PageId,
    RowAdded,
    RowResult,
    RowStep,
    Slot,
    StepPlan,
    StepResult,
    Wanted,
)
from loraplex.core.task import Pool, PoolKind
from loraplex.memory.adapter_pages import place
from support.fake_blocks import PlanViolation, empty_blocks, move_blocks, require
from support.fake_loader import FakeLoader
from support.fake_model import FakeModel, State

SPOILT: State = b"spoilt by a row that failed"

FAKE_CAPACITY = Capacity(
    block_size=16,
    cache_groups=(CacheGroupCapacity(num_blocks=256),),
    max_num_seqs=8,
    max_num_batched_tokens=512,
    max_model_len=2048,
    pool_kinds=(PoolKind.LAST,),
    hidden_size=16,
    vocab_size=1000,
    page_geometry=PageGeometry(slot_elements=8, slots_per_page=16),
    num_adapter_pages=16,
    adapter_page_bytes=256,
    keeps_host_copy=True,
)


@dataclasses.dataclass(slots=True, eq=False)
class FakeRow:
    added: RowAdded
    adapters: tuple[tuple[str, float], ...]
    token_ids: list[int]
    states: list[State]
    """One per token: what its position must hold."""
    encoder_states: list[State]
    """One per token of the encoder's input: what the blocks of its positions must hold."""
    block_tables: list[list[BlockId]]
    """One for each cache group."""
    num_computed_tokens: int | None = None
    has_sampled: bool = False
    failed_at: int | None = None
    """The step of the failure. A plan made before its result was known may have the row again."""


@dataclasses.dataclass(slots=True)
class _Copy:
    digest: str
    page_ids: tuple[PageId, ...]
    first_step_id: int


@dataclasses.dataclass(slots=True)
class _Cell:
    digest: bytes | None
    """None: nothing useful is in it."""
    step_id: int
    tenants: set[str] = dataclasses.field(default_factory=set)
    """Tenants whose rows have read it."""


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
        self._rows: dict[Slot, FakeRow] = {}
        self._every = [
            group.spec.every if isinstance(group.spec, States) else None
            for group in capacity.cache_groups
        ]
        """Positions between the states of each cache group; None: its blocks hold positions."""
        groups = [
            (group, 1 if every else capacity.block_size)
            for group, every in zip(capacity.cache_groups, self._every, strict=True)
        ]
        self._kv = [empty_blocks(group.num_blocks, size) for group, size in groups]
        self._host_kv = [empty_blocks(group.num_host_blocks, size) for group, size in groups]
        specs = [group.spec for group in capacity.cache_groups]
        self._cross_groups = [i for i, spec in enumerate(specs) if isinstance(spec, Cross)]
        self._own_groups = [i for i, spec in enumerate(specs) if not isinstance(spec, Cross)]
        self._device: dict[AdapterHandle, tuple[str, tuple[PageId, ...]]] = {}
        self._copies: dict[AdapterHandle, _Copy] = {}
        self._cells: dict[CellId, _Cell] = {}
        self.num_encoded = 0
        """Number of images that were encoded."""
        self._num_failing_encodes = 0
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

    def fail_encodes(self, num_images: int = 1) -> None:
        """Let the encoder fail for the next images."""
        self._num_failing_encodes += num_images

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
            for image in plan.encoded_images:
                self._cells[image.cell] = _Cell(None, plan.step_id)
            for text in plan.encoded_texts:
                self._encode_text(text, is_spoilt=True)
            return StepFailedError(f"step {plan.step_id} was planted to fail")
        for copy in plan.adapter_copies:
            self._start_copy(copy, plan.step_id)
        self._encode(plan)
        slots = [step.slot for step in plan.rows]
        require(len(set(slots)) == len(slots), "a slot computes twice in one step")
        for step in plan.rows:
            self._check(step)
        self._check_texts(plan)
        for text in plan.encoded_texts:
            self._encode_text(text)
        for step in plan.rows:
            self._check_encoder_context(step)
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
            states = self.model.prompt(
                added.token_ids, added.images, adapters, added.encoder_token_ids
            )
            self._rows[added.slot] = FakeRow(
                added,
                adapters,
                list(added.token_ids),
                states,
                self.model.encode(added.encoder_token_ids, adapters),
                [[] for _ in self._kv],
            )
        move_blocks(plan, self._kv, self._host_kv)

    def _encode(self, plan: StepPlan) -> None:
        """Encode the images, each into a cell that a row of the same step reads."""
        read = {cell for step in plan.rows for cell in step.image_cells}
        cells = [encode.cell for encode in plan.encoded_images]
        require(len(set(cells)) == len(cells), "a cell is written twice in one step")
        for encode in plan.encoded_images:
            images = self._capacity.images
            require(images is not None and 0 <= encode.cell < images.num_cells, "no such cell")
            require(encode.cell in read, "an image is encoded that no row of the step reads")
            self._cells[encode.cell] = _Cell(self._encoded(encode), plan.step_id)

    def _encoded(self, encode: EncodeImage) -> bytes | None:
        if self._num_failing_encodes:
            self._num_failing_encodes -= 1
            return None
        self.num_encoded += 1
        return encode.digest

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
        self._check_images(row, step)
        require(len(step.new_block_ids) == len(self._kv), "blocks for each cache group")
        for table, block_ids in zip(row.block_tables, step.new_block_ids, strict=True):
            table.extend(block_ids)
        for group in self._own_groups:
            self._check_block_table(row, step, group)
            self._check_context(row, step, group)
        for group in self._cross_groups:
            table, size = row.block_tables[group], self._capacity.block_size
            require(len(set(table)) == len(table), "a block twice in one table")
            require(len(table) == -(-len(row.encoder_states) // size), "the encoder's own length")

    def _check_texts(self, plan: StepPlan) -> None:
        slots = [text.slot for text in plan.encoded_texts]
        require(len(set(slots)) == len(slots), "a slot encodes twice in one step")
        require({*slots} <= {step.slot for step in plan.rows}, "a slot encodes without its row")
        for group in self._cross_groups:
            written = {
                block_id for slot in slots for block_id in self._rows[slot].block_tables[group]
            }
            for step in plan.rows:
                table = self._row(step).block_tables[group]
                require(
                    step.slot in slots or written.isdisjoint(table),
                    "a row reads what another one encodes in this step",
                )

    def _encode_text(self, encode: EncodeText, *, is_spoilt: bool = False) -> None:
        row, size = self._rows[encode.slot], self._capacity.block_size
        for group in self._cross_groups:
            for position, state in enumerate(row.encoder_states):
                block = self._kv[group][row.block_tables[group][position // size]]
                block[position % size] = SPOILT if is_spoilt else state

    def _check_encoder_context(self, step: RowStep) -> None:
        """Every position of the encoder's input is there, for this input and these adapters."""
        row, size = self._row(step), self._capacity.block_size
        if row.failed_at is not None:
            return
        for group in self._cross_groups:
            blocks = [self._kv[group][block_id] for block_id in row.block_tables[group]]
            found = [blocks[i // size][i % size] for i in range(len(row.encoder_states))]
            require(
                found == row.encoder_states,
                f"slot {step.slot} does not read its encoder's input in cache group {group}",
            )

    def _compute(self, step: RowStep) -> RowResult:
        row = self._row(step)
        if row.failed_at is not None:
            return RowResult(step.slot, error=RowFailedError("it failed before").to_info())
        error = self._image_error(step) or self._error_of(row)
        if error is not None:
            row.failed_at = self._last_step_id
            self._spoil(step)
            return RowResult(step.slot, error=error.to_info())
        stop = step.start + step.num_tokens
        extended = self.model.extend(row.states[-1], step.draft_token_ids, row.adapters)
        known = row.states[step.start : stop]
        written = [*known, *extended[: stop - step.start - len(known)]]
        for position, state in enumerate(written, step.start):
            self._write(row, position, state)
        if self._num_deferred_rows and self._may_defer(row, step):
            self._num_deferred_rows -= 1
            row.num_computed_tokens = stop - len(step.draft_token_ids) - 1
            return RowResult(step.slot, is_deferred=True)
        result = self._result(row, step)
        # The state of a rejected draft token is not there.
        num_right = max(0, len(result.token_ids) - 1)
        row.num_computed_tokens = stop - len(step.draft_token_ids) + num_right
        return result

    def _may_defer(self, row: FakeRow, step: RowStep) -> bool:
        """Return whether a row may be deferred now, as one whose grammar is not ready."""
        return step.wanted is Wanted.LAST and not _is_beam(row)

    def _check_images(self, row: FakeRow, step: RowStep) -> None:
        """The positions of images have the right rows, of this tenant, and are not cut."""
        stop, images = step.start + step.num_tokens, self._capacity.images
        read = [
            image for image in row.added.images if image.first < stop and step.start < image.end
        ]
        require(len(read) == len(step.image_cells), "a cell for each image")
        for image, cell_id in zip(read, step.image_cells, strict=True):
            require(cell_id in self._cells, "an image that was never encoded")
            cell = self._cells[cell_id]
            if cell.digest is None:  # the row fails, if its plan was made before that was known
                age = self._last_step_id - cell.step_id
                require(age <= self._capacity.num_stages, "an image that was not encoded")
                continue
            require(cell.digest == image.digest, "the rows of another image")
            cell.tenants.add(row.added.tenant)
            require(len(cell.tenants) == 1, "the rows of another tenant")
            is_whole = images is not None and images.is_whole
            require(not is_whole or stop >= image.end, "an image is cut")

    def _image_error(self, step: RowStep) -> LoraplexError | None:
        if any(self._cells[cell_id].digest is None for cell_id in step.image_cells):
            return RowFailedError("an image could not be encoded")
        return None

    def _error_of(self, row: FakeRow) -> LoraplexError | None:
        """Return the error with which a row fails now; None if it does not."""
        del row
        if not self._num_failing_rows:
            return None
        self._num_failing_rows -= 1
        return RowFailedError("told to fail")

    def _row(self, step: RowStep) -> FakeRow:
        row = self._rows.get(step.slot)
        if row is None:
            raise PlanViolation(f"slot {step.slot} is empty")
        return row

    def _check_tokens(self, row: FakeRow, step: RowStep) -> None:
        stop = step.start + step.num_tokens - len(step.draft_token_ids)
        require(stop > step.start, "a row computes nothing")
        if _is_beam(row) and stop == len(row.token_ids) + 1:
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
            ends == (step.wanted is not Wanted.NONE) or step.wanted is Wanted.ALL,
            "logits are needed exactly where a row ends",
        )
        is_pooled = ends and isinstance(row.added.task, Pool)
        require(is_pooled == (step.wanted is Wanted.POOL), "a vector where a pooled row ends")
        task = row.added.task
        if isinstance(task, Pool) and task.kind.needs_whole_prompt:
            require(step.start == 0 and ends, "a prompt that must be whole is cut")

    def _check_block_table(self, row: FakeRow, step: RowStep, group: CacheGroupId) -> None:
        table, every = row.block_tables[group], self._every[group]
        if every is not None:
            self._check_states(row, step, group, every)
            return
        used = [table[i] for i in self._used(len(table), step.start, group)]
        require(len(set(used)) == len(used), "a block twice in one table")
        require(all(0 <= b < len(self._kv[group]) for b in used), "no such block")
        num_positions = len(table) * self._capacity.block_size
        require(step.start + step.num_tokens <= num_positions, "the block table is too short")

    def _check_states(self, row: FakeRow, step: RowStep, group: CacheGroupId, every: int) -> None:
        """The last full state is there, and the step has places for those that it writes."""
        table, num_read = row.block_tables[group], step.start // every
        stop = step.start + step.num_tokens
        used = [b for b in table[max(0, num_read - 1) : stop // every] if b != NO_BLOCK]
        require(len(set(used)) == len(used), "a state twice in one table")
        require(all(0 <= b < len(self._kv[group]) for b in used), "no such state")
        require(stop // every <= len(table), "the table of states is too short")
        if num_read:
            block_id = table[num_read - 1]
            require(block_id != NO_BLOCK, f"slot {step.slot} has no state to go on from")
            require(
                self._kv[group][self._state_block(row, group, num_read - 1)]
                == [row.states[num_read * every - 1]],
                f"block {block_id} does not hold state {num_read - 1} of slot {step.slot}",
            )

    def _check_context(self, row: FakeRow, step: RowStep, group: CacheGroupId) -> None:
        """Every earlier position holds its token, after the right ones, under these adapters."""
        if self._every[group] is not None:
            return
        size, table, blocks = self._capacity.block_size, row.block_tables[group], self._kv[group]
        for index in self._used(-(-step.start // size), step.start, group):
            first, last = index * size, min((index + 1) * size, step.start)
            if blocks[table[index]][: last - first] != row.states[first:last]:
                raise PlanViolation(
                    f"block {table[index]} of cache group {group} does not hold positions {first} "
                    f"to {last - 1} of slot {step.slot}"
                )

    def _used(self, num_blocks: int, start: int, group: CacheGroupId) -> Iterable[int]:
        """Return those of the first blocks that `_is_used`."""
        spec = self._capacity.cache_groups[group].spec
        if isinstance(spec, Blocks) and spec.window is None:
            return range(num_blocks)
        return [index for index in range(num_blocks) if self._is_used(index, start, group)]

    def _is_used(self, index: int, start: int, group: CacheGroupId) -> bool:
        """Is any position of block `index` seen or written from position `start` on?"""
        spec, size = self._capacity.cache_groups[group].spec, self._capacity.block_size
        if isinstance(spec, Chunk):
            return (index + 1) * size > start // spec.size * spec.size - spec.before
        assert isinstance(spec, Blocks)
        if spec.window is None or index * size < spec.sinks:
            return True
        return (index + 1) * size > start - spec.window + 1

    def _result(self, row: FakeRow, step: RowStep) -> RowResult:
        stop = step.start + step.num_tokens - len(step.draft_token_ids)
        scores: tuple[TokenLogprob, ...] = ()
        if step.wanted is Wanted.ALL:
            last = min(stop, len(row.token_ids) - 1)
            num_top = row.added.sampling.prompt_logprobs or 0
            following = row.token_ids[step.start + 1 : last + 1]
            scores = tuple(self._logprob(row, token_id, num_top) for token_id in following)
        if stop < len(row.token_ids):
            return RowResult(step.slot, prompt_logprobs=scores)
        if isinstance(row.added.task, Pool):
            return RowResult(step.slot, pooled=self.model.vector(row.states[-1], row.added.task))
        if _is_beam(row):
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
            logprobs = tuple(
                self._logprob(row, token_id, step.num_logprobs) for token_id in token_ids
            )
        return RowResult(step.slot, tuple(token_ids), logprobs, scores)

    def _logprob(self, row: FakeRow, token_id: int, num_top: int) -> TokenLogprob:
        """Return the log probability of a token of a row, wherever it stands."""
        del row
        return fake_logprob(token_id, num_top)

    def _sample(self, row: FakeRow) -> int:
        """The row's next token, which is its newest then."""
        token_id = self._next_token(row)
        self._append(row, token_id)
        row.has_sampled = True
        return token_id

    def _next_token(self, row: FakeRow) -> int:
        added = row.added
        return self.model.sample(
            row.states[-1],
            added.sampling,
            added.generation.seed,
            added.sequence_index,
            len(row.token_ids) - added.num_prompt_tokens,
            added.generation.suppressed_token_ids,
        )

    def _candidates(self, row: FakeRow, step: RowStep) -> tuple[tuple[int, float], ...]:
        added = row.added
        require(step.num_candidates > 0, "of a beam, candidates are wanted")
        return tuple(
            self.model.candidates(
                row.states[-1],
                step.num_candidates,
                added.sampling,
                len(row.token_ids) - added.num_prompt_tokens,
                added.generation.suppressed_token_ids,
            )
        )

    def _append(self, row: FakeRow, token_id: int) -> None:
        row.token_ids.append(token_id)
        row.states.extend(self.model.extend(row.states[-1], [token_id], row.adapters))

    def _write(self, row: FakeRow, position: int, state: State) -> None:
        size = self._capacity.block_size
        for group in self._own_groups:
            kv, table, every = self._kv[group], row.block_tables[group], self._every[group]
            if every is None:
                kv[table[position // size]][position % size] = state
            elif (position + 1) % every == 0 and table[position // every] != NO_BLOCK:
                self._write_state(row, group, position // every, state)

    def _write_state(self, row: FakeRow, group: CacheGroupId, index: int, state: State) -> None:
        self._kv[group][self._state_block(row, group, index)][0] = state

    def _state_block(self, row: FakeRow, group: CacheGroupId, index: int) -> BlockId:
        """Return the block that a row reads a state from, or writes it to."""
        return row.block_tables[group][index]

    def _spoil(self, step: RowStep) -> None:
        """Overwrite what a failed row wrote, as it is of no use."""
        row = self._row(step)
        for table, block_ids in zip(row.block_tables, step.new_block_ids, strict=True):
            if block_ids and table[-len(block_ids) :] != list(block_ids):
                table.extend(block_ids)
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


def _is_beam(row: FakeRow) -> bool:
    return not isinstance(row.added.task, Pool) and row.added.sampling.beam is not None


def fake_logprob(token_id: int, num_top: int = 0) -> TokenLogprob:
    """Return a log probability that identifies the token."""
    top = tuple((token_id + i, -(token_id + i + 1) / 1024) for i in range(num_top))
    return TokenLogprob(token_id, -(token_id + 1) / 1024, 1, top)
