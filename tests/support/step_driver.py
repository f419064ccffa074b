"""Drives a runner with hand-made plans: no scheduler, no sharing, no preemption.

For tests and measurements of the data plane alone. It decides how prompts are cut into chunks and
in which order blocks are handed out, since neither may change an output. A block that the window
of its cache group has passed is handed out again.
"""

import collections
import dataclasses
from collections.abc import Iterable, Sequence

from loraplex.core.adapter import AdapterHandle
from loraplex.core.errors import error_from_info
from loraplex.core.plan import (
    NO_BLOCK,
    AdapterCopy,
    BlockId,
    PageId,
    RowAdded,
    RowResult,
    RowStep,
    Slot,
    StepPlan,
    StepResult,
    Wanted,
)
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.task import Generate
from loraplex.engine.runner import Runner
from loraplex.memory.cache_policy import CachePolicy, cache_policy

_GREEDY = SamplingParams(temperature=0.0)


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    token_ids: tuple[int, ...]
    adapters: tuple[tuple[AdapterHandle, float], ...] = ()
    sampling: SamplingParams = _GREEDY
    suppressed_token_ids: tuple[int, ...] = ()


@dataclasses.dataclass(slots=True, eq=False)
class _Running:
    prompt: Prompt
    slot: Slot
    num_computed: int = 0
    output: list[int] = dataclasses.field(default_factory=list)


class _GroupBlocks:
    """Blocks of one cache group, for one generation."""

    def __init__(self, policy: CachePolicy, block_order: Iterable[BlockId]) -> None:
        self._policy = policy
        self._free = collections.deque(block_order)
        self._tables: dict[Slot, list[BlockId]] = collections.defaultdict(list)

    def new_blocks(self, step_end: int, slot: Slot) -> tuple[BlockId, ...]:
        """Take the blocks that the row lacks for its first step_end positions."""
        table = self._tables[slot]
        num_blocks = len(self._policy.takes(0, step_end)) - len(table)
        new = tuple(self._free.popleft() for _ in range(num_blocks))
        table.extend(new)
        return new

    def free_passed(self, slot: Slot, num_computed: int) -> None:
        table = self._tables[slot]
        needed = self._policy.needed(num_computed)
        for index in range(needed.since):
            if table[index] != NO_BLOCK and not needed.includes(index):
                self._free.append(table[index])
                table[index] = NO_BLOCK


