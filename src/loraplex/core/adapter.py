"""References to adapters, before and after their names are resolved, and the parts of an adapter.

A client sends a name, a task id or a digest. The store resolves it to a digest, which is the
adapter's only identity: everything below serving knows digests and the handles made from them.
"""

import enum
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from loraplex.core.errors import AdapterNotFoundError

MAX_TASK_ID = 2**64 - 1

AdapterHandle = int
"""The engine's own number for a digest; never reused while the engine lives."""


class ByName(msgspec.Struct, frozen=True, tag="name"):
    name: str


class ByTaskId(msgspec.Struct, frozen=True, tag="task_id"):
    """A client's integer id: uint64, 0 allowed."""

    task_id: int


class ByDigest(msgspec.Struct, frozen=True, tag="digest"):
    digest: str


AdapterKey = ByName | ByTaskId | ByDigest


class AdapterRef(msgspec.Struct, frozen=True):
    """A client's reference. Two tenants' adapters of one name are two adapters."""

    model: str
    tenant: str
    key: AdapterKey

    def __str__(self) -> str:
        match self.key:
            case ByName(name):
                return f"adapter {name!r}"
            case ByTaskId(task_id):
                return f"LoRA task {task_id}"
            case ByDigest(digest):
                return f"adapter with digest {digest}"


class AdapterChoice(msgspec.Struct, frozen=True):
    """One adapter of a request, and the scale that it is applied with."""

    key: AdapterKey
    scale: float = 1.0


class AdapterUse(msgspec.Struct, frozen=True):
    """A resolved choice, as it is sent to the engine."""

    digest: str
    scale: float = 1.0


EMBEDDING = "embed_tokens"
LM_HEAD = "lm_head"
SCORE = "score"
"""The classification head."""
OUTSIDE_LAYERS = -1
"""The layer number of the token embedding, the final norm and heads."""


class ExpertLoraLayout(enum.StrEnum):
    """The operator's word about LoRA of experts whose files can be read in two ways."""

    RANK_MAJOR = "rank_major"
    """The expert changes faster than the rank in the columns of lora_B of all experts."""
    GROUPED_BY_EXPERT = "grouped_by_expert"
    """The columns of one expert are side by side."""
    UNSWAPPED = "unswapped"
    """lora_A reads the inputs of the weight."""
    SWAPPED = "swapped"
    """lora_A reads what are the outputs: PEFT took the weight for its transpose."""


EXPERT_LORA_CHOICES: Final = (
    (ExpertLoraLayout.RANK_MAJOR, ExpertLoraLayout.GROUPED_BY_EXPERT),
    (ExpertLoraLayout.UNSWAPPED, ExpertLoraLayout.SWAPPED),
)
"""Words of which one at most is said."""


class TargetPart(enum.StrEnum):
    """Part of a module's change that lies in one place of the pool, with its layout."""

    LORA = "lora"
    """A [rank, in_features], then B transposed [rank, out_features]."""
    FACTOR = "factor"
    """[rank, out_features]: DoRA's factor of the output, less one. With rank 2, the second row
    undoes the factor for the base's bias."""
    BIAS = "bias"
    """[out_features]: the replacement of the base's bias, less that bias."""
    SHIFT = "shift"
    """[out_features]: an addition to the output: a bias of lora_B, scaled."""
    ROWS = "rows"
    """[rank, out_features]: rows of a weight that replaces the base's."""
    TOKENS = "tokens"
    """[rank, out_features]: rows of single tokens."""
    EMBEDDING_A = "embedding_a"
    """[rank, out_features]: a token's row of A transposed; out_features is the adapter's rank."""
    EMBEDDING_B = "embedding_b"
    """[rank, out_features]: B transposed."""


