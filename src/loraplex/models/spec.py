"""What a decoder computes, as values: its layers, their parts and sizes. Free of torch.

A model family is a function from a config.json to a `ModelSpec`. The decoder reads the values and
never the name of the family, so a new family adds values, not branches.
"""

import dataclasses
import enum
import itertools
from collections.abc import Mapping
from typing import Final

from loraplex.kernels.activations import Activation
from loraplex.kernels.routing_rules import RoutingRules
from loraplex.models.decoder_names import DecoderNames
from loraplex.models.linear_group import LinearGroup, Share, Span
from loraplex.models.stored_format import StoredFormat

QKV: Final = "qkv"
OUTPUT: Final = "o"
UP: Final = "up"
DOWN: Final = "down"
ROUTER: Final = "router"
SHARED_UP: Final = "shared_up"
SHARED_DOWN: Final = "shared_down"
SHARED_GATE: Final = "shared_gate"
ROW_GROUPS: Final = (OUTPUT, DOWN, SHARED_DOWN)
"""Groups whose inputs are what the ranks' own heads and inner units gave (LinearGroup.is_row)."""
SHARED_UP_MODULES: Final = ("shared_expert.gate_proj", "shared_expert.up_proj")
"""Names in adapters of SHARED_UP's layers, or of the parts of its one layer."""


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
    """b of the factor 1 + b * ln(1 + floor(position / original length)) of what turns."""

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


class NormPlace(enum.Enum):
    """Place of a norm in a decoder layer. A norm after a part reads what the residual will get."""

    BEFORE_ATTENTION = enum.auto()
    AFTER_ATTENTION = enum.auto()
    BEFORE_FEED_FORWARD = enum.auto()
    AFTER_FEED_FORWARD = enum.auto()


