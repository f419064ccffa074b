"""SmolLM 3: Llama in which every fourth layer rotates nothing."""

from typing import Final

from loraplex.core.errors import ConfigError
from loraplex.models.config_fields import ConfigFields
from loraplex.models.families.llama import llama_biases
from loraplex.models.family_config import Traits, read_decoder, sliding_layers
from loraplex.models.spec import ModelSpec

ARCHITECTURE: Final = "SmolLM3ForCausalLM"

_DEFAULTS: Final = {
    "max_position_embeddings": 32_768,
    "num_key_value_heads": 4,
    "rope_theta": 2_000_000.0,
    "tie_word_embeddings": True,
}
_DEFAULT_PERIOD: Final = 4


def read_config(fields: ConfigFields) -> ModelSpec:
    """Read a config.json; layers without rotation have the window, if windows are switched on."""
    fields = fields.renamed({}, _DEFAULTS)
    rotates = rotating_layers(fields)
    window = fields.optional_integer("sliding_window")
    if not fields.boolean("use_sliding_window", False):
        window = None
    is_sliding = sliding_layers(fields, [not does for does in rotates])
    traits = Traits(
        windows=tuple(window if slides else None for slides in is_sliding),
        rotates=rotates,
        biased=llama_biases(fields),
        rotates_whole_heads=True,
    )
    return read_decoder(fields, ARCHITECTURE, traits)


def rotating_layers(fields: ConfigFields) -> tuple[bool, ...]:
    """Read `no_rope_layers`, which has a 1 for a layer that rotates, or else its period."""
    num_layers = fields.num_layers
    flags = fields.integers("no_rope_layers")
    if not flags:
        period = fields.integer("no_rope_layer_interval", _DEFAULT_PERIOD)
        return tuple(number % period != 0 for number in range(1, num_layers + 1))
    if len(flags) < num_layers:
        raise ConfigError(
            f"{fields.source}: no_rope_layers has {len(flags)} entries, "
            f"num_hidden_layers is {num_layers}"
        )
    return tuple(flag != 0 for flag in flags[:num_layers])
