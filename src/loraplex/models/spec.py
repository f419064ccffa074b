"""What a decoder computes, as values: its layers, their parts and sizes. Free of torch.

A model family is a function from a config.json to a `ModelSpec`. The decoder reads the values and
never the name of the family, so a new family adds values, not branches.
"""

import dataclasses
import enum
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Final, TypeVar

from loraplex.kernels.activations import Activation
from loraplex.kernels.routing_rules import RoutingRules
from loraplex.models.decoder_names import DecoderNames
from loraplex.models.linear_group import LinearGroup, OutputSpan
from loraplex.models.specs.part import MixerSpec, NormSpec
from loraplex.models.stored_format import StoredFormat

UP: Final = "up"
DOWN: Final = "down"
ROUTER: Final = "router"
LATENT_INPUT: Final = "latent_in"
LATENT_OUTPUT: Final = "latent_out"
SHARED_UP: Final = "shared_up"
SHARED_DOWN: Final = "shared_down"
SHARED_GATE: Final = "shared_gate"
LAYER_INPUTS: Final = "layer_inputs"
LAYER_INPUT_GATE: Final = "layer_input_gate"
LAYER_INPUT_OUT: Final = "layer_input_out"
SHARED_UP_MODULES: Final = ("shared_expert.gate_proj", "shared_expert.up_proj")
"""Names in adapters of SHARED_UP's layers, or of the parts of its one layer."""


class NormPlace(enum.StrEnum):
    """Place of a norm in a decoder layer. A norm after a part reads what the residual will get.

    BEFORE_ROUTER and the four of EXPERTS and SHARED are of a feed-forward part with experts that
    reads the residual itself, which the router, the experts and the shared expert norm each in its
    own way. Where one of them is, all are, and there is no BEFORE_FEED_FORWARD.
    """

    BEFORE_MIXER = enum.auto()
    AFTER_MIXER = enum.auto()
    BEFORE_CROSS = enum.auto()
    AFTER_CROSS = enum.auto()
    BEFORE_FEED_FORWARD = enum.auto()
    AFTER_FEED_FORWARD = enum.auto()
    AFTER_LAYER_INPUT = enum.auto()
    BEFORE_ROUTER = enum.auto()
    BEFORE_EXPERTS = enum.auto()
    AFTER_EXPERTS = enum.auto()
    BEFORE_SHARED = enum.auto()
    AFTER_SHARED = enum.auto()


