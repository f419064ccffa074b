"""Gemma 4: two head sizes, layers that read the keys and values of others, inputs of each layer.

Layers with a window and those with full attention have heads of their own sizes and numbers, and
rotary embeddings of their own. The last layers may have neither keys nor values: they read those
of the last earlier layer of their type. Norms multiply by w alone, unlike those of Gemma 1 to 3.
A layer may have experts in addition to its dense part.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final

from loraplex.core.errors import ConfigError, UnsupportedModelError
from loraplex.kernels.routing_rules import RoutingMode
from loraplex.models.config_fields import ConfigFields
from loraplex.models.decoder_names import LLAMA_NAMES, DecoderNames, ExpertNames
from loraplex.models.expert_config import ExpertTraits, read_routing
from loraplex.models.family_config import (
    Traits,
    build_layer,
    check_heads,
    read_decoder,
    read_text_tower,
    require_switches,
    ropes_of_windows,
    sliding_layers,
)
from loraplex.models.linear_group import LinearGroup
from loraplex.models.spec import (
    DOWN,
    LAYER_INPUT_GATE,
    LAYER_INPUT_OUT,
    LAYER_INPUTS,
    SHARED_DOWN,
    SHARED_UP,
    UP,
    LayerSpec,
    ModelSpec,
    NormPlace,
)
from loraplex.models.specs.attention import OUTPUT, QKV, AttentionSpec
from loraplex.models.specs.part import NormSpec

ARCHITECTURE: Final = "Gemma4ForCausalLM"
WRAPPER: Final = "Gemma4ForConditionalGeneration"
ARCHITECTURE_UNIFIED: Final = "Gemma4UnifiedForCausalLM"
WRAPPER_UNIFIED: Final = "Gemma4UnifiedForConditionalGeneration"

_NORM: Final = NormSpec("", 0, 1e-6, is_rounded_once=True)
_NAMES: Final = dataclasses.replace(
    LLAMA_NAMES,
    attention_output_norm="post_attention_layernorm",
    feed_forward_norm="pre_feedforward_layernorm",
    feed_forward_output_norm="post_feedforward_layernorm",
    layer_inputs=(
        "embed_tokens_per_layer",
        "per_layer_model_projection",
        "per_layer_projection_norm",
    ),
    experts=ExpertNames(
        router="router.proj",
        up=("experts.{expert}.gate_proj", "experts.{expert}.up_proj"),
        down="experts.{expert}.down_proj",
    ),
)
_DEFAULTS: Final[Mapping[str, Any]] = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "sliding_window": 512,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 1_000_000.0,
        },
    },
}
_PERIOD: Final = 6
"""Distance of layers with full attention where no field names them."""
_LAYER_INPUT_SIZE: Final = 256
_LAYER_FIELDS: Final = ("head_dim", "num_key_value_heads")
"""What per_layer_config, which transformers saves, may have for a layer."""


def read_config(fields: ConfigFields) -> ModelSpec:
    """Read a Gemma 4, or the text_config of its wrapper."""
    return _read(fields, ARCHITECTURE)


def read_config_unified(fields: ConfigFields) -> ModelSpec:
    """Read a Gemma 4 whose layers have no inputs of their own and no experts."""
    require_switches(fields, {"enable_moe_block": False})
    fields = fields.renamed({}, {"sliding_window": 1024, "max_position_embeddings": 262_144})
    fields = fields.with_values({"hidden_size_per_layer_input": 0})
    return _read(fields, ARCHITECTURE_UNIFIED)


def read_wrapper(fields: ConfigFields) -> ModelSpec:
    return _of_wrapper(read_text_tower(fields, WRAPPER, read_config, ties=True))


def read_wrapper_unified(fields: ConfigFields) -> ModelSpec:
    return _of_wrapper(read_text_tower(fields, WRAPPER_UNIFIED, read_config_unified, ties=True))


def _of_wrapper(spec: ModelSpec) -> ModelSpec:
    """Leave out what reads images and sound."""
    towers = r"(model\.)?(audio_tower|embed_audio|embed_vision|vision_embedder)\..*"
    names = dataclasses.replace(spec.names, ignored=rf"{spec.names.ignored}|{towers}")
    return dataclasses.replace(spec, names=names)


def _read(fields: ConfigFields, architecture: str) -> ModelSpec:
    if fields.text("use_bidirectional_attention", "vision") != "vision":
        raise UnsupportedModelError(
            f"{fields.source}: use_bidirectional_attention "
            f"{fields.text('use_bidirectional_attention', '')!r} is not supported; supported: "
            "null and vision, where only positions of images see later ones"
        )
    fields = fields.renamed({"hidden_act": "hidden_activation"}, _DEFAULTS)
    is_sliding = _sliding_layers(fields)
    window = fields.integer("sliding_window")
    windows = tuple(window if sliding else None for sliding in is_sliding)
    traits = Traits(
        names=_with_ignored(fields),
        norm=_NORM,
        head_norm=_NORM,
        windows=windows,
        ropes=ropes_of_windows(fields, windows, sliding_theta=10_000.0),
        score_scale=1.0,
        biased=(QKV, OUTPUT) if fields.boolean("attention_bias", False) else (),
    )
    # Experts, if there are any, are in addition to what a dense model has.
    spec = read_decoder(fields.with_values({"num_experts": None}), architecture, traits)
    norm = dataclasses.replace(_NORM, eps=spec.final_norm.eps)
    traits = dataclasses.replace(traits, norm=norm)
    layers = _with_own_heads(fields, spec, traits)
    if fields.boolean("enable_moe_block", False):
        traits = dataclasses.replace(traits, experts=_experts(fields))
        layers = [
            _with_experts(layer, traits, index, spec.hidden_size)
            for index, layer in enumerate(layers)
        ]
    size = _layer_input_size(fields)
    return dataclasses.replace(
        spec,
        layers=tuple(
            _with_layer_input(layer, spec, index, size) for index, layer in enumerate(layers)
        ),
        embedding_factor=spec.hidden_size**0.5,
        rounds_embedding_factor=True,
        layer_input_size=size,
        logits_soft_cap=fields.positive_or_null("final_logit_softcapping"),
    )


def _sliding_layers(fields: ConfigFields) -> tuple[bool, ...]:
    """Return which layers have a window: never the last one, as in transformers."""
    default = [(index + 1) % _PERIOD != 0 for index in range(fields.num_layers)]
    return (*sliding_layers(fields, default)[:-1], False)


def _num_own(fields: ConfigFields) -> int:
    """Return the number of layers that have keys and values. Raises ConfigError."""
    num_shared = fields.optional_integer("num_kv_shared_layers") or 0
    if not 0 <= num_shared < fields.num_layers:
        raise ConfigError(
            f"{fields.source}: num_kv_shared_layers must be at least 0 and less than "
            f"num_hidden_layers ({fields.num_layers}), got {num_shared}"
        )
    return fields.num_layers - num_shared


def _with_ignored(fields: ConfigFields) -> DecoderNames:
    """Leave out keys and values of layers that have none: checkpoints hold unused ones."""
    shared = "|".join(map(str, range(_num_own(fields), fields.num_layers)))
    if not shared:
        return _NAMES
    unused = rf".*\blayers\.({shared})\.self_attn\.[kv]_(proj|norm)\..*"
    return dataclasses.replace(_NAMES, ignored=rf"{_NAMES.ignored}|{unused}")


def _with_own_heads(fields: ConfigFields, spec: ModelSpec, traits: Traits) -> list[LayerSpec]:
    """Build the layers with the heads and inner sizes that each has.

    traits.norm has its epsilon. Raises ConfigError, UnsupportedModelError.
    """
    num_own, is_wide = _num_own(fields), fields.boolean("use_double_wide_mlp", False)
    keys_are_values = fields.boolean("attention_k_eq_v", False)
    layers: list[LayerSpec] = []
    attentions: list[AttentionSpec] = []
    for index, (layer, (head_dim, num_kv_heads)) in enumerate(
        zip(spec.layers, _heads(fields, spec, keys_are_values=keys_are_values), strict=True)
    ):
        assert isinstance(layer.mixer, AttentionSpec)
        assert layer.feed_forward is not None
        attention = dataclasses.replace(
            layer.mixer,
            head_dim=head_dim,
            num_kv_heads=num_kv_heads,
            has_value_projection=not (keys_are_values and layer.mixer.window is None),
        )
        feed_forward, is_shared = layer.feed_forward, index >= num_own
        if is_shared:
            distance = index - _source(fields, attention, attentions[:num_own])
            attention = dataclasses.replace(attention, kv_distance=distance)
            if is_wide:
                inner_size = 2 * feed_forward.inner_size
                feed_forward = dataclasses.replace(feed_forward, inner_size=inner_size)
        attention = dataclasses.replace(attention, normalizes_values=not is_shared)
        attentions.append(attention)
        layers.append(build_layer(traits, index, spec.hidden_size, attention, feed_forward))
    _check_ropes(fields, attentions)
    return layers


def _heads(
    fields: ConfigFields, spec: ModelSpec, *, keys_are_values: bool
) -> list[tuple[int, int]]:
    """Return the head size and the number of key heads of each layer. Raises as `_read`."""
    usual = fields.integer("head_dim"), fields.integer("num_key_value_heads")
    of_full = (
        fields.integer("global_head_dim", 512),
        fields.integer("num_global_key_value_heads", usual[1]) if keys_are_values else usual[1],
    )
    own = fields.table("per_layer_config")
    found = []
    for index, mixer in enumerate(spec.mixers_of(AttentionSpec)):
        sizes = usual if own is not None or mixer.window is not None else of_full
        of_layer = None if own is None else own.table(str(index))
        if of_layer is not None:
            others = ", ".join(name for name in of_layer if name not in _LAYER_FIELDS)
            if others:
                raise UnsupportedModelError(f"{of_layer.source}: {others}: not supported")
            sizes = (
                of_layer.integer("head_dim", usual[0]),
                of_layer.integer("num_key_value_heads", usual[1]),
            )
        check_heads(fields, mixer.num_heads, sizes[1], sizes[0])
        found.append(sizes)
    return found


def _source(fields: ConfigFields, attention: AttentionSpec, own: Sequence[AttentionSpec]) -> int:
    """Return the layer whose keys and values a layer reads: the last of its type that has some."""
    same = [index for index, each in enumerate(own) if each.window == attention.window]
    if not same:
        raise ConfigError(
            f"{fields.source}: num_kv_shared_layers ({fields.num_layers - len(own)}) leaves no "
            "layer of a type that shared layers have with keys and values"
        )
    source = own[same[-1]]
    if source.cache != attention.cache:
        raise UnsupportedModelError(
            f"{fields.source}: layers that share keys and values with heads of other sizes are not "
            "supported"
        )
    return same[-1]


def _check_ropes(fields: ConfigFields, attentions: Sequence[AttentionSpec]) -> None:
    """Raise UnsupportedModelError where one rotary embedding is of heads of two sizes."""
    sizes = {(each.rope, each.head_dim) for each in attentions}
    if len(sizes) > len({rope for rope, _ in sizes}):
        raise UnsupportedModelError(
            f"{fields.source}: rope_parameters that are equal for heads of two sizes are not "
            "supported"
        )


def _experts(fields: ConfigFields) -> ExpertTraits:
    fields = fields.renamed({"num_experts_per_tok": "top_k_experts"}, {})
    return ExpertTraits(
        routing=read_routing(fields, RoutingMode.SOFTMAX, normalizes=True),
        inner_size=fields.integer("moe_intermediate_size"),
    )


def _with_experts(layer: LayerSpec, traits: Traits, index: int, hidden_size: int) -> LayerSpec:
    """Add experts to a layer, whose dense part becomes their shared expert.

    It keeps its names in adapters.
    """
    assert isinstance(layer.mixer, AttentionSpec)
    assert layer.feed_forward is not None
    made = build_layer(traits, index, hidden_size, layer.mixer, layer.feed_forward)
    assert made.feed_forward is not None
    prefix = traits.names.layer(index)
    norms = dict(layer.norms)
    of_dense = norms.pop(NormPlace.BEFORE_FEED_FORWARD)
    for place, name in (
        (NormPlace.BEFORE_EXPERTS, "pre_feedforward_layernorm_2"),
        (NormPlace.AFTER_EXPERTS, "post_feedforward_layernorm_2"),
        (NormPlace.AFTER_SHARED, "post_feedforward_layernorm_1"),
    ):
        norms[place] = dataclasses.replace(of_dense, path=prefix + name)
    norms |= {
        NormPlace.BEFORE_SHARED: of_dense,
        NormPlace.BEFORE_ROUTER: dataclasses.replace(
            of_dense,
            path=f"{prefix}router",
            weight_name="scale",
            weight_factor=hidden_size**-0.5,
        ),
    }
    factors = f"{prefix}router.per_expert_scale"
    return dataclasses.replace(
        made,
        feed_forward=dataclasses.replace(made.feed_forward, expert_factors=factors),
        norms=norms,
        linears={**made.linears, SHARED_UP: layer.linears[UP], SHARED_DOWN: layer.linears[DOWN]},
    )


def _layer_input_size(fields: ConfigFields) -> int:
    name = "hidden_size_per_layer_input"
    if name not in fields.values_and_nulls:
        size: int | None = _LAYER_INPUT_SIZE
    else:
        size = fields.optional_integer(name)
    if not size:
        return 0
    vocab_size = fields.integer("vocab_size")
    num_rows = fields.integer("vocab_size_per_layer_input", vocab_size)
    if num_rows != vocab_size:
        raise UnsupportedModelError(
            f"{fields.source}: vocab_size_per_layer_input ({num_rows}) must be vocab_size "
            f"({vocab_size})"
        )
    return fields.integer(name, _LAYER_INPUT_SIZE)


def _with_layer_input(layer: LayerSpec, spec: ModelSpec, index: int, size: int) -> LayerSpec:
    """Add the layer's own input, if it has a size, and the factor of its output."""
    prefix = spec.names.layer(index)
    layer = dataclasses.replace(layer, output_factor=f"{prefix}layer_scalar")
    if not size:
        return layer
    assert layer.feed_forward is not None

    def group(path: str, in_features: int, out_features: int) -> LinearGroup:
        return LinearGroup(
            paths=(path,),
            outputs={path.rpartition(".")[2]: out_features},
            in_features=in_features,
            has_bias=False,
        )

    of_all = {}
    if index == 0:
        path = spec.names.root + spec.names.layer_inputs[1]
        of_all[LAYER_INPUTS] = group(path, spec.hidden_size, spec.num_layers * size)
    norm = dataclasses.replace(spec.final_norm, path=f"{prefix}post_per_layer_input_norm")
    return dataclasses.replace(
        layer,
        layer_input=layer.feed_forward.activation,
        norms={**layer.norms, NormPlace.AFTER_LAYER_INPUT: norm},
        linears={
            **of_all,
            **layer.linears,
            LAYER_INPUT_GATE: group(f"{prefix}per_layer_input_gate", spec.hidden_size, size),
            LAYER_INPUT_OUT: group(f"{prefix}per_layer_projection", size, spec.hidden_size),
        },
    )
