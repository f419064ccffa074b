"""State space layer of Mamba2: its values, and what they mean for caches, weights and ranks."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Final

from loraplex.core.cache import CachedFloats, Chunk, States
from loraplex.kernels.activations import Activation
from loraplex.models.linear_group import OutputSpan, Share, TensorShard, share_of, share_or_copy
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

SSM_INPUT: Final = "ssm_in"
"""Group of in_proj: rows of the gate z, of x, B and C, and of dt, in this order."""
SSM_OUTPUT: Final = "ssm_out"
SSM_NORM: Final = "ssm_norm"
CONV_BIAS: Final = "conv_bias"
SKIP: Final = "skip"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SsmSpec(MixerSpec):
    """Mamba2 (arXiv:2405.21060) of one layer.

    in_proj computes a gate z, x, B, C and dt. x, B and C pass through a causal convolution, then
    the recurrence; its result is gated by z, normalised, and read by out_proj.
    """

    path: str
    """Prefix of the names of its tensors in the checkpoint, such as model.layers.0.mamba."""
    num_heads: int
    head_size: int
    state_size: int
    num_groups: int
    """Groups of neighbouring heads, which share B and C."""
    num_taps: int
    """Positions that the convolution reads, its own included."""
    has_conv_bias: bool
    activation: Activation
    """Activation of what the convolution gives."""
    norm: NormSpec
    """Norm of the gated result, of each group by itself; its size is that of all heads."""
    smallest_dt: float = 0.0
    largest_dt: float = float("inf")
    every: int = STATE_EVERY
    """Number of positions between states."""
    own_heads: Share | None = None
    """Heads of the checkpoint that these are; None: all."""
    own_groups: Share | None = None
    """Groups of the checkpoint that these are; None: all."""

    @property
    def inner_size(self) -> int:
        """Number of elements of x, of the gate, and of the result."""
        return self.num_heads * self.head_size

    @property
    def key_size(self) -> int:
        """Number of elements of B, and of C."""
        return self.num_groups * self.state_size

    @property
    def conv_size(self) -> int:
        return self.inner_size + 2 * self.key_size

    @property
    def input_size(self) -> int:
        """Number of outputs of in_proj."""
        return self.inner_size + self.conv_size + self.num_heads

    def caches(self) -> tuple[LayerCache, LayerCache]:
        """Return the positions since the last state, and the states [H, S, P].

        Of a position: the inputs of the convolution, B, dt x, and the sum of decays.
        """
        sizes = (self.conv_size, self.key_size, self.inner_size, self.num_heads)
        position = tuple(CachedFloats((size,), is_per_position=True) for size in sizes)
        state = CachedFloats((self.num_heads, self.state_size, self.head_size))
        return (
            LayerCache(Chunk(self.every, before=self.num_taps - 1), position),
            LayerCache(States(self.every), (state,)),
        )

    def tensors(self) -> Mapping[str, NormSpec | TensorSpec]:
        heads = self.own_heads or Share(OutputSpan(0, self.num_heads), self.num_heads)
        groups = self.own_groups or Share(OutputSpan(0, self.num_groups), self.num_groups)
        inner, keys = heads.whole * self.head_size, groups.whole * self.state_size
        own_x = heads.span.times(self.head_size)
        own_b = groups.span.times(self.state_size).moved(inner)
        channels = (own_x, own_b, own_b.moved(keys))
        num_channels = inner + 2 * keys
        found: dict[str, NormSpec | TensorSpec] = {
            CONV_WEIGHT: TensorSpec(
                f"{self.path}.conv1d.weight", (num_channels, 1, self.num_taps), channels
            )
        }
        if self.has_conv_bias:
            found[CONV_BIAS] = TensorSpec(f"{self.path}.conv1d.bias", (num_channels,), channels)
        for name, tensor in ((A_LOG, "A_log"), (DT_BIAS, "dt_bias"), (SKIP, "D")):
            found[name] = TensorSpec(f"{self.path}.{tensor}", (heads.whole,), (heads.span,))
        return {**found, SSM_NORM: self.norm}

    def ropes(self) -> Mapping[RopeConfig, int]:
        return {}

    def divisors(self) -> Sequence[Divided]:
        heads = Divided(f"{self.num_heads} heads of a state space", self.num_heads)
        groups = f"{self.num_groups} groups of such heads"
        return heads, Divided(groups, self.num_groups, has_copies=True)

    def shard(self, place: TensorShard) -> tuple["SsmSpec", Mapping[str, Split]]:
        # Ranks with heads of one group have a copy each of its B and C.
        heads, groups = share_of(self.num_heads, *place), share_or_copy(self.num_groups, *place)
        own = dataclasses.replace(
            self,
            num_heads=heads.size,
            num_groups=groups.size,
            own_heads=Share(heads, self.num_heads),
            own_groups=Share(groups, self.num_groups),
        )
        values = heads.times(self.head_size)
        keys = groups.times(self.state_size)
        first_key = 2 * self.inner_size
        outputs = [
            values,
            values.moved(self.inner_size),
            keys.moved(first_key),
            keys.moved(first_key + self.key_size),
            heads.moved(first_key + 2 * self.key_size),
        ]
        return own, {SSM_INPUT: Split(outputs=outputs), SSM_OUTPUT: Split(inputs=values)}

    def step_bytes(self, itemsize: int) -> int:
        floats = self.conv_size + self.inner_size + 4 * self.num_heads
        return (self.input_size + self.conv_size + 2 * self.inner_size) * itemsize + 4 * floats
