"""Reads the rotary embedding's settings from a Hugging Face config.json, old style or new.

Old: `rope_theta` and `rope_scaling` among the other fields. New (transformers 5): both in one
object, `rope_parameters`; where the layers differ, it has one such object per layer type.
"""

import math
from collections.abc import Mapping

from loraplex.core.errors import ConfigError, UnsupportedModelError
from loraplex.models.config_fields import ConfigFields
from loraplex.models.specs.part import RopeConfig

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")
_DEFAULT_THETA = 10_000.0
RECOMPUTING = frozenset({"Phi3ForCausalLM", "PhimoeForCausalLM", "PhiMoEForCausalLM"})
"""Architectures whose `generate` in transformers drops the KV cache when a sequence outgrows the
original length; the others keep the keys that the short factors rotated."""
FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"
LAYER_TYPES = (FULL_ATTENTION, SLIDING_ATTENTION)
"""Values of layer_types: kinds of decoder layers."""


def read_rope(fields: ConfigFields, head_dim: int, max_position_embeddings: int) -> RopeConfig:
    """Read the embedding. Raises ConfigError or UnsupportedModelError, naming the field."""
    rope = fields.table("rope_scaling") or fields.table("rope_parameters") or fields
    _require_one_set(rope, fields)
    return _read(rope, fields, head_dim, max_position_embeddings)


def read_layer_ropes(
    fields: ConfigFields, head_dim: int, max_position_embeddings: int, sliding_theta: float
) -> Mapping[str, RopeConfig]:
    """Read one embedding per layer type, from `rope_parameters` or from the older fields.

    Those are of layers with full attention; sliding_theta is of the others where it is not stated.
    Raises ConfigError or UnsupportedModelError, naming the field.
    """
    ropes = fields.table("rope_parameters") or ConfigFields({}, fields.source)
    others = ", ".join(sorted(set(ropes) - set(LAYER_TYPES)))
    if others:
        raise UnsupportedModelError(
            f"{ropes.source}: {others}: not supported; supported is an object for each of "
            f"{' and '.join(LAYER_TYPES)}"
        )
    full, scaling = ropes.table(FULL_ATTENTION), fields.table("rope_scaling")
    if full is not None and scaling is not None:
        full = ConfigFields({**full.values, **scaling.values}, scaling.source)
    sliding = ropes.table(SLIDING_ATTENTION) or ConfigFields({"rope_type": "default"}, ropes.source)
    outside = fields.with_values({"rope_theta": sliding_theta})
    sizes = (head_dim, max_position_embeddings)
    return {
        FULL_ATTENTION: _read(full or scaling or fields, fields, *sizes),
        SLIDING_ATTENTION: _read(sliding, outside, *sizes),
    }


def _read(
    rope: ConfigFields, fields: ConfigFields, head_dim: int, max_position_embeddings: int
) -> RopeConfig:
    is_nested = rope is not fields
    rope_type = rope.text("rope_type", rope.text("type", "default")) if is_nested else "default"
    if rope_type not in ROPE_TYPES:
        raise UnsupportedModelError(
            f"{fields.source}: rope type {rope_type!r} is not supported; "
            f"supported: {', '.join(ROPE_TYPES)}"
        )
    original_length = fields.optional_integer("original_max_position_embeddings")
    if original_length is None:
        original_length = rope.integer("original_max_position_embeddings", max_position_embeddings)
    low_freq_factor, high_freq_factor = _llama3_factors(rope, rope_type)
    partial = _partial_rotary_factor(rope, fields)
    num_frequencies = int(head_dim * partial) // 2
    short_factor, long_factor = _longrope_factors(rope, rope_type, num_frequencies)
    config = RopeConfig(
        rope_type=rope_type,
        theta=rope.number("rope_theta", fields.number("rope_theta", _DEFAULT_THETA)),
        factor=_factor(rope, rope_type, max_position_embeddings / original_length),
        original_max_position_embeddings=original_length,
        partial_rotary_factor=partial,
        attention_factor=rope.optional_number("attention_factor"),
        beta_fast=rope.number("beta_fast", 32.0) or 32.0,
        beta_slow=rope.number("beta_slow", 1.0) or 1.0,
        mscale=rope.optional_number("mscale"),
        mscale_all_dim=rope.optional_number("mscale_all_dim"),
        truncate=rope.boolean("truncate", True),
        low_freq_factor=low_freq_factor,
        high_freq_factor=high_freq_factor,
        short_factor=short_factor,
        long_factor=long_factor,
        recomputes=any(name in RECOMPUTING for name in fields.texts("architectures")),
    )
    if config.theta <= 0 or config.factor <= 0:
        raise ConfigError(f"{rope.source}: rope_theta and factor must be positive")
    return config


def yarn_mscale(factor: float, mscale: float) -> float:
    """Return yarn's factor of scores' square roots for a stretched length (arXiv:2309.00071)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def max_rotary_len(rope: RopeConfig | None, max_position_embeddings: int) -> int:
    """Return the length that a model with this embedding, or none, was made for.

    Llama 3 and longrope checkpoints state the stretched length; the others state the original
    one and the factor.
    """
    if rope is None:
        return max_position_embeddings
    if rope.rope_type in ("linear", "dynamic"):
        return int(max_position_embeddings * rope.factor)
    if rope.rope_type == "yarn":
        stretched = int(rope.original_max_position_embeddings * rope.factor)
        return max(stretched, max_position_embeddings)
    return max_position_embeddings


def _require_one_set(rope: ConfigFields, fields: ConfigFields) -> None:
    if rope is not fields and rope.tables():
        raise UnsupportedModelError(
            f"{rope.source}: rope settings per layer type ({', '.join(rope.tables())}) "
            "are not supported"
        )


def _factor(rope: ConfigFields, rope_type: str, implied: float) -> float:
    """Read the factor; longrope and yarn derive an absent one from the two lengths."""
    if rope_type == "default":
        return 1.0
    if rope_type == "proportional":
        return rope.number("factor", 1.0)
    return rope.number("factor", implied if rope_type in ("yarn", "longrope") else None)


def _partial_rotary_factor(rope: ConfigFields, fields: ConfigFields) -> float:
    partial = rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    if not 0 < partial <= 1:
        raise ConfigError(f"{fields.source}: partial_rotary_factor must be in (0, 1]")
    return partial


def _llama3_factors(rope: ConfigFields, rope_type: str) -> tuple[float, float]:
    if rope_type != "llama3":
        return 1.0, 4.0
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if not 0 < low <= high:
        raise ConfigError(
            f"{rope.source}: low_freq_factor ({low:g}) must be positive and at most "
            f"high_freq_factor ({high:g})"
        )
    return low, high


def _longrope_factors(
    rope: ConfigFields, rope_type: str, num_frequencies: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    if rope_type != "longrope":
        return (), ()
    short_factor, long_factor = rope.numbers("short_factor"), rope.numbers("long_factor")
    for name, values in (("short_factor", short_factor), ("long_factor", long_factor)):
        if len(values) != num_frequencies or min(values) <= 0:
            raise ConfigError(
                f"{rope.source}: {name} must have {num_frequencies} positive numbers "
                f"(half of what turns of a head), got {len(values)}"
            )
    return short_factor, long_factor
