"""StarCoder 2: layer norms, an MLP without a gate, biases, one window for all layers or none."""

from typing import Final

from loraplex.models.config_fields import ConfigFields
from loraplex.models.decoder_names import DecoderNames
from loraplex.models.family_config import (
    ALL_BIASED,
    LAYER_NORM,
    Traits,
    read_decoder,
    require_switches,
)
from loraplex.models.spec import ModelSpec

ARCHITECTURE: Final = "Starcoder2ForCausalLM"

NAMES: Final = DecoderNames(up=("mlp.c_fc",), down="mlp.c_proj")

_OWN_NAMES: Final = {"rms_norm_eps": "norm_epsilon"}
_DEFAULTS: Final = {
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 4096,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
_NEEDED: Final = {"norm_type": "layer_norm", "mlp_type": "default"}
"""Fields of the first files whose other values no class of transformers supports."""


def read_config(fields: ConfigFields) -> ModelSpec:
    require_switches(fields, _NEEDED)
    fields = fields.renamed(_OWN_NAMES, _DEFAULTS)
    traits = Traits(
        names=NAMES,
        windows=(fields.optional_integer("sliding_window"),),
        biased=ALL_BIASED if fields.boolean("use_bias", True) else (),
        norm=LAYER_NORM,
        is_gated=False,
        rotates_whole_heads=True,
    )
    return read_decoder(fields, ARCHITECTURE, traits)
