"""Windows and rotary embeddings of decoders with two types of layers: sliding and full attention.

`layer_types` names the type of each layer; older files state a period, of which the last layer has
full attention.
"""

import operator
from collections.abc import Callable, Sequence

from loraplex.models.config_fields import ConfigFields
from loraplex.models.family_config import sliding_layers
from loraplex.models.rope_config import FULL_ATTENTION, SLIDING_ATTENTION, read_layer_ropes
from loraplex.models.specs.part import RopeConfig


def periodic_windows(fields: ConfigFields, period: int) -> tuple[int | None, ...]:
    """Return the window of each layer; 4096 where none is stated, as in transformers."""
    window = fields.positive_or_null("sliding_window", 4096)
    default = [(index + 1) % period != 0 for index in range(fields.num_layers)]
    return tuple(
        int(window) if is_sliding and window is not None else None
        for is_sliding in sliding_layers(fields, default)
    )


def windows_by_switch(
    fields: ConfigFields, has_window: Callable[[int, int], bool] = operator.ge
) -> tuple[int | None, ...]:
    """Return the window of each layer by Qwen's rule: only if `use_sliding_window` is true.

    has_window: whether a layer has one, by its number and by `max_window_layers`, in files without
    `layer_types`.
    """
    window = None
    if fields.boolean("use_sliding_window", False):
        window = fields.positive_or_null("sliding_window", 4096)
    limit = fields.optional_integer("max_window_layers")
    limit = 28 if limit is None else limit
    default = [has_window(index, limit) for index in range(fields.num_layers)]
    return tuple(
        int(window) if is_sliding and window is not None else None
        for is_sliding in sliding_layers(fields, default)
    )


def ropes_of_windows(
    fields: ConfigFields, windows: Sequence[int | None], sliding_theta: float
) -> tuple[RopeConfig, ...]:
    """Return the rotary embedding of each layer, by whether it has a window.

    sliding_theta: theta of layers with a window, where no field states it.
    """
    head_dim = fields.integer("hidden_size") // fields.integer("num_attention_heads")
    ropes = read_layer_ropes(
        fields,
        fields.integer("head_dim", head_dim),
        fields.integer("max_position_embeddings"),
        sliding_theta,
    )
    return tuple(ropes[FULL_ATTENTION if w is None else SLIDING_ATTENTION] for w in windows)
