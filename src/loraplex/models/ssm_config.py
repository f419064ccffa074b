"""Layers with a state space of Mamba2 as configurations describe them, and their linear layers."""

import dataclasses
from collections.abc import Collection
from typing import Final

from loraplex.core.errors import ConfigError, UnsupportedModelError
from loraplex.kernels.activations import Activation
from loraplex.models.config_fields import ConfigFields
from loraplex.models.family_config import RMS_NORM
from loraplex.models.linear_group import LinearGroup
from loraplex.models.spec import LayerSpec, ModelSpec
from loraplex.models.specs.attention import OUTPUT, QKV
from loraplex.models.specs.ssm import SSM_INPUT, SSM_OUTPUT, SsmSpec

SSM_DEFAULTS: Final = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_head": "auto",
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "time_step_limit": [0.0, float("inf")],
}
"""Defaults of transformers in the families that call the fields so."""
_INFINITY: Final = {"__float__": "Infinity"}
"""How transformers 5 writes infinity."""


_LAYER_TYPES: Final = {
    "linear_attention": True,
    "mamba": True,
    "full_attention": False,
    "attention": False,
}
"""Whether layers have a state space, by all names of their types."""


def state_layers(fields: ConfigFields) -> frozenset[int]:
    """Read which layers have a state space: all, if no field names the types of layers.

    Raises ConfigError or UnsupportedModelError.
    """
    name = "layer_types" if "layer_types" in fields else "layers_block_type"
    types = fields.layer_types(_LAYER_TYPES, name) or ("mamba",) * fields.num_layers
    return frozenset(index for index, each in enumerate(types) if _LAYER_TYPES[each])


def with_state_spaces(
    spec: ModelSpec,
    fields: ConfigFields,
    layers: Collection[int],
    module: str,
    activation: str = "hidden_act",
) -> ModelSpec:
    """Return the model with a state space instead of the attention of these layers.

    fields: with a value for each of SSM_DEFAULTS that has no default elsewhere. module: its name
    within a layer. activation: the field with that of the convolution.

    Raises ConfigError or UnsupportedModelError.
    """
    shared, has_bias = _read(fields, activation), fields.boolean("mamba_proj_bias", False)

    def changed(index: int, layer: LayerSpec) -> LayerSpec:
        if index not in layers:
            return layer
        path = spec.names.layer(index) + module
        norm = dataclasses.replace(shared.norm, path=f"{path}.norm")
        ssm = dataclasses.replace(shared, path=path, norm=norm)
        return _with_ssm(layer, ssm, spec.hidden_size, has_bias=has_bias)

    return dataclasses.replace(
        spec, layers=tuple(changed(index, layer) for index, layer in enumerate(spec.layers))
    )


def _read(fields: ConfigFields, activation: str) -> SsmSpec:
    """Read what the state spaces of all layers share: they have no place."""
    if fields.text(activation, "silu") not in ("silu", "swish"):
        raise UnsupportedModelError(
            f"{fields.source}: {fields.own_name(activation)} {fields.values[activation]!r} is not "
            "supported in layers with a state space; supported: silu"
        )
    num_heads, num_groups = fields.integer("mamba_n_heads"), fields.integer("mamba_n_groups")
    if num_heads % num_groups:
        raise ConfigError(
            f"{fields.source}: {fields.own_name('mamba_n_heads')} ({num_heads}) must be a multiple "
            f"of {fields.own_name('mamba_n_groups')} ({num_groups})"
        )
    if fields.values.get("mamba_d_head") == "auto":
        inner_size = fields.integer("mamba_expand") * fields.integer("hidden_size")
        if inner_size % num_heads:
            raise ConfigError(
                f"{fields.source}: mamba_expand * hidden_size ({inner_size}) must be a multiple of "
                f"mamba_n_heads ({num_heads})"
            )
        head_size = inner_size // num_heads
    else:
        head_size = fields.integer("mamba_d_head")
    smallest_dt, largest_dt = _time_limits(fields)
    return SsmSpec(
        path="",
        num_heads=num_heads,
        head_size=head_size,
        state_size=fields.integer("mamba_d_state"),
        num_groups=num_groups,
        num_taps=fields.integer("mamba_d_conv"),
        has_conv_bias=fields.boolean("mamba_conv_bias", True),
        activation=Activation.SILU,
        norm=dataclasses.replace(
            RMS_NORM,
            size=num_heads * head_size,
            eps=fields.number("rms_norm_eps", RMS_NORM.eps),
        ),
        smallest_dt=smallest_dt,
        largest_dt=largest_dt,
    )


def _time_limits(fields: ConfigFields) -> tuple[float, float]:
    """Read the limits of dt."""
    stored = fields.values.get("time_step_limit")
    limits = [float("inf") if limit == _INFINITY else limit for limit in _listed(stored)]
    known = fields.with_values({"time_step_limit": limits}).numbers("time_step_limit")
    if len(known) != 2 or not 0 <= known[0] <= known[1]:
        raise ConfigError(
            f"{fields.source}: time_step_limit must be two ascending numbers of at least 0, got "
            f"{stored}"
        )
    return known[0], known[1]


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]


def _with_ssm(layer: LayerSpec, ssm: SsmSpec, hidden_size: int, *, has_bias: bool) -> LayerSpec:
    groups = {
        SSM_INPUT: LinearGroup(
            paths=(f"{ssm.path}.in_proj",),
            outputs={"in_proj": ssm.input_size},
            in_features=hidden_size,
            has_bias=has_bias,
        ),
        SSM_OUTPUT: LinearGroup(
            paths=(f"{ssm.path}.out_proj",),
            outputs={"out_proj": hidden_size},
            in_features=ssm.inner_size,
            has_bias=has_bias,
            is_row=True,
        ),
    }
    kept = {name: group for name, group in layer.linears.items() if name not in (QKV, OUTPUT)}
    return dataclasses.replace(layer, mixer=ssm, linears={**groups, **kept})
