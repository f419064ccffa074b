"""What the parts of a layer have in common, as values: norms, tensors, caches, shares of ranks.

A mixer is the part that mixes positions. Each kind of mixer is a `MixerSpec` in a file of this
package, and a class in a file of the same name in `models.mixers`. Free of torch.
"""

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, Protocol, Self

from loraplex.core.cache import CacheSpec, StorageSpec
from loraplex.models.linear_group import OutputSpan, Share, TensorShard

STATE_EVERY: Final = 64
"""Positions between the states of recurrent layers. Their results depend on it (ADR 60)."""
CONV_WEIGHT: Final = "conv_weight"
A_LOG: Final = "a_log"
DT_BIAS: Final = "dt_bias"
"""Names of tensors that recurrences of all kinds have."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding. Fields that the rope type does not use keep their defaults.

    The names are those of Hugging Face configurations; models.rope has the formulas.
    """

    rope_type: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    partial_rotary_factor: float = 1.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    recomputes: bool = False
    """Whether transformers computes a sequence again when it outgrows the original length."""
    is_interleaved: bool = False
    """Whether the elements 2 i and 2 i + 1 of a head turn together, rather than i and i + R / 2."""
    growth: float = 0.0
    """b of the factor 1 + b * ln(1 + floor((position + o) / original length)) of what turns."""
    growth_offset: int = 0
    """o of this factor."""

    def rotary_dim(self, head_dim: int) -> int:
        """Return R, the number of elements of a head that turn.

        "proportional" turns all of them, some by no angle.
        """
        if self.rope_type == "proportional":
            return head_dim
        return int(head_dim * self.partial_rotary_factor)


class NormKind(enum.Enum):
    """Formula of a norm."""

    RMS = enum.auto()
    LAYER = enum.auto()


def growth_alone(growth: float, length: int, *, offset: int = 0) -> RopeConfig:
    """Return an embedding that turns nothing: it multiplies heads by RopeConfig.growth's factor."""
    return RopeConfig(
        rope_type="proportional",
        partial_rotary_factor=0.0,
        growth=growth,
        growth_offset=offset,
        original_max_position_embeddings=length,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class NormSpec:
    """One norm. Its weights are `<path>.<weight_name>` and, if it has one, `<path>.bias`."""

    path: str
    """Full name in the checkpoint; empty: an RMS norm of a mixer without weights."""
    size: int
    eps: float
    kind: NormKind = NormKind.RMS
    _: dataclasses.KW_ONLY
    has_bias: bool = False
    """Whether a layer norm has a bias."""
    num_heads: int | None = None
    """Heads with weights of their own, [num_heads, size]; None: the weight is [size]."""
    own_heads: Share | None = None
    """Heads of the checkpoint that are normalised, where not each by itself; None: all."""
    weight_offset: float = 0.0
    """Number that is added to the weight of the checkpoint."""
    is_rounded_once: bool = False
    """Whether the weight multiplies in float32, before the rounding to the model's type."""
    replaces_residual: bool = False
    """Whether the norm's output is the residual from there on (post-norm)."""
    weight_name: str = "weight"
    """Last part of the weight's name."""
    weight_factor: float = 1.0
    """Number that the weight of the checkpoint is multiplied by."""


class TensorSpec(NamedTuple):
    """Tensor of a part that is neither a linear layer's nor a norm's, read as float32."""

    name: str
    """Full name in the checkpoint."""
    shape: tuple[int, ...]
    """Shape of the whole."""
    own: tuple[OutputSpan, ...] = ()
    """Neighbours along the first axis that a rank of several has, one after another; empty: all."""


class LayerCache(NamedTuple):
    """What a layer keeps of each sequence. Layers with equal values are one cache group."""

    spec: CacheSpec
    storage: StorageSpec


class Divided(NamedTuple):
    """Things of a layer that ranks share equally."""

    what: str
    """Text for people, such as "8 KV heads"."""
    number: int
    has_copies: bool = False
    """Whether several ranks may have a copy of one thing."""

    def allows(self, num_ranks: int) -> bool:
        return self.number % num_ranks == 0 or (self.has_copies and num_ranks % self.number == 0)


class Split(NamedTuple):
    """Outputs and inputs of a group of linear layers that a rank has: LinearGroup.split."""

    outputs: Sequence[OutputSpan] | None = None
    inputs: OutputSpan | None = None


class MixerSpec(Protocol):
    """What mixes positions in a layer: one frozen value of each kind."""

    @property
    def is_causal(self) -> bool:
        """Whether no token reads a later one. May be a field."""
        return True

    @property
    def kv_distance(self) -> int:
        """How many layers before this one the layer is whose caches it reads; 0: it has its own.

        May be a field. Both layers are in one cache group, and in one stage of a pipeline.
        """
        return 0

    def caches(self) -> Sequence[LayerCache]:
        """Return what the mixer keeps of each sequence between steps."""
        ...

    def tensors(self) -> Mapping[str, NormSpec | TensorSpec]:
        """Return its norms and other tensors by name, in the order of packed weights."""
        ...

    def ropes(self) -> Mapping[RopeConfig, int]:
        """Return the rotary embeddings whose angles it reads, with the sizes of their heads."""
        ...

    def divisors(self) -> Sequence[Divided]:
        """Return what the ranks have to share equally."""
        ...

    def shard(self, place: TensorShard) -> tuple[Self, Mapping[str, Split]]:
        """Return the part of a rank, and its parts of groups of linear layers by their names.

        Groups that are not named are whole on each rank. `divisors` allow so many ranks.
        """
        ...

    def step_bytes(self, itemsize: int) -> int:
        """Return the bytes of one token's activations, of so many bytes each, in a step."""
        ...
