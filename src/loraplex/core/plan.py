"""The plan and the result of a step: the only interface of control plane and data plane.

Rows live in slots that the runner keeps, and a plan is a difference: rows that join, rows that
leave, and what each remaining row computes in this step. There is no prefill and no decode: a row
computes `num_tokens` positions from `start` on. A plan has only plain scalars, so it can be logged
and replayed.
"""

import bisect
import enum
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import msgspec

from loraplex.core.adapter import (
    LM_HEAD,
    OUTSIDE_LAYERS,
    SCORE,
    AdapterHandle,
    LoraTarget,
    TargetPart,
)
from loraplex.core.cache import Blocks, CacheSpec
from loraplex.core.errors import ErrorInfo
from loraplex.core.image import ImageSpan
from loraplex.core.output import LogitsFile, TokenLogprob
from loraplex.core.task import HasTask, PoolKind, Task

Slot = int
BlockId = int
PageId = int
CacheGroupId = int
"""Index of a cache group: layers that share one block table per sequence."""
CellId = int
"""Place of the rows of an encoded image."""

NO_BLOCK: Final = -1
"""Gap in a block table: a block that was freed because no position will read it again."""


class Wanted(enum.StrEnum):
    """What a row yields in a step."""

    NONE = "none"
    """Nothing: a chunk of a prompt that does not end it."""
    LAST = "last"
    """A token, of the logits of the last position (and one more per accepted draft token)."""
    POOL = "pool"
    """A vector, of the hidden state of the last position."""
    ALL = "all"
    """What LAST yields, and the log probabilities of every position (prompt_logprobs)."""


class RowAdded(HasTask, msgspec.Struct, frozen=True, omit_defaults=True):
    """A sequence takes a slot."""

    slot: Slot
    sequence_id: int
    task: Task
    sequence_index: int
    """Index of the sequence in its request: part of the sampler's counter."""
    token_ids: tuple[int, ...]
    """Every token known now, prompt and output: the sampler's penalties count them."""
    num_prompt_tokens: int
    adapters: tuple[tuple[AdapterHandle, float], ...] = ()
    """(handle, scale); empty is the base model."""
    tenant: str = ""
    """Tenant of the request: tenants take turns where grammars are compiled."""
    images: tuple[ImageSpan, ...] = ()
    """Images of the prompt, in their order. Their positions have the model's placeholder."""
    encoder_token_ids: tuple[int, ...] = ()
    """Input of the encoder; empty: the model has none."""


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
    """Draft tokens after the row's newest token. They are computed with it, and the sampler keeps
    those that it would have chosen: a draft token changes no output."""
    new_block_ids: tuple[tuple[BlockId, ...], ...] = ((),)
    """Blocks appended to the row's block tables, one entry for each cache group."""
    wanted: Wanted = msgspec.field(default=Wanted.LAST, name="logits")
    """What the row yields; encoded as `logits`, as journals have it."""
    num_logprobs: int | None = None
    num_candidates: int = 0
    """Number of most likely next tokens to return for a beam, instead of a sampled one."""
    image_cells: tuple[CellId, ...] = ()
    """Cells of the images that the row computes positions of, in their order: rows of a cell take
    the place of the embeddings of these positions."""


class BlockCopy(msgspec.Struct, frozen=True):
    """Copy a block before the step computes (copy on write of a fork).

    The group is encoded as `kv_group`, as journals have it; so in BlockTransfer.
    """

    cache_group: CacheGroupId = msgspec.field(name="kv_group")
    source: BlockId
    target: BlockId


class BlockTransfer(msgspec.Struct, frozen=True):
    """Copy the KV of a block to the host's memory, or back."""

    cache_group: CacheGroupId = msgspec.field(name="kv_group")
    device_block: BlockId
    host_block: BlockId


class AdapterCopy(msgspec.Struct, frozen=True):
    """Start to copy an adapter from the host tier into these device pages."""

    handle: AdapterHandle
    page_ids: tuple[PageId, ...]


class EncodeImage(msgspec.Struct, frozen=True, tag="image"):
    """Encode an image into a cell. The rows that need it first are in the same step."""

    digest: bytes
    cell: CellId


class EncodeText(msgspec.Struct, frozen=True, tag="text"):
    """Encode the encoder input of a row, with the row's adapters.

    Keys and values of all its positions are written to the row's blocks of each group of kind
    `Cross`. The row is in the same step, and no other row of the step reads these blocks. A row
    that fails may encode nothing.
    """

    slot: Slot


Encode = EncodeImage | EncodeText
"""What an encoder computes before the rows of a step: one struct for each kind of input."""