class StepDriver:
    """One generation at a time; each uses slots and blocks from the start of their order."""

    def __init__(self, runner: Runner, block_order: Sequence[BlockId] | None = None) -> None:
        self._runner = runner
        self._capacity = runner.capacity()
        self._block_order = block_order
        self._num_steps = 0
        self._next_page: PageId = 0

    def load(self, handle: AdapterHandle, num_pages: int) -> StepResult:
        """Copy an adapter from the host tier to pages that nothing else has."""
        pages = tuple(range(self._next_page, self._next_page + num_pages))
        self._next_page += num_pages
        return self.run(adapter_copies=(AdapterCopy(handle, pages),))

    def generate(
        self,
        prompts: Sequence[Prompt],
        num_tokens: int,
        *,
        chunk_size: int | None = None,
        prompt_logits: bool = False,
    ) -> list[list[int]]:
        """num_tokens new tokens for each prompt, all in the same steps.

        chunk_size: prompt tokens of one row in one step; None is the whole prompt.
        """
        sequences = [_Running(prompt, slot) for slot, prompt in enumerate(prompts)]
        groups = self._group_blocks()
        added = tuple(_added(sequence) for sequence in sequences)
        while pending := [s for s in sequences if len(s.output) < num_tokens]:
            steps = tuple(
                self._step(sequence, groups, chunk_size, prompt_logits) for sequence in pending
            )
            result = self.run(added=added, rows=steps)
            added = ()
            for sequence, step, row in zip(pending, steps, result.rows, strict=True):
                _absorb(sequence, step, row)
                for group in groups:
                    group.free_passed(sequence.slot, sequence.num_computed)
        self.run(removed=tuple(sequence.slot for sequence in sequences))
        return [sequence.output for sequence in sequences]

    def run(
        self,
        *,
        removed: tuple[Slot, ...] = (),
        added: tuple[RowAdded, ...] = (),
        rows: tuple[RowStep, ...] = (),
        adapter_copies: tuple[AdapterCopy, ...] = (),
    ) -> StepResult:
        """Launch one plan and wait for it."""
        self._num_steps += 1
        plan = StepPlan(
            self._num_steps,
            removed=removed,
            added=added,
            rows=rows,
            adapter_copies=adapter_copies,
        )
        return self._runner.launch(plan).wait()

    def _group_blocks(self) -> list[_GroupBlocks]:
        found = []
        for number, group in enumerate(self._capacity.cache_groups):
            order = [
                block_id
                for block_id in self._block_order or range(group.num_blocks)
                if block_id < group.num_blocks
            ]
            policy = cache_policy(group.spec, self._capacity.block_size)
            # Another order, so that no group's blocks are those of the group before it.
            found.append(_GroupBlocks(policy, order[::-1] if number % 2 else order))
        return found

    def _step(
        self,
        sequence: _Running,
        groups: Sequence[_GroupBlocks],
        chunk_size: int | None,
        prompt_logits: bool,
    ) -> RowStep:
        start, prompt = sequence.num_computed, sequence.prompt.token_ids
        left = len(prompt) - start
        num_tokens = max(1, min(left, chunk_size or left))
        end = start + num_tokens
        logits = Wanted.LAST if end >= len(prompt) else Wanted.NONE
        return RowStep(
            slot=sequence.slot,
            start=start,
            num_tokens=num_tokens,
            token_ids=prompt[start:end] if left > 0 else None,
            new_block_ids=tuple(group.new_blocks(end, sequence.slot) for group in groups),
            wanted=Wanted.ALL if prompt_logits and left > 0 else logits,
        )


def run_in_turn(runner: Runner, plans: Sequence[StepPlan]) -> list[StepResult]:
    """Each is waited for before the next is launched."""
    return [runner.launch(plan).wait() for plan in plans]


def run_ahead(runner: Runner, plans: Sequence[StepPlan]) -> list[StepResult]:
    """Each is launched before the one before it is waited for, as with overlap."""
    results, last = [], runner.launch(plans[0])
    for plan in plans[1:]:
        launched = runner.launch(plan)
        results.append(last.wait())
        last = launched
    return [*results, last.wait()]


def decoding_plans(num_decodes: int, samplings: Sequence[SamplingParams]) -> list[StepPlan]:
    """Rows with prompts of three tokens, then so many steps in which each takes its own token.

    Row i has slot i and block i.
    """
    slots = range(len(samplings))
    added = tuple(
        RowAdded(
            slot,
            slot,
            Generate(sampling, seed=5 + slot),
            0,
            (7, 8, slot),
            3,
        )
        for slot, sampling in zip(slots, samplings, strict=True)
    )
    prompts = tuple(
        RowStep(slot, 0, 3, token_ids=(7, 8, slot), new_block_ids=((slot,),)) for slot in slots
    )
    decodes = (
        StepPlan(2 + moved, rows=tuple(RowStep(slot, 3 + moved, 1) for slot in slots))
        for moved in range(num_decodes)
    )
    return [StepPlan(1, added=added, rows=prompts), *decodes]


def _added(sequence: _Running) -> RowAdded:
    prompt = sequence.prompt
    return RowAdded(
        slot=sequence.slot,
        sequence_id=sequence.slot,
        task=Generate(
            prompt.sampling,
            seed=prompt.sampling.seed or 0,
            suppressed_token_ids=prompt.suppressed_token_ids,
        ),
        sequence_index=0,
        token_ids=prompt.token_ids,
        num_prompt_tokens=len(prompt.token_ids),
        adapters=prompt.adapters,
    )


def _absorb(sequence: _Running, step: RowStep, row: RowResult) -> None:
    if row.error is not None:
        raise error_from_info(row.error)
    sequence.num_computed += step.num_tokens - row.is_deferred
    sequence.output.extend(row.token_ids)
