"""Baichuan 1 and 2: q, k and v fused; the 7B models rotate, the 13B models have ALiBi."""

import dataclasses
from typing import Final

from loraplex.models.config_fields import ConfigFields
from loraplex.models.decoder_names import DecoderNames
from loraplex.models.family_config import Traits, alibi_slopes, read_decoder
from loraplex.models.spec import ModelSpec

ARCHITECTURE: Final = "BaichuanForCausalLM"
ARCHITECTURE_7B: Final = "BaiChuanForCausalLM"
"""Name of the first model, of 7B."""

NAMES: Final = DecoderNames(qkv=("self_attn.W_pack",))

_DEFAULT_LENGTH: Final = {"max_position_embeddings": 4096}
_ROTATING_HIDDEN_SIZE: Final = 4096
_VOCAB_SIZE_2: Final = 125_696


def read_config(fields: ConfigFields) -> ModelSpec:
    """Read a config.json of all models but the first: the size of the model decides."""
    rotates = fields.integer("hidden_size") == _ROTATING_HIDDEN_SIZE
    return _read(fields, ARCHITECTURE, rotates=rotates)


def read_config_7b(fields: ConfigFields) -> ModelSpec:
    return _read(fields, ARCHITECTURE_7B, rotates=True)


def _read(fields: ConfigFields, architecture: str, *, rotates: bool) -> ModelSpec:
    own_names = {"head_dim": "", "num_key_value_heads": ""}
    if "max_position_embeddings" not in fields:
        own_names["max_position_embeddings"] = "model_max_length"
    fields = fields.renamed(own_names, _DEFAULT_LENGTH)
    slopes = () if rotates else alibi_slopes(fields.integer("num_attention_heads"))
    traits = Traits(names=NAMES, rotates=(rotates,), alibi_slopes=slopes)
    spec = read_decoder(fields, architecture, traits)
    # Baichuan 2 learned a head of unit rows, and saved what it had before their normalisation.
    return dataclasses.replace(spec, has_unit_lm_head=spec.vocab_size == _VOCAB_SIZE_2)