@dataclasses.dataclass(frozen=True, slots=True)
class NormSpec:
    """One norm. Its weights are `<path>.weight` and, if it has one, `<path>.bias`."""

    path: str
    """Full name in the checkpoint."""
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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Causal self-attention of one layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig | None
    """None: the layer rotates nothing."""
    query_rope: RopeConfig | None = None
    """Embedding of the queries, where it differs from that of the keys."""
    scale: float | None = None
    """Factor of the scores; None: head_dim ** -0.5."""
    soft_cap: float | None = None
    """c of scores that become c * tanh(score / c)."""
    alibi_slopes: tuple[float, ...] = ()
    """AttentionRules.alibi_slopes"""
    sink_logits: str = ""
    """Full name of a tensor [num_heads] with one more logit per head; empty: none."""
    own_heads: Share | None = None
    """Query heads of the checkpoint that these are; None: all."""
    head_order: tuple[int, ...] = ()
    """Where the heads of q, then of k, then of v are among those that the projection computes.

    Empty: in this order.
    """
    window: int | None = None
    """Number of positions, its own included, that a token attends to; None: full attention."""
    num_sink_tokens: int = 0
    """First positions that stay visible in addition to the window."""
    q_norm: NormSpec | None = None
    """Norm of the queries before the rotation: of each head, or by its size of all together."""
    k_norm: NormSpec | None = None

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FeedForwardSpec:
    """Feed-forward part of one layer: dense, or with experts."""

    inner_size: int
    """Inner size of the dense part, or of each expert."""
    activation: Activation
    is_gated: bool
    """Whether the activation of one projection, the gate, multiplies a second one."""
    routing: RoutingRules | None = None
    """Choice of experts; None: the part is dense."""
    selection_bias: str = ""
    """Full name of a tensor [num_experts] that choices depend on and weights do not; or none."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One decoder layer: attention and a feed-forward part, each added to the residual."""

    attention: AttentionSpec
    feed_forward: FeedForwardSpec
    norms: Mapping[NormPlace, NormSpec]
    linears: Mapping[str, LinearGroup]
    """QKV, OUTPUT, UP (with the gate, if there is one, first) and DOWN, in the order of use.

    With experts ROUTER precedes UP; a shared expert has SHARED_UP, SHARED_DOWN and may have
    SHARED_GATE, of one output.
    """
    is_parallel: bool = False
    """Whether the feed-forward part reads the residual that attention reads.

    Without a norm of its own it also reads attention's norm of it.
    """
    residual_factor: float = 1.0
    """Factor of what is added to the residual."""

    @property
    def module_shapes(self) -> Mapping[str, tuple[int, int]]:
        """(in_features, out_features) of every linear layer that LoRA may adapt."""
        return {
            module: (group.in_features, out_features)
            for group in self.linears.values()
            for module, out_features in group.outputs.items()
        }

    @property
    def module_paths(self) -> Mapping[str, str]:
        """Full name, in the checkpoint, of every linear layer that LoRA may adapt."""
        return {
            module: path
            for group in self.linears.values()
            for module, path in zip(group.modules, group.paths, strict=True)
        }

    @property
    def num_experts(self) -> Mapping[str, int]:
        """Number of experts by module, of modules that have experts."""
        return {
            module: group.num_experts
            for group in self.linears.values()
            if group.num_experts is not None
            for module in group.modules
        }

    @property
    def fused_modules(self) -> Mapping[str, Mapping[str, int]]:
        """Outputs of each part of linear layers that compute q, k and v, or gate and up, as one.

        The parts have Llama's names. Without those whose heads have an order of their own.
        """
        attention, inner_size = self.attention, self.feed_forward.inner_size
        q_size, kv_size = attention.q_size, attention.kv_size
        fused: dict[str, Mapping[str, int]] = {}
        for group, parts in (
            (QKV, {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}),
            (UP, {"gate_proj": inner_size, "up_proj": inner_size}),
        ):
            outputs = self.linears[group].outputs
            is_in_order = group != QKV or not attention.head_order
            if len(outputs) == 1 and sum(outputs.values()) == sum(parts.values()) and is_in_order:
                fused[next(iter(outputs))] = parts
        if SHARED_UP in self.linears and len(self.linears[SHARED_UP].outputs) == 1:
            ((module, size),) = self.linears[SHARED_UP].outputs.items()
            fused[module] = dict.fromkeys(SHARED_UP_MODULES, size // 2)
        return fused

    @property
    def biased_modules(self) -> tuple[str, ...]:
        """Modules that have a bias."""
        groups = (group.modules for group in self.linears.values() if group.has_bias)
        return tuple(itertools.chain.from_iterable(groups))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder-only language model. Its layers may differ from one another."""

    architecture: str
    hidden_size: int
    vocab_size: int
    layers: tuple[LayerSpec, ...]
    final_norm: NormSpec
    names: DecoderNames
    max_position_embeddings: int
    default_max_model_len: int
    """Length that the model was made for; scaled rotary embeddings stretch it."""
    hidden_act: str
    """Name of the activation in config.json, for formats that repeat it."""
    embedding_size: int | None = None
    """Size of an embedding and output layer that have projections; None: hidden_size, without."""
    embedding_factor: float = 1.0
    """Factor of the token embedding."""
    rounds_embedding_factor: bool = False
    """Whether the factor is rounded to the model's type first."""
    embedding_norm: NormSpec | None = None
    has_position_table: bool = False
    """Whether a learned vector per position is added to the token embedding."""
    position_offset: int = 0
    """Row of the position table that belongs to position 0."""
    logits_factor: float = 1.0
    logits_soft_cap: float | None = None
    """c of logits that become, after the factor, c * tanh(logit / c)."""
    has_lm_head_bias: bool = False
    has_unit_lm_head: bool = False
    """Whether each row of the output layer is divided by its length."""
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    dtype: str | None = None
    """Type of the checkpoint by torch's name; None if config.json does not name one."""
    stored_format: StoredFormat | None = None
    """Format of a checkpoint whose linear layers are quantised; None: they are not."""
    own_logits: Span | None = None
    """Outputs of lm_head that a rank of several computes; None: all."""
    shard_of: "ModelSpec | None" = None
    """The whole model that this is a rank's part of; None: it has all heads and inner units."""
    first_layer: int = 0
    """Number, in `stage_of`, of the first layer."""
    first_layers: tuple[int, ...] = (0,)
    """Numbers of the first layers of all stages."""
    stage_of: "ModelSpec | None" = None
    """All layers, of which a stage of a pipeline computes these; None: these are all."""

    @property
    def whole(self) -> "ModelSpec":
        return self.shard_of or self.all_layers

    @property
    def all_layers(self) -> "ModelSpec":
        return self.stage_of or self

    @property
    def is_first_stage(self) -> bool:
        """Whether it computes the embedding."""
        return self.first_layer == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether it computes the final norm and the logits."""
        return self.first_layer + len(self.layers) == len(self.all_layers.layers)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def module_shapes(self) -> tuple[Mapping[str, tuple[int, int]], ...]:
        """LayerSpec.module_shapes of each layer."""
        return tuple(layer.module_shapes for layer in self.layers)

    @property
    def num_experts(self) -> Mapping[str, int]:
        """LayerSpec.num_experts of all layers together."""
        return {
            module: number for layer in self.layers for module, number in layer.num_experts.items()
        }
