"""Layers with experts as a family describes them, and their linear layers."""

import dataclasses
from collections.abc import Callable
from typing import Final

from loraplex.core.errors import ConfigError
from loraplex.kernels.activations import Activation
from loraplex.kernels.routing_rules import RoutingMode, RoutingRules
from loraplex.models.config_fields import ConfigFields
from loraplex.models.decoder_names import DecoderNames, ExpertNames
from loraplex.models.linear_group import LinearGroup
from loraplex.models.spec import (
    DOWN,
    LATENT_INPUT,
    LATENT_OUTPUT,
    ROUTER,
    SHARED_DOWN,
    SHARED_GATE,
    SHARED_UP,
    SHARED_UP_MODULES,
    UP,
    FeedForwardSpec,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTraits:
    """Layers with experts."""

    routing: RoutingRules
    inner_size: int | None = None
    """Inner size of each expert; None: that of a dense layer."""
    activation: Activation | None = None
    """None: that of a dense layer."""
    latent_size: int = 0
    """Size of what the experts read and give; 0: the hidden size."""
    shared_size: int = 0
    """Inner size of the shared expert; 0: there is none."""
    dense_layers: frozenset[int] = frozenset()
    """Layers without experts."""


ROUTER_MODULE: Final = "router"
EXPERT_UP_MODULES: Final = ("experts.gate_proj", "experts.up_proj")
EXPERT_DOWN_MODULE: Final = "experts.down_proj"
FUSED_SHARED_UP_MODULE: Final = "shared_expert.gate_up_proj"
SHARED_DOWN_MODULE: Final = "shared_expert.down_proj"
SHARED_GATE_MODULE: Final = "shared_expert_gate"


_NUM_EXPERTS: Final = ("num_experts", "num_local_experts")
"""Names of one field: files that transformers 5 saves may have another than published ones."""
_NUM_CHOSEN: Final = "num_experts_per_tok"
_DENSE: Final = "dense"
"""Value of mlp_layer_types."""


def read_routing(
    fields: ConfigFields,
    mode: RoutingMode,
    *,
    default_num_experts: int | None = None,
    normalizes: bool = False,
) -> RoutingRules:
    """Read how many experts there are, and how many of them a token has. Raises ConfigError."""
    names = [name for name in _NUM_EXPERTS if name in fields] or _NUM_EXPERTS[:1]
    numbers = [fields.integer(name, default_num_experts) for name in names]
    if len(set(numbers)) > 1:
        raise ConfigError(
            f"{fields.source}: num_experts ({numbers[0]}) and num_local_experts ({numbers[1]}) "
            "are names of one number and must be equal"
        )
    num_chosen = fields.integer(_NUM_CHOSEN)
    if num_chosen > numbers[0]:
        raise ConfigError(
            f"{fields.source}: {fields.own_name(_NUM_CHOSEN)} must be at most {names[0]} "
            f"({numbers[0]}), got {num_chosen}"
        )
    return RoutingRules(
        num_experts=numbers[0], num_chosen=num_chosen, mode=mode, normalizes=normalizes
    )


def read_grouped_routing(fields: ConfigFields, mode: RoutingMode) -> RoutingRules:
    """Read a choice of experts as DeepSeek names its fields. Raises ConfigError."""
    num_experts, num_chosen = fields.integer("n_routed_experts"), fields.integer(_NUM_CHOSEN)
    num_groups, num_chosen_groups = fields.integer("n_group", 1), fields.integer("topk_group", 1)
    for name, value, limit_name, limit in (
        (_NUM_CHOSEN, num_chosen, "n_routed_experts", num_experts),
        ("topk_group", num_chosen_groups, "n_group", num_groups),
    ):
        if value > limit:
            raise ConfigError(
                f"{fields.source}: {name} must be at most {limit_name} ({limit}), got {value}"
            )
    if num_experts % num_groups:
        raise ConfigError(
            f"{fields.source}: n_routed_experts ({num_experts}) must be a multiple of n_group "
            f"({num_groups})"
        )
    return RoutingRules(
        num_experts=num_experts,
        num_chosen=num_chosen,
        mode=mode,
        normalizes=fields.boolean("norm_topk_prob", False),
        factor=fields.positive("routed_scaling_factor", 1.0),
        num_groups=num_groups,
        num_chosen_groups=num_chosen_groups,
    )


def dense_first_layers(fields: ConfigFields) -> frozenset[int]:
    """Return the layers without experts: those that mlp_layer_types names, or the first ones."""
    types = fields.layer_types((_DENSE, "sparse"), "mlp_layer_types")
    if types:
        return frozenset(index for index, kind in enumerate(types) if kind == _DENSE)
    return frozenset(range(fields.optional_integer("first_k_dense_replace") or 0))


def equal_parts(size: int, number: int) -> tuple[int, ...]:
    """Return the sizes of so many equal parts."""
    return (size // number,) * number


def with_experts(
    feed_forward: FeedForwardSpec, traits: ExpertTraits, names: DecoderNames, prefix: str
) -> FeedForwardSpec:
    """Return the part, that of a dense layer, with the experts of the layer with this prefix."""
    bias = names.experts.selection_bias
    return dataclasses.replace(
        feed_forward,
        inner_size=traits.inner_size or feed_forward.inner_size,
        activation=traits.activation or feed_forward.activation,
        routing=traits.routing,
        selection_bias=prefix + bias if bias else "",
        is_selection_bias_row=names.experts.is_selection_bias_row,
    )


def expert_groups(
    feed_forward: FeedForwardSpec,
    traits: ExpertTraits,
    names: ExpertNames,
    hidden_size: int,
    group: Callable[..., LinearGroup],
) -> dict[str, LinearGroup]:
    """Return the groups of a layer with experts.

    feed_forward: of the layer. group: makes one of this layer.
    """
    inner_size, num_experts = feed_forward.inner_size, traits.routing.num_experts
    size = traits.latent_size or hidden_size
    first_part = int(not feed_forward.is_gated)
    up_parts = dict.fromkeys(EXPERT_UP_MODULES[first_part:], inner_size)
    experts = (tuple(up_parts), num_experts), ((EXPERT_DOWN_MODULE,), num_experts)
    groups = {
        ROUTER: group(ROUTER, (names.router,), (num_experts,), hidden_size, (ROUTER_MODULE,)),
        UP: group(UP, names.up, tuple(up_parts.values()), size, *experts[0], parts=up_parts),
        DOWN: group(DOWN, (names.down,), (size,), inner_size, *experts[1]),
    }
    if traits.latent_size:
        first, last = names.latent
        groups |= {
            LATENT_INPUT: group(LATENT_INPUT, (first,), (size,), hidden_size),
            LATENT_OUTPUT: group(LATENT_OUTPUT, (last,), (hidden_size,), size),
        }
    if not traits.shared_size:
        return groups
    parts = dict.fromkeys(SHARED_UP_MODULES[first_part:], traits.shared_size)
    num_layers = len(names.shared_up)
    modules = tuple(parts) if num_layers == len(parts) else (FUSED_SHARED_UP_MODULE,)
    sizes = equal_parts(sum(parts.values()), num_layers)
    down = (SHARED_DOWN, (names.shared_down,), (hidden_size,), traits.shared_size)
    groups |= {
        SHARED_UP: group(SHARED_UP, names.shared_up, sizes, hidden_size, modules, parts=parts),
        SHARED_DOWN: group(*down, (SHARED_DOWN_MODULE,)),
    }
    if names.shared_gate:
        one = (SHARED_GATE, (names.shared_gate,), (1,), hidden_size)
        groups[SHARED_GATE] = group(*one, (SHARED_GATE_MODULE,))
    return groups
