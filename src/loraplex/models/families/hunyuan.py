"""Hunyuan dense: Llama that normalises query and key heads after the rotation."""

import dataclasses
from typing import Final

from loraplex.core.errors import ConfigError
from loraplex.models.config_fields import ConfigFields
from loraplex.models.decoder_names import LLAMA_NAMES
from loraplex.models.family_config import RMS_NORM, Traits, read_decoder, require_switches
from loraplex.models.spec import ModelSpec
from loraplex.models.specs.attention import OUTPUT, QKV

ARCHITECTURE: Final = "HunYuanDenseV1ForCausalLM"

_NAMES: Final = dataclasses.replace(
    LLAMA_NAMES, q_norm="self_attn.query_layernorm", k_norm="self_attn.key_layernorm"
)
_NORM: Final = dataclasses.replace(RMS_NORM, eps=1e-5)


def read_config(fields: ConfigFields) -> ModelSpec:
    require_switches(fields, {"use_qk_norm": True, "use_cla": False})
    fields = _with_plain_rope(fields.renamed({}, {"max_position_embeddings": 2048}))
    traits = Traits(
        names=_NAMES,
        biased=(QKV, OUTPUT) if fields.boolean("attention_bias", False) else (),
        norm=_NORM,
        head_norm=_NORM,
        normalizes_after_rotation=True,
        rotates_whole_heads=True,
    )
    return read_decoder(fields, ARCHITECTURE, traits)


def _with_plain_rope(fields: ConfigFields) -> ConfigFields:
    """Return the fields without "alpha", which raises theta once: no length counts.

    It becomes theta * alpha ** (D / (D - 2)), as in transformers. D: size of a head. Raises
    ConfigError.
    """
    for name in ("rope_scaling", "rope_parameters"):
        rope = fields.table(name)
        if rope is None or rope.text("rope_type", rope.text("type", "default")) != "dynamic":
            continue
        alpha = rope.number("alpha", 0.0)
        if alpha < 0:
            raise ConfigError(f"{rope.source}: alpha must be positive, got {alpha:g}")
        if not alpha:
            continue
        head_dim = fields.integer(
            "head_dim", fields.integer("hidden_size") // fields.integer("num_attention_heads")
        )
        theta = rope.number("rope_theta", fields.number("rope_theta", 10_000.0))
        theta *= alpha ** (head_dim / max(head_dim - 2, 1))
        return fields.with_values({name: {"rope_type": "default", "rope_theta": theta}})
    return fields