Kind = TypeVar("Kind", bound=MixerSpec)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FeedForwardSpec:
    """Feed-forward part of one layer: dense, or with experts."""

    inner_size: int
    """Inner size of the dense part, or of each expert."""
    activation: Activation
    is_gated: bool
    """Whether the activation of one projection, the gate, multiplies a second one."""
    xielu: str = ""
    """Full name of a module with tensors alpha_p [1] and alpha_n [1]: then Kernels.xielu is the
    activation. Only of a dense part without a gate."""
    routing: RoutingRules | None = None
    """Choice of experts; None: the part is dense."""
    selection_bias: str = ""
    """Full name of a tensor [num_experts] that choices depend on and weights do not; or none."""
    is_selection_bias_row: bool = False
    """Whether it is [1, num_experts] in the checkpoint."""
    expert_factors: str = ""
    """Full name of a tensor [num_experts] that multiplies the weights of choices; or none."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One decoder layer: its parts, each added to the residual, in the order of the fields.

    A part that is None has no norms, and adds nothing.
    """

    mixer: MixerSpec | None
    cross: MixerSpec | None = None
    """A second mixer, which reads what another stack computed."""
    feed_forward: FeedForwardSpec | None
    layer_input: Activation | None = None
    """Activation of a part that multiplies the layer's own input (ModelSpec.layer_input_size)."""
    norms: Mapping[NormPlace, NormSpec]
    linears: Mapping[str, LinearGroup]
    """Groups of all parts by name, in the order of use: those that the mixers' kinds name, then UP
    (with the gate, if there is one, first) and DOWN.

    With experts ROUTER precedes UP; a shared expert has SHARED_UP, SHARED_DOWN and may have
    SHARED_GATE, of one output. LATENT_INPUT and LATENT_OUTPUT are there if experts read and give
    vectors of another size than the hidden one. LAYER_INPUT_GATE and LAYER_INPUT_OUT are those of
    `layer_input`. LAYER_INPUTS, which the first layer alone has and all read, makes a part of
    these inputs of the embedding.
    """
    is_parallel: bool = False
    """Whether the feed-forward part reads the residual that the mixer reads.

    Without a norm of its own it also reads the mixer's norm of it.
    """
    residual_factor: float = 1.0
    """Factor of what is added to the residual."""
    output_factor: str = ""
    """Full name of a tensor [1] that multiplies the hidden state after the layer; or none."""

    @property
    def mixers(self) -> tuple[MixerSpec, ...]:
        return tuple(mixer for mixer in (self.mixer, self.cross) if mixer is not None)

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
        """LinearGroup.fused_modules of all groups."""
        return {
            module: parts
            for group in self.linears.values()
            for module, parts in group.fused_modules.items()
        }

    @property
    def biased_modules(self) -> tuple[str, ...]:
        """Modules that have a bias."""
        groups = (group.modules for group in self.linears.values() if group.has_bias)
        return tuple(itertools.chain.from_iterable(groups))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSpec:
    """What computes the output that cross mixers of the decoder's layers read.

    It shares the token embedding and its factor with the decoder. Its linear layers are called
    encoder.<module> in adapters.
    """

    longest_input: int
    """Maximum number of tokens of an input."""
    layers: tuple[LayerSpec, ...] = ()
    """All with attention that is not causal. There may be more or fewer than the decoder has."""
    final_norm: NormSpec | None = None
    embedding_norm: NormSpec | None = None
    positions: str = ""
    """Full name of a stored table of positions, where there is one."""
    layer_prefix: str = ""
    """Prefix of the names of a layer's parts, with {} for the layer."""
    first_ids: tuple[int, ...] = ()
    """Tokens that every output begins with, the last of which is the first to be read."""
    never_ids: tuple[int, ...] = ()
    """Tokens that are never generated."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class VectorLayerSpec:
    """Linear layer from vectors of prompts to vectors: a Dense module of sentence-transformers."""

    folder: str
    """Folder of its tensors within that of the model."""
    in_features: int
    out_features: int
    has_bias: bool
    has_tanh: bool
    """Whether tanh of the result follows."""

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensors, which are float32."""
        return 4 * self.out_features * (self.in_features + self.has_bias)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A language model: a decoder, maybe with an encoder. Its layers may differ."""

    architecture: str
    hidden_size: int
    vocab_size: int
    layers: tuple[LayerSpec, ...]
    final_norm: NormSpec
    names: DecoderNames
    max_position_embeddings: int
    default_max_model_len: int
    """Length that the model was made for; scaled rotary embeddings stretch it."""
    length_reason: str = ""
    """Why longer sequences are not served, as the end of a sentence; empty: it was made for no
    more."""
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
    sinusoid_step: float = 0.0
    """S of a position table that is computed, of angles position * 10000 ** (-i / S), where the
    first half are sines and the second cosines; 0: the table is stored."""
    layer_input_size: int = 0
    """Size of a vector of each token that each layer has for itself; 0: none has one.

    Its parts are DecoderNames.layer_inputs; models.layer_input has the formula.
    """
    is_embedding_norm_last: bool = False
    """Whether the embedding's norm follows the addition of positions."""
    logits_factor: float = 1.0
    logits_soft_cap: float | None = None
    """c of logits that become, after the factor, c * tanh(logit / c)."""
    has_lm_head: bool = True
    """False: the model gives hidden states or scores of labels, so it generates no text."""
    num_labels: int = 0
    """Outputs of a classification head; 0: the checkpoint has none."""
    vector_layers: tuple[VectorLayerSpec, ...] = ()
    """Layers that follow the pooling of a prompt."""
    has_lm_head_bias: bool = False
    logits_bias: str = ""
    """Full name of a tensor [1, vocab_size] that is the output layer's bias; or none."""
    has_unit_lm_head: bool = False
    """Whether each row of the output layer is divided by its length."""
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    dtype: str | None = None
    """Type of the checkpoint by torch's name; None if config.json does not name one."""
    exceeds_float16: bool = False
    """Whether sums of its numbers exceed the range of float16."""
    encoder: EncoderSpec | None = None
    """None: the model is a decoder alone."""
    stored_format: StoredFormat | None = None
    """Format of a checkpoint whose linear layers are quantised; None: they are not."""
    own_logits: OutputSpan | None = None
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
    def has_shared_head(self) -> bool:
        """Whether the embedding's rows may be read from the very layer of the logits."""
        is_whole = self.is_first_stage and self.is_last_stage and self.own_logits is None
        has_bias = self.has_lm_head_bias or bool(self.logits_bias)
        is_plain = not (has_bias or self.has_unit_lm_head)
        return self.tie_word_embeddings and is_whole and is_plain

    @property
    def vector_size(self) -> int:
        """Length of the vectors of prompts."""
        if self.vector_layers:
            return self.vector_layers[-1].out_features
        return self.embedding_size or self.hidden_size

    @property
    def is_causal(self) -> bool:
        """Whether no position of the text reads a later one."""
        return all(layer.mixer is None or layer.mixer.is_causal for layer in self.layers)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def mixers_of(self, kind: type[Kind]) -> Iterator[Kind]:
        """Yield the mixers of one kind, layer by layer."""
        for layer in self.layers:
            for mixer in layer.mixers:
                if isinstance(mixer, kind):
                    yield mixer

    def map_mixers(self, kind: type[Kind], change: Callable[[Kind, int], Kind]) -> "ModelSpec":
        """Change the mixers of one kind: change(mixer, number of the layer)."""

        def changed(layer: LayerSpec, index: int) -> LayerSpec:
            if not isinstance(layer.mixer, kind):
                return layer
            return dataclasses.replace(layer, mixer=change(layer.mixer, index))

        layers = tuple(map(changed, self.layers, range(self.num_layers)))
        return dataclasses.replace(self, layers=layers)

    @property
    def adapted_layers(self) -> tuple[LayerSpec, ...]:
        """Return the layers as adapters number them: each with the encoder's of this number."""
        if self.encoder is None:
            return self.layers
        pairs = itertools.zip_longest(self.layers, self.encoder.layers)
        return tuple(_with_linears_of(own, other) for own, other in pairs)

    @property
    def module_shapes(self) -> tuple[Mapping[str, tuple[int, int]], ...]:
        """LayerSpec.module_shapes of each of adapted_layers."""
        return tuple(layer.module_shapes for layer in self.adapted_layers)

    @property
    def num_experts(self) -> tuple[Mapping[str, int], ...]:
        """LayerSpec.num_experts of each of adapted_layers."""
        return tuple(layer.num_experts for layer in self.adapted_layers)


def _with_linears_of(layer: LayerSpec | None, other: LayerSpec | None) -> LayerSpec:
    """Return a layer with the linear layers of the encoder's, too; one of them may be None."""
    if layer is None or other is None:
        found = layer or other
        assert found is not None
        return found
    linears = {**layer.linears, **{f"encoder.{name}": each for name, each in other.linears.items()}}
    return dataclasses.replace(layer, linears=linears)
