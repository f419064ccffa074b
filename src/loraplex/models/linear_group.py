"""Groups of linear layers, and the part of one that a rank of several computes. Free of torch."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

MAX_INPUT_BLOCKS: Final = 4
"""Blocks of a row layer's inputs: so many ranks at most give the same bits as one (ADR 34)."""
_BLOCK_MULTIPLE: Final = 32
"""Blocks are a multiple of so many inputs where they can be: int4 needs it."""


class OutputSpan(NamedTuple):
    """Neighbouring outputs, inputs or heads."""

    first: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.first

    def times(self, size: int) -> "OutputSpan":
        """Return what things of so many outputs each have, if these are things."""
        return OutputSpan(self.first * size, self.end * size)

    def moved(self, distance: int) -> "OutputSpan":
        return OutputSpan(self.first + distance, self.end + distance)


class TensorShard(NamedTuple):
    """Place of a rank among those that share every layer."""

    rank: int = 0
    size: int = 1


def share_of(total: int, rank: int, size: int) -> OutputSpan:
    """Return the rank's share of `total` things; shares differ by at most one."""
    return OutputSpan(total * rank // size, total * (rank + 1) // size)


def share_or_copy(total: int, rank: int, size: int) -> OutputSpan:
    """Return the rank's share; of fewer things than ranks, neighbours have a copy of one each."""
    first = total * rank // size
    return OutputSpan(first, max(first + 1, total * (rank + 1) // size))


class Share(NamedTuple):
    """Part of a whole that a rank has."""

    span: OutputSpan
    whole: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LinearGroup:
    """Linear layers with the same input, computed as one: their outputs lie side by side."""

    paths: tuple[str, ...]
    """Full names of the modules in the checkpoint, of experts with {expert} for the number."""
    outputs: Mapping[str, int]
    """out_features by the module's name in adapters, in the order of `paths`."""
    in_features: int
    has_bias: bool
    parts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Outputs of the parts that lie side by side, such as q_proj, k_proj and v_proj.

    The names are those that adapters have for a part that is a layer of its own. Empty: the outputs
    are not in such an order.
    """
    head_parts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Outputs of each part of one head, where those of a head lie together; names as in `parts`."""
    head_dim: int | None = None
    """Number of outputs of one head; None: the outputs are no heads'."""
    num_experts: int | None = None
    """Number of experts that each have these layers; None: they are no experts'."""
    is_row: bool = False
    """Whether ranks divide the inputs and add their results; the others divide the outputs."""
    is_taken_apart: bool = False
    """Whether a mixer also keeps the weight cut by heads, in the model's type."""
    part: "GroupPart | None" = None
    """What of the checkpoint's layers these are; None: all."""

    @property
    def modules(self) -> tuple[str, ...]:
        return tuple(self.outputs)

    @property
    def first_outputs(self) -> tuple[int, ...]:
        """Offset of each module's outputs in the group's."""
        return tuple(itertools.accumulate(self.outputs.values(), initial=0))[:-1]

    @property
    def num_key_heads(self) -> int:
        """Number of key heads of a delta rule whose inputs these are; 0: they are no such."""
        keys = self.parts.get("in_proj_k", 0)
        return keys // self.head_dim if keys and self.head_dim else 0

    @property
    def num_split_heads(self) -> int:
        """Number of heads that have `head_parts`; 0: outputs are in no such order."""
        if not self.head_parts:
            return 0
        return sum(self.outputs.values()) // sum(self.head_parts.values())

    @property
    def part_spans(self) -> Sequence[OutputSpan]:
        """Outputs of each part."""
        ends = itertools.accumulate(self.parts.values(), initial=0)
        return [OutputSpan(first, end) for first, end in itertools.pairwise(ends)]

    @property
    def fused_modules(self) -> Mapping[str, Mapping[str, int]]:
        """Parts of each module that computes several of them.

        Those of a module with `num_split_heads` do not lie side by side.
        """
        if self.head_parts:
            heads = self.num_split_heads
            parts = {name: heads * size for name, size in self.head_parts.items()}
            return dict.fromkeys(self.modules, parts)
        fused = {}
        for module, first in zip(self.modules, self.first_outputs, strict=True):
            own = OutputSpan(first, first + self.outputs[module])
            parts = {
                name: span.size
                for name, span in zip(self.parts, self.part_spans, strict=True)
                if _common(own, span) == span
            }
            if len(parts) > 1:
                fused[module] = parts
        return fused

    @property
    def whole(self) -> "LinearGroup":
        """The group as the checkpoint has it."""
        return self if self.part is None else self.part.whole

    @property
    def input_blocks(self) -> int:
        """Number of equal blocks of the inputs that are summed apart; 0: it is no row layer.

        The blocks of the whole depend on the model alone, so that the sums of one rank and of
        several are the same.
        """
        if not self.is_row:
            return 0
        whole = self.whole.in_features
        return max(1, _whole_blocks(whole) * self.in_features // whole)

    def split(
        self, *, outputs: Sequence[OutputSpan] | None = None, inputs: OutputSpan | None = None
    ) -> "LinearGroup":
        """Return the part with these outputs of the whole group, ascending, and these inputs.

        None: all of them. No module may lose all its outputs.
        """
        inputs = OutputSpan(0, self.in_features) if inputs is None else inputs
        kept: dict[str, tuple[OutputSpan, ...]] = {}
        own_outputs = outputs or (OutputSpan(0, sum(self.outputs.values())),)
        for (module, size), first in zip(self.outputs.items(), self.first_outputs, strict=True):
            own = OutputSpan(first, first + size)
            spans = (_common(own, span) for span in own_outputs)
            kept[module] = tuple(
                OutputSpan(span.first - first, span.end - first) for span in spans if span.size > 0
            )
            assert kept[module], f"{module} has no output of its own"
        return dataclasses.replace(
            self,
            outputs={module: sum(span.size for span in spans) for module, spans in kept.items()},
            in_features=inputs.size,
            parts={
                name: sum(max(0, _common(part, span).size) for span in own_outputs)
                for name, part in zip(self.parts, self.part_spans, strict=True)
            },
            part=GroupPart(self, kept, inputs),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class GroupPart:
    """Part of a group of linear layers."""

    whole: LinearGroup
    outputs: Mapping[str, tuple[OutputSpan, ...]]
    """Outputs of each module that belong to the part, ascending."""
    inputs: OutputSpan


def _whole_blocks(in_features: int) -> int:
    for multiple in (_BLOCK_MULTIPLE, 1):
        for blocks in (MAX_INPUT_BLOCKS, MAX_INPUT_BLOCKS // 2):
            if in_features % (blocks * multiple) == 0:
                return blocks
        if in_features % multiple == 0:
            return 1
    return 1


def _common(own: OutputSpan, other: OutputSpan) -> OutputSpan:
    return OutputSpan(max(own.first, other.first), min(own.end, other.end))