class StepPlan(msgspec.Struct, frozen=True, omit_defaults=True):
    """One step.

    Order: rows leave, rows join, blocks are offloaded, then loaded back, then copied; adapter
    copies start, encoders run, rows run.
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
    encodes: tuple[Encode, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the rows."""
        return sum(row.num_tokens for row in self.rows)

    @property
    def encoded_images(self) -> tuple[EncodeImage, ...]:
        return tuple(encode for encode in self.encodes if isinstance(encode, EncodeImage))

    @property
    def encoded_texts(self) -> tuple[EncodeText, ...]:
        return tuple(encode for encode in self.encodes if isinstance(encode, EncodeText))


class RowResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """Result of a row: 0 to k + 1 tokens for k draft tokens, or the row's own error."""

    slot: Slot
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    """One per token, when num_logprobs was set."""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """One for the known token after each computed position, with Wanted.ALL."""
    forced_token_ids: tuple[int, ...] = ()
    """Tokens that a grammar makes likely next: draft tokens for the next step."""
    candidates: tuple[tuple[int, float], ...] = ()
    """(token id, log probability after penalties) for a beam instead of tokens, most likely
    first."""
    logits: LogitsFile | None = None
    """One row per new token, of a request that returns them."""
    prompt_logits: LogitsFile | None = None
    """One row per computed position of the prompt, of a request that returns them."""
    is_deferred: bool = False
    """The row was computed and not sampled, because its grammar was not ready: its newest token is
    computed again in a later step."""
    error: ErrorInfo | None = None
    pooled: bytes = b""
    """The vector of a row with Wanted.POOL: float32, little-endian."""


class StepTiming(msgspec.Struct, frozen=True):
    """Time that the host spent on a step.

    On an accelerator, forward_ns is the time to enqueue the step plus the time to wait for its end.
    The time between the two belongs to other steps.
    """

    prepare_ns: int = 0
    forward_ns: int = 0
    sample_ns: int = 0
    copy_ns: int = 0
    """Part of prepare_ns: copies of adapters."""
    rank_wait_ns: tuple[int, ...] = ()
    """Time that each of several ranks has waited for others since its start, as last reported."""
    lora_ns: int | None = None
    """Part of forward_ns: the ops of LoRA, of the rank that reports. None: not measured."""


class StepResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """Result of a step; `rows` are in the plan's order."""

    step_id: int
    rows: tuple[RowResult, ...] = ()
    copies_done: tuple[AdapterHandle, ...] = ()
    copies_failed: tuple[tuple[AdapterHandle, ErrorInfo], ...] = ()
    timing: StepTiming = StepTiming()


