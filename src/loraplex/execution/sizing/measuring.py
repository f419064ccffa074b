"""Measures what a GPU's steps take, by running the largest one and recording some."""

import dataclasses
from collections.abc import Callable

from loraplex.core.plan import (
    AdapterCopy,
    Capacity,
    EncodeText,
    RowAdded,
    RowStep,
    StepPlan,
)
from loraplex.core.sampling_params import MAX_LOGPROBS, SamplingParams
from loraplex.core.task import Generate
from loraplex.kernels.accelerator import Accelerator, DeviceMemory

DUMMY_ADAPTER = 0
"""The handle that the dummy step's rows name."""
_SAMPLING = SamplingParams(
    temperature=1.0,
    top_p=0.9,
    top_k=100,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    logit_bias=((0, 1.0),),
    logprobs=MAX_LOGPROBS,
)
"""Options that make a sampler allocate memory."""
_GREEDY = SamplingParams(temperature=0.0)
"""Options of one row, so that its kernels are compiled by now, too."""


def largest_step(capacity: Capacity, num_tokens: int) -> StepPlan:
    """Return a step with the maximum numbers of rows and tokens, each row at its greatest length.

    num_tokens: maximum of a step. The first row decodes, next to the prompts of the others: so the
    kernels of such a step are compiled by now, too. The rows share the blocks that there are: what
    they read and write has no meaning. They use DUMMY_ADAPTER, which the plan copies to the first
    pages. With an encoder the first row encodes the longest input.
    """
    num_rows = min(capacity.max_num_seqs, num_tokens)
    counts = [num_tokens]
    if num_rows > 1:
        even, more = divmod(num_tokens - 1, num_rows - 1)
        counts = [1, *(even + (row < more) for row in range(num_rows - 1))]
    counts = [min(count, capacity.max_model_len) for count in counts]
    longest_input = capacity.longest_encoder_input
    num_blocks = -(-max(capacity.max_model_len, longest_input) // capacity.block_size)
    new_block_ids = tuple(
        tuple(block % group.num_blocks for block in range(num_blocks))
        for group in capacity.cache_groups
    )
    rows = tuple(
        RowStep(
            slot=slot,
            start=capacity.max_model_len - count,
            num_tokens=count,
            token_ids=(0,) * count,
            new_block_ids=new_block_ids,
            num_logprobs=MAX_LOGPROBS if slot else None,
        )
        for slot, count in enumerate(counts)
    )
    pages = tuple(range(capacity.num_adapter_pages))
    return StepPlan(
        step_id=0,
        added=tuple(_added(row, (0,) * longest_input) for row in rows),
        rows=rows,
        encodes=(EncodeText(rows[0].slot),) if longest_input else (),
        adapter_copies=(AdapterCopy(DUMMY_ADAPTER, pages),),
    )


def _added(step: RowStep, encoder_token_ids: tuple[int, ...]) -> RowAdded:
    """Return the row with the tokens of this step alone; earlier ones are only in the KV cache."""
    return RowAdded(
        slot=step.slot,
        sequence_id=step.slot,
        task=Generate(_SAMPLING if step.slot else _GREEDY),
        sequence_index=0,
        token_ids=step.token_ids or (),
        num_prompt_tokens=step.num_tokens,
        adapters=((DUMMY_ADAPTER, 1.0),),
        encoder_token_ids=encoder_token_ids,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Trials:
    """Measured operations. Each call frees what the next one does not need."""

    set_up: Callable[[], None]
    """First: takes what the trials themselves have, such as a small KV cache, until their end."""
    run_largest_step: Callable[[], None]
    record: Callable[[int], None]
    """Steps of so many sequences; they stay until `forget`."""
    forget: Callable[[], None]


def measure_workspace(accelerator: Accelerator, trials: Trials) -> int:
    """Return the bytes that the largest step takes while it runs; 0 where they are unknown."""
    if accelerator.memory() is None:
        return 0
    trials.set_up()
    before = settled_memory(accelerator)
    accelerator.reset_peak()
    trials.run_largest_step()
    accelerator.synchronize()
    after = accelerator.memory()
    assert before is not None, "as at first"
    assert after is not None, "as at first"
    return max(after.most_reserved - before.reserved, 0)


def measure_graphs(accelerator: Accelerator, trials: Trials, sizes: tuple[int, ...]) -> int:
    """Bytes that steps of all these sizes take when they are recorded, ascending ones.

    The two largest are recorded: they share what the steps compute with, and each size has what
    the second of them takes in addition. That is a little too much for the smaller ones.
    """
    taken = []
    for size in sizes[:-3:-1]:
        before = settled_memory(accelerator)
        if before is None:
            break
        trials.record(size)
        after = settled_memory(accelerator)
        assert after is not None, "as before"
        taken.append(max(before.free - after.free, 0))
    trials.forget()
    accelerator.trim()
    if not taken:
        return 0
    return taken[0] + (len(sizes) - 1) * taken[-1]


def settled_memory(accelerator: Accelerator) -> DeviceMemory | None:
    """Measure the memory without what torch caches; None: it is the host's."""
    accelerator.synchronize()
    accelerator.trim()
    return accelerator.memory()
