"""Gated delta rule: its values, and what they mean for caches, weights and ranks."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Final

from loraplex.core.cache import CachedFloats, Chunk, States
from loraplex.kernels.activations import Activation
from loraplex.models.linear_group import OutputSpan, Share, TensorShard, share_of
from loraplex.models.specs.part import (
    A_LOG,
    CONV_WEIGHT,
    DT_BIAS,
    STATE_EVERY,
    Divided,
    LayerCache,
    MixerSpec,
    NormSpec,
    RopeConfig,
    Split,
    TensorSpec,
)

DELTA_IN: Final = "delta_in"
"""Linear layers of q, k and v, which the convolution reads, and of the output's gate z."""
DELTA_GATES: Final = "delta_gates"
"""Linear layers of b, the strength of a write, and of a, the decay. Small, and apart since
quantised checkpoints leave them as they are."""
DELTA_OUT: Final = "delta_out"
OUTPUT_NORM: Final = "output_norm"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSpec(MixerSpec):
    """Gated delta rule of one layer (arXiv:2412.06464), after a short causal convolution."""

    num_key_heads: int
    num_value_heads: int
    """A multiple of num_key_heads: value head h uses the key and query head that it divides to."""
    key_size: int
    value_size: int
    kernel_size: int
    """Number of positions that the convolution reads."""
    activation: Activation
    """Activation of the convolution."""
    path: str
    """Prefix of its tensors in the checkpoint."""
    norm: NormSpec
    """Norm of each head's output."""
    is_grouped: bool = False
    """Whether outputs lie by key head: its q, k, its values' v and z; and their b and a.

    Else they are all q, k, v and z, and all b and a.
    """
    every: int = STATE_EVERY
    """Positions between states."""
    own_heads: Share | None = None
    """Key heads of the checkpoint that these are; None: all."""

    @property
    def values_per_key(self) -> int:
        return self.num_value_heads // self.num_key_heads

    @property
    def part_sizes(self) -> tuple[int, int, int, int]:
        """Return the numbers of outputs of q, k, v and z."""
        keys, values = self.num_key_heads * self.key_size, self.num_value_heads * self.value_size
        return keys, keys, values, values

    @property
    def head_sizes(self) -> tuple[int, int, int, int]:
        """Return the numbers of outputs of a key head's q, k, v and z."""
        values = self.values_per_key * self.value_size
        return self.key_size, self.key_size, values, values

    @property
    def conv_size(self) -> int:
        """Return the number of channels of the convolution: those of q, k and v."""
        return sum(self.part_sizes[:3])

    def caches(self) -> tuple[LayerCache, LayerCache]:
        """Return what is kept of the positions since the last state, and the states.

        Of a position: the convolution's inputs, the keys, what is written for them, and the decay
        since the state.
        """
        keys, _, values, _ = self.part_sizes
        sizes = (self.conv_size, keys, values, self.num_value_heads)
        positions = tuple(CachedFloats((size,), is_per_position=True) for size in sizes)
        state = CachedFloats((self.num_value_heads, self.key_size, self.value_size))
        return (
            LayerCache(Chunk(self.every, before=self.kernel_size - 1), positions),
            LayerCache(States(self.every), (state,)),
        )

    def tensors(self) -> Mapping[str, NormSpec | TensorSpec]:
        own = self.own_heads or Share(OutputSpan(0, self.num_key_heads), self.num_key_heads)
        num_values = own.whole * self.values_per_key
        sizes = self.head_sizes[:3]
        channels = _spans_of_parts([(size, own.whole) for size in sizes], own.span)
        conv_shape = (own.whole * sum(sizes), 1, self.kernel_size)
        values = (own.span.times(self.values_per_key),)
        return {
            CONV_WEIGHT: TensorSpec(f"{self.path}conv1d.weight", conv_shape, channels),
            A_LOG: TensorSpec(f"{self.path}A_log", (num_values,), values),
            DT_BIAS: TensorSpec(f"{self.path}dt_bias", (num_values,), values),
            OUTPUT_NORM: self.norm,
        }

    def ropes(self) -> Mapping[RopeConfig, int]:
        return {}

    def divisors(self) -> Sequence[Divided]:
        return (Divided(f"{self.num_key_heads} key heads of a delta rule", self.num_key_heads),)

    def shard(self, place: TensorShard) -> tuple["DeltaSpec", Mapping[str, Split]]:
        heads = share_of(self.num_key_heads, *place)
        own = dataclasses.replace(
            self,
            num_key_heads=heads.size,
            num_value_heads=heads.size * self.values_per_key,
            own_heads=Share(heads, self.num_key_heads),
        )
        values = self.values_per_key
        sizes, gates = list(self.head_sizes), [values, values]
        if self.is_grouped:
            sizes, gates = [sum(sizes)], [sum(gates)]
        return own, {
            name: Split(outputs=_spans_of_parts([(n, self.num_key_heads) for n in each], heads))
            for name, each in ((DELTA_IN, sizes), (DELTA_GATES, gates))
        } | {DELTA_OUT: Split(inputs=heads.times(values * self.value_size))}

    def step_bytes(self, itemsize: int) -> int:
        values = self.part_sizes[3]
        projected = sum(self.part_sizes) * (2 if self.is_grouped else 1)
        # The convolution's output, that of the rule, and its norm.
        return (projected + self.conv_size + 2 * values) * itemsize


def _spans_of_parts(parts: Sequence[tuple[int, int]], heads: OutputSpan) -> tuple[OutputSpan, ...]:
    """Return the outputs of these heads of each part, given (size of a head, number of heads)."""
    spans, first = [], 0
    for size, number in parts:
        spans.append(heads.times(size).moved(first))
        first += size * number
    return tuple(spans)
