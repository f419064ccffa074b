"""A gated causal convolution of each channel, as LFM2 has it in most layers."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Final

from loraplex.core.cache import Blocks, CachedFloats
from loraplex.models.linear_group import OutputSpan, Share, TensorShard, share_of
from loraplex.models.specs.part import (
    Divided,
    LayerCache,
    MixerSpec,
    NormSpec,
    RopeConfig,
    Split,
    TensorSpec,
)

CONV_IN: Final = "conv_in"
"""Linear layer with three outputs for each channel: B of all channels, then C, then x."""
CONV_OUT: Final = "conv_out"
TAPS: Final = "conv_taps"
BIAS: Final = "conv_bias"
_NUM_PARTS: Final = 3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ConvSpec(MixerSpec):
    """out(C * conv(B * x)): each channel of B * x is convolved over the positions, without later
    ones.
    """

    num_channels: int
    num_taps: int
    """Number of positions that a result depends on, its own included."""
    path: str
    """Full name of the convolution: `<path>.weight` [channels, 1, taps]."""
    has_bias: bool = False
    """Whether there is `<path>.bias` [channels]."""
    own_channels: Share | None = None
    """Channels of the checkpoint that these are; None: all."""

    def caches(self) -> tuple[LayerCache, ...]:
        """Return the newest inputs of the convolution."""
        inputs = CachedFloats((self.num_channels,), is_per_position=True)
        return (LayerCache(Blocks(self.num_taps, by_rows=True), (inputs,)),)

    def tensors(self) -> Mapping[str, NormSpec | TensorSpec]:
        channels = self._channels
        own = () if self.own_channels is None else (channels.span,)
        found: dict[str, NormSpec | TensorSpec] = {
            TAPS: TensorSpec(f"{self.path}.weight", (channels.whole, 1, self.num_taps), own)
        }
        if self.has_bias:
            found[BIAS] = TensorSpec(f"{self.path}.bias", (channels.whole,), own)
        return found

    def ropes(self) -> Mapping[RopeConfig, int]:
        return {}

    def divisors(self) -> Sequence[Divided]:
        number = self.num_channels
        return (Divided(f"{number} channels of a convolution", number),)

    def shard(self, place: TensorShard) -> tuple["ConvSpec", Mapping[str, Split]]:
        whole = self.num_channels
        own = share_of(whole, *place)
        outputs = [own.moved(part * whole) for part in range(_NUM_PARTS)]
        spec = dataclasses.replace(self, num_channels=own.size, own_channels=Share(own, whole))
        return spec, {CONV_IN: Split(outputs=outputs), CONV_OUT: Split(inputs=own)}

    def step_bytes(self, itemsize: int) -> int:
        return (_NUM_PARTS + 2) * self.num_channels * itemsize

    @property
    def _channels(self) -> Share:
        return self.own_channels or Share(OutputSpan(0, self.num_channels), self.num_channels)
