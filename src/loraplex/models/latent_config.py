"""Reads the fields of latent attention, and puts such attention in the place of a decoder's."""

import dataclasses
from typing import Final

from loraplex.models.config_fields import ConfigFields
from loraplex.models.decoder_names import DecoderNames
from loraplex.models.family_config import RMS_NORM, Traits, read_decoder
from loraplex.models.linear_group import LinearGroup
from loraplex.models.rope_config import read_rope, yarn_mscale
from loraplex.models.spec import LayerSpec, ModelSpec
from loraplex.models.specs.attention import OUTPUT, QKV
from loraplex.models.specs.latent import (
    LATENT_DOWN,
    LATENT_HEADS,
    LATENT_OUT,
    LATENT_QUERY,
    LatentSpec,
)
from loraplex.models.specs.part import RopeConfig, growth_alone

_PREFIX: Final = "self_attn."


def read_latent_decoder(
    fields: ConfigFields, architecture: str, traits: Traits, *, default_query_rank: int
) -> ModelSpec:
    """Read a decoder whose layers all have latent attention. Raises ConfigError or
    UnsupportedModelError.

    default_query_rank: size of the queries' latent vector where the file has no field for it.
    """
    num_heads, rope_size = fields.integer("num_attention_heads"), fields.integer("qk_rope_head_dim")
    # What plain attention reads: it is replaced below.
    fields = fields.with_values({"num_key_value_heads": num_heads, "head_dim": rope_size})
    rope = read_rope(fields, rope_size, fields.integer("max_position_embeddings"))
    rope = dataclasses.replace(
        rope, partial_rotary_factor=1.0, is_interleaved=traits.is_rope_interleaved
    )
    spec = read_decoder(fields, architecture, dataclasses.replace(traits, ropes=(rope,)))
    query_rank = fields.positive_or_null("q_lora_rank", default_query_rank)
    latent = LatentSpec(
        num_heads=num_heads,
        latent_size=fields.integer("kv_lora_rank"),
        key_size=fields.integer("qk_nope_head_dim"),
        rope_size=rope_size,
        value_size=fields.integer("v_head_dim"),
        query_size=None if query_rank is None else fields.integer("q_lora_rank", int(query_rank)),
        rope=rope,
        scale=_score_scale(fields.integer("qk_nope_head_dim") + rope_size, rope),
        latent_norm=RMS_NORM,
    )
    has_bias = fields.boolean("attention_bias", False)
    layers = tuple(
        _with_latent(layer, latent, spec.names.layer(index), spec.hidden_size, has_bias=has_bias)
        for index, layer in enumerate(spec.layers)
    )
    return dataclasses.replace(spec, layers=layers)


def limited_to(spec: ModelSpec, length: int, reason: str) -> ModelSpec:
    """Return the model for sequences of at most so many tokens.

    reason: why not longer ones, as the end of a sentence.
    """
    if spec.default_max_model_len <= length:
        return spec
    return dataclasses.replace(spec, default_max_model_len=length, length_reason=reason)


def with_growing_queries(spec: ModelSpec, growth: float) -> ModelSpec:
    """Return the model with RopeConfig.growth of whole queries, by the length of its embedding."""

    def growing(latent: LatentSpec, _layer: int) -> LatentSpec:
        length = latent.rope.original_max_position_embeddings
        return dataclasses.replace(latent, query_growth=growth_alone(growth, length))

    return spec.map_mixers(LatentSpec, growing) if growth else spec


def without_draft_layers(names: DecoderNames, fields: ConfigFields) -> DecoderNames:
    """Return names that leave out layers after the last, which predict further tokens."""
    number = fields.optional_integer("num_nextn_predict_layers") or 1
    first = fields.num_layers
    indices = "|".join(map(str, range(first, first + number)))
    ignored = rf"{names.ignored}|(.*\.)?{names.layers}\.({indices})\..*"
    return dataclasses.replace(names, ignored=ignored)


def _score_scale(head_size: int, rope: RopeConfig) -> float:
    """Return the factor of the scores, with that of a stretched rotary embedding."""
    scale: float = head_size**-0.5
    if rope.rope_type == "default" or not rope.mscale_all_dim:
        return scale
    return scale * yarn_mscale(rope.factor, rope.mscale_all_dim) ** 2


def _with_latent(
    layer: LayerSpec, latent: LatentSpec, prefix: str, hidden_size: int, *, has_bias: bool
) -> LayerSpec:
    """Return the layer with latent attention in the place of its own."""
    path = prefix + _PREFIX
    # In transformers these norms have the default epsilon, whatever the file states.
    norm = dataclasses.replace(RMS_NORM, path=f"{path}kv_a_layernorm", size=latent.latent_size)
    latent = dataclasses.replace(latent, latent_norm=norm)
    if latent.query_size is not None:
        norm = dataclasses.replace(RMS_NORM, path=f"{path}q_a_layernorm", size=latent.query_size)
        latent = dataclasses.replace(latent, query_norm=norm)
    rest = {name: own for name, own in layer.linears.items() if name not in (QKV, OUTPUT)}
    groups = _groups(latent, path, hidden_size, has_bias=has_bias)
    return dataclasses.replace(layer, mixer=latent, linears={**groups, **rest})


def _groups(
    latent: LatentSpec, path: str, hidden_size: int, *, has_bias: bool
) -> dict[str, LinearGroup]:
    num_heads, query_size = latent.num_heads, latent.query_size
    down = {} if query_size is None else {"q_a_proj": query_size}
    query = "q_proj" if query_size is None else "q_b_proj"
    queries = num_heads * (latent.key_size + latent.rope_size)

    def group(outputs: dict[str, int], in_features: int, *, has_bias: bool = False) -> LinearGroup:
        paths = tuple(path + name for name in outputs)
        return LinearGroup(paths=paths, outputs=outputs, in_features=in_features, has_bias=has_bias)

    heads = group({"kv_b_proj": num_heads * latent.head_outputs}, latent.latent_size)
    out = group({"o_proj": hidden_size}, num_heads * latent.value_size, has_bias=has_bias)
    return {
        LATENT_DOWN: group(
            down | {"kv_a_proj_with_mqa": latent.cached_size}, hidden_size, has_bias=has_bias
        ),
        LATENT_QUERY: group({query: queries}, query_size or hidden_size),
        LATENT_HEADS: dataclasses.replace(heads, is_taken_apart=True),
        LATENT_OUT: dataclasses.replace(out, is_row=True),
    }