class PageGeometry(msgspec.Struct, frozen=True):
    """The arithmetic of the device adapter pool: pages of whole slots, slots of whole elements.

    A target's A and B are in one page: `slots_of(target)` slots.
    """

    slot_elements: int
    slots_per_page: int

    @property
    def page_elements(self) -> int:
        return self.slot_elements * self.slots_per_page

    def slots_of(self, target: LoraTarget) -> int:
        elements = target.rank * (target.in_features + target.out_features)
        return -(-elements // self.slot_elements)


VECTORS = (TargetPart.FACTOR, TargetPart.BIAS, TargetPart.SHIFT)
"""Parts that are vectors of a linear layer's outputs."""


class AdapterShare(msgspec.Struct, frozen=True):
    """What of every adapter one rank of several holds: LoRA of its part of each linear layer.

    What lies outside the layers is whole on every rank.
    """

    layers: tuple[dict[str, tuple[int, int]], ...]
    """(in_features, out_features) of the rank's part of each module, by layer."""
    largest_piece: int
    """Number of elements of the largest piece of a vector."""

    def of(self, targets: Iterable[LoraTarget]) -> tuple[LoraTarget, ...]:
        """Return the rank's pieces of an adapter with these. Unknown modules stay as they are."""
        return tuple(piece for target in targets for piece in self._pieces(target))

    def _pieces(self, target: LoraTarget) -> Iterator[LoraTarget]:
        shapes = self.layers[target.layer] if 0 <= target.layer < len(self.layers) else {}
        if target.module not in shapes:
            yield target
            return
        in_features, out_features = shapes[target.module]
        if target.part not in VECTORS:
            yield msgspec.structs.replace(
                target, in_features=in_features, out_features=out_features
            )
        elif target.first == 0:
            # The first piece of the whole vector stands for all of them.
            size = self.largest_piece // target.rank
            for first in range(0, out_features, size):
                rest = min(size, out_features - first)
                yield msgspec.structs.replace(target, out_features=rest, first=first)


def targets_by_stage(
    targets: Iterable[LoraTarget], first_layers: Sequence[int]
) -> list[tuple[LoraTarget, ...]]:
    """Divide the pieces of an adapter between pipeline stages with these first layers.

    The first stage has what belongs to the embedding, the last one all that lies outside the
    layers.
    """
    stages: list[list[LoraTarget]] = [[] for _ in first_layers]
    for target in targets:
        if target.layer != OUTSIDE_LAYERS:
            stages[bisect.bisect_right(first_layers, target.layer) - 1].append(target)
            continue
        stages[-1].append(target)
        if len(stages) > 1 and target.module not in (LM_HEAD, SCORE):
            stages[0].append(target)
    return [tuple(stage) for stage in stages]


class CacheGroupCapacity(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Blocks of one cache group."""

    spec: CacheSpec = Blocks()
    num_blocks: int
    num_host_blocks: int = 0
    """Host blocks for the KV of preempted sequences; 0: it is computed again."""
    block_bytes: int = 0
    """Bytes of a block in all layers of the group that one rank has."""


class RotationBorder(msgspec.Struct, frozen=True, omit_defaults=True):
    """Length beyond which the rotation of a sequence's first positions depends on its length.

    A position is rotated for its own length, which is its index plus 1, or for the sequence's
    rotation length where that is greater (ADR 32).
    """

    length: int
    by_prompt_length: bool = False
    """A prompt beyond the border is rotated for its very length; else all lengths are alike."""
    recomputes: bool = False
    """A sequence whose output crosses the border is computed again; else only prompts count."""

    def rotation_length(self, num_prompt_tokens: int, num_tokens: int) -> int:
        """Return the rotation length of a sequence; 0: each position is rotated for its own."""
        if (num_tokens if self.recomputes else num_prompt_tokens) <= self.length:
            return 0
        return num_prompt_tokens if self.by_prompt_length else self.length + 1


class ImageCapacity(msgspec.Struct, frozen=True, omit_defaults=True):
    """Images that the runner reads."""

    placeholder_id: int
    """Token at the positions of an image: what all that reads ids sees there."""
    max_tokens: int
    """Maximum number of positions of an image, which is the number of rows of a cell."""
    num_cells: int
    """Number of images whose rows can be kept, and maximum number of images of a prompt."""
    is_whole: bool = False
    """Whether the positions of an image see one another, so that a step computes all of them."""


class Capacity(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Limits of the runner, which it returns once; nothing is written back into the config."""

    block_size: int
    """Tokens per block, in every cache group."""
    cache_groups: tuple[CacheGroupCapacity, ...]
    """The index is the CacheGroupId; the largest attention window is first."""
    max_num_seqs: int
    """Number of slots."""
    max_num_batched_tokens: int
    """Most tokens in a step."""
    num_balanced_tokens: int = 0
    """Tokens of a step whose arithmetic takes as long as reading the weights; 0: not known."""
    num_stages: int = 1
    """Number of pipeline stages: as many plans may be in flight, and one more with overlap. With
    several stages no plan has a row whose token an earlier plan in flight samples."""
    generates: bool = True
    """Whether the runner computes tokens: the model has an output layer."""
    is_causal: bool = True
    """Whether no position reads a later one. Else a step computes a prompt whole."""
    pool_kinds: tuple[PoolKind, ...] = ()
    """Kinds of vectors that the runner computes."""
    hidden_size: int = 0
    """Length of these vectors."""
    images: ImageCapacity | None = None
    """None: the model has no encoder of images."""
    returns_logits: bool = True
    """Whether rows may return logits: the last stage of a pipeline writes no files for rank 0."""
    max_model_len: int
    longest_encoder_input: int = 0
    """Maximum number of tokens of an encoder's input; 0: the model has no encoder."""
    rotation_border: RotationBorder | None = None
    """None: no sequence gets so long, or no length counts."""
    vocab_size: int
    page_geometry: PageGeometry
    num_adapter_pages: int
    adapter_page_bytes: int
    adapter_table_bytes: int = 0
    """Memory of the tables of what is in the pages."""
    adapter_share: AdapterShare | None = None
    """None: the runner's ranks hold adapters whole."""
    first_layers: tuple[int, ...] = (0,)
    """First layer of each pipeline stage."""
    host_page_bytes: int = 0
    """Bytes of a page of host memory, where adapters take whole pages; 0: the source's size."""
    keeps_host_copy: bool
    """False on a CPU: the host copy of an adapter is dropped once it is in the pool."""
    kv_cache_bytes: int = 0
    weights_bytes: int = 0
    workspace_bytes: int = 0
    """Memory left for the tensors of a step; 0 on a CPU."""
    graph_bytes: int = 0
    """Memory of recorded steps."""
    device_bytes: int = 0
    """Total memory of a device that has its own; 0: it uses the host's."""
    device_free_bytes: int = 0
    """Part of device_bytes that was unused at the start, without the memory left for steps."""
    device_name: str = ""
    """Name of the GPU, or of the processor; empty: unknown."""

    def held(self, targets: Iterable[LoraTarget]) -> list[tuple[LoraTarget, ...]]:
        """Return what one rank of each stage holds of an adapter with these pieces."""
        if self.adapter_share is not None:
            targets = self.adapter_share.of(targets)
        return targets_by_stage(targets, self.first_layers)