class LoraTarget(msgspec.Struct, frozen=True, order=True):
    """One piece of an adapter's tensors for one module, as the page arithmetic sees it.

    It takes rank * (in_features + out_features) elements. Neighbouring experts with pieces of the
    same form are one target. A tensor that is larger than the maximum
    size of a piece is several targets: each begins at `first` of the rows, or of the outputs.
    """

    layer: int
    module: str
    rank: int
    in_features: int
    out_features: int
    part: TargetPart = TargetPart.LORA
    first: int = 0
    expert: int = 0
    """Number of the first expert; 0 of a module without experts."""
    num_experts: int = 1
    """Number of experts, each with a piece of its own; 1 of a module without experts."""

    @property
    def num_elements(self) -> int:
        """Number of elements of one expert's piece."""
        return self.rank * (self.in_features + self.out_features)

    @property
    def lora_rank(self) -> int | None:
        """Rank of the LoRA that this is a piece of; None if it is not a LoRA's, or has no rank."""
        match self.part:
            case TargetPart.LORA:
                return self.rank
            case TargetPart.EMBEDDING_A:
                return self.out_features
        return None


def each_expert(targets: Iterable[LoraTarget]) -> Iterator[LoraTarget]:
    """Yield the targets, those of several experts as one for each."""
    for target in targets:
        if target.num_experts == 1:
            yield target
            continue
        form = (target.layer, target.module, target.rank, target.in_features, target.out_features)
        for expert in range(target.expert, target.expert + target.num_experts):
            yield LoraTarget(*form, target.part, target.first, expert)


def join_experts(targets: Iterable[LoraTarget]) -> Iterator[LoraTarget]:
    """Yield sorted targets of one expert each, those of neighbouring experts as one."""
    last: LoraTarget | None = None
    for target in targets:
        if last is not None:
            number = target.expert - last.expert
            if msgspec.structs.replace(target, expert=last.expert, num_experts=number) == last:
                last = msgspec.structs.replace(last, num_experts=number + 1)
                continue
            yield last
        last = target
    if last is not None:
        yield last


def head_block_size(largest_target: int, hidden_size: int) -> int:
    """Return the number of lm_head's outputs per piece; no piece is larger than a layer's.

    largest_target: inputs and outputs of the largest linear layer of any decoder layer.
    """
    return largest_target - hidden_size


class AdapterSource(msgspec.Struct, frozen=True):
    """A staged adapter: its canonical adapter file for the engine, and its size."""

    digest: str
    path: str
    num_bytes: int
    """Bytes of the tensors once they are in host memory."""
    targets: tuple[LoraTarget, ...]
    """Its pieces; neighbouring experts are one target each."""

    @property
    def ranks(self) -> dict[str, tuple[int, int]]:
        """Return (smallest, largest) rank of the LoRA by module."""
        found: dict[str, tuple[int, int]] = {}
        for target in self.targets:
            rank = target.lora_rank
            if rank is not None:
                low, high = found.get(target.module, (rank, rank))
                found[target.module] = (min(low, rank), max(high, rank))
        return found

    @property
    def num_labels(self) -> int:
        """Return the labels of its classification head; 0: it has none."""
        rows = (target.rank for target in self.targets if target.module == SCORE)
        return sum(rows)

    @property
    def module_layers(self) -> dict[str, tuple[int, ...]]:
        """Return the layers that change by module."""
        found: dict[str, set[int]] = {}
        for target in self.targets:
            found.setdefault(target.module, set()).add(target.layer)
        return {module: tuple(sorted(layers)) for module, layers in found.items()}


class LoadPolicy(enum.StrEnum):
    """When a request loads its adapters (llgtrt's load_lora_weights)."""

    AUTO = "auto"
    """Load what is not there."""
    ALWAYS = "always"
    """Check the source first, and load the adapter again if it has changed."""
    NEVER = "never"
    """Fail unless the adapter is in the host or device tier, or being loaded."""


class Residency(enum.StrEnum):
    """State of an adapter in one engine."""

    ABSENT = "absent"
    LOADING = "loading"
    HOST = "host"
    COPYING = "copying"
    DEVICE = "device"
    FAILED = "failed"


def not_in_cache(what: str) -> AdapterNotFoundError:
    """Return the error for LoadPolicy.NEVER. what: the adapter, such as "adapter 'fr'"."""
    return AdapterNotFoundError(
        f"{what} was not in cache and load_lora_weights is set to never: send auto, "
        "and it is loaded"
    )
