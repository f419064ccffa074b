"""The one crossing between the control plane and the data plane.

Rows live in slots that the runner keeps, and a plan is a difference: rows that join, rows that
leave, and what each remaining row computes in this step. There is no prefill and no decode: a row
computes `num_tokens` positions from `start` on. Only plain scalars are in here, so a plan can be
logged and replayed.
"""

import enum
from typing import Final

import msgspec

from loraplex.core.adapter import AdapterHandle, LoraTarget
from loraplex.core.errors import ErrorInfo
from loraplex.core.output import LogitsFile, TokenLogprob
from loraplex.core.sampling_params import SamplingParams

Slot = int
BlockId = int
PageId = int

NO_BLOCK: Final = -1
"""In a block table: a block that was given back, because no position will read it again."""


class LogitsNeeded(enum.StrEnum):
    """Of which positions of a row the logits are computed."""

    NONE = "none"
    """A chunk of a prompt that does not end it."""
    LAST = "last"
    """The row samples one token (and one more per accepted draft token)."""
    ALL = "all"
    """As LAST, and every position's log probabilities are wanted (prompt_logprobs)."""


class RowAdded(msgspec.Struct, frozen=True, omit_defaults=True):
    """A sequence takes a slot."""

    slot: Slot
    sequence_id: int
    sampling: SamplingParams
    seed: int
    sequence_index: int
    """Index of the sequence in its request: part of the sampler's counter."""
    token_ids: tuple[int, ...]
    """Every token known now, prompt and output: the sampler's penalties count them."""
    num_prompt_tokens: int
    suppressed_token_ids: tuple[int, ...] = ()
    """Not to be sampled before min_tokens: the end and stop tokens."""
    end_token_ids: tuple[int, ...] = ()
    """Of a row with a grammar: what may come where its grammar may end."""
    adapters: tuple[tuple[AdapterHandle, float], ...] = ()
    """(handle, scale); empty is the base model."""


class RowStep(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one row computes in this step.

    Positions start .. start + num_tokens - 1 are computed; their KV is written to the row's
    blocks. `token_ids` are the tokens at these positions, or None: the one that the row sampled
    last (then num_tokens is 1 + len(draft_token_ids)).
    """

    slot: Slot
    start: int
    num_tokens: int
    token_ids: tuple[int, ...] | None = None
    draft_token_ids: tuple[int, ...] = ()
    """Guesses at what follows the row's newest token. They are computed with it, and the sampler
    takes the ones that it would have chosen: a guess changes no token."""
    new_block_ids: tuple[tuple[BlockId, ...], ...] = ((),)
    """Per KV group, appended to the row's block table."""
    logits: LogitsNeeded = LogitsNeeded.LAST
    num_logprobs: int | None = None
    num_candidates: int = 0
    """Of a beam: instead of a token, this many most likely next ones are wanted."""


class BlockCopy(msgspec.Struct, frozen=True):
    """Copy the KV of a block before the step computes (copy on write of a fork)."""

    kv_group: int
    source: BlockId
    target: BlockId


class BlockTransfer(msgspec.Struct, frozen=True):
    """Copy the KV of a block to the host's memory, or back."""

    kv_group: int
    device_block: BlockId
    host_block: BlockId


class AdapterCopy(msgspec.Struct, frozen=True):
    """Start to copy an adapter from the host tier into these device pages."""

    handle: AdapterHandle
    page_ids: tuple[PageId, ...]


class StepPlan(msgspec.Struct, frozen=True, omit_defaults=True):
    """One step.

    Order: rows leave, rows join, blocks are offloaded, then loaded back, then copied; adapter
    copies start, rows run.
    """

    step_id: int
    removed: tuple[Slot, ...] = ()
    added: tuple[RowAdded, ...] = ()
    rows: tuple[RowStep, ...] = ()
    block_offloads: tuple[BlockTransfer, ...] = ()
    """Device to host: of sequences that lose their blocks."""
    block_loads: tuple[BlockTransfer, ...] = ()
    """Host to device."""
    block_copies: tuple[BlockCopy, ...] = ()
    adapter_copies: tuple[AdapterCopy, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Nothing to launch. Rows may still leave: that can wait for the next plan."""
        return not (self.rows or self.adapter_copies)

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)


class RowResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a row's step gave: 0 to k + 1 tokens, or the row's own error."""

    slot: Slot
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    """One per token, when num_logprobs was set."""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """With LogitsNeeded.ALL: of the token after each computed position, where it is known."""
    forced_token_ids: tuple[int, ...] = ()
    """What a grammar makes likely to follow the new tokens: guesses for the next step."""
    candidates: tuple[tuple[int, float], ...] = ()
    """Of a beam: (token id, log probability after penalties), most likely first; and no token."""
    logits: LogitsFile | None = None
    """One row per new token, of a request that returns them."""
    prompt_logits: LogitsFile | None = None
    """One row per computed position of the prompt, of a request that returns them."""
    error: ErrorInfo | None = None


class StepTiming(msgspec.Struct, frozen=True):
    """What the host spent on a step.

    On an accelerator forward_ns is what it takes to enqueue it, and then to wait for its end; what
    passes between the two belongs to other steps.
    """

    prepare_ns: int = 0
    forward_ns: int = 0
    sample_ns: int = 0
    copy_ns: int = 0
    """Of prepare_ns: the copies of adapters."""


class StepResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the runner gives back; `rows` are in the plan's order."""

    step_id: int
    rows: tuple[RowResult, ...] = ()
    copies_done: tuple[AdapterHandle, ...] = ()
    copies_failed: tuple[tuple[AdapterHandle, ErrorInfo], ...] = ()
    timing: StepTiming = StepTiming()


class PageGeometry(msgspec.Struct, frozen=True):
    """The arithmetic of the device adapter pool: pages of whole slots, slots of whole elements.

    A target's A and B lie together in one page: `slots_of(target)` slots.
    """

    slot_elements: int
    slots_per_page: int

    @property
    def page_elements(self) -> int:
        return self.slot_elements * self.slots_per_page

    def slots_of(self, target: LoraTarget) -> int:
        elements = target.rank * (target.in_features + target.out_features)
        return -(-elements // self.slot_elements)


class Capacity(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the runner can hold. Returned by it once; nothing is written back into config."""

    block_size: int
    num_blocks: int
    """Per KV group."""
    num_kv_groups: int = 1
    num_host_blocks: int = 0
    """For the KV of preempted sequences; 0: it is computed again."""
    attention_window: int | None = None
    """A position sees so many newest positions, itself included; None: all before it."""
    num_sink_tokens: int = 0
    """With a window: so many first positions are seen, too."""
    max_num_seqs: int
    """Slots."""
    max_model_len: int
    vocab_size: int
    page_geometry: PageGeometry
    num_adapter_pages: int
    adapter_page_bytes: int
    host_page_bytes: int = 0
    """On the host an adapter takes whole pages, too, of so many bytes; 0: as much as its source."""
    keeps_host_copy: bool
    """False on a CPU: once an adapter is in the pool, its host copy is dropped."""
    kv_cache_bytes: int = 0
    weights_bytes: int = 0
    workspace_bytes: int = 0
    """Left for what a step computes with; 0 on a CPU."""
    graph_bytes: int = 0
    """Of recorded steps."""
    device_bytes: int = 0
    """Of a device with memory of its own: all of it; 0: it is the host's."""
    device_free_bytes: int = 0
    """Of that, what nobody had at the start, beside what is left for steps."""
