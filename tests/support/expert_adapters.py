"""Adapters of models with experts, and a transformers model that they are merged into.

Needs the `dev` extra: nothing that serves imports this file.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from loraplex.core.adapter import LoraTarget
from loraplex.execution.adapters.host_adapters import HostAdapter, HostWeight
from loraplex.models.spec import ModelSpec

RankOf = Callable[[int, str, int], int]
"""Rank of an adapter by layer, module and expert; 0: none."""
ScaledAdapters = Sequence[tuple[HostAdapter, float]]
_STRENGTH = 0.4


def random_expert_adapter(spec: ModelSpec, digest: str, rank_of: RankOf, seed: int) -> HostAdapter:
    generator = torch.Generator().manual_seed(seed)
    weights = [
        HostWeight(
            LoraTarget(layer, module, rank, num_in, num_out, expert=expert),
            torch.randn(rank, num_in, generator=generator) / num_in**0.5,
            torch.randn(num_out, rank, generator=generator) / rank**0.5,
            _STRENGTH,
        )
        for layer, shapes in enumerate(spec.module_shapes)
        for module, (num_in, num_out) in shapes.items()
        for expert in range(spec.num_experts[layer].get(module, 1))
        if (rank := rank_of(layer, module, expert))
    ]
    return HostAdapter(digest, tuple(sorted(weights, key=lambda weight: weight.target)))


@contextlib.contextmanager
def merged(model: Any, adapters: ScaledAdapters) -> Iterator[Any]:
    """Add the adapters to the weights of a model of transformers for the time of the block."""
    state = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for adapter, scale in adapters:
            for weight in adapter.weights:
                changed = _weight_of(model.model.layers[weight.target.layer], weight.target)
                changed += scale * weight.scale * weight.b @ weight.a
    try:
        yield model
    finally:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(state[name])


_SHARED_OF_GRANITE = {
    "shared_expert.gate_up_proj": "input_linear",
    "shared_expert.down_proj": "output_linear",
}


def _weight_of(layer: Any, target: LoraTarget) -> torch.Tensor:
    """Return a view of the parameter [out, in]."""
    name = target.module
    part = layer.mlp if hasattr(layer, "mlp") else layer.block_sparse_moe
    if name in {"q_proj", "k_proj", "v_proj", "o_proj"}:
        part = layer.self_attn
    elif hasattr(layer, "experts") and name == "router":  # Gemma 4
        part, name = layer.router, "proj"
    elif name == "router":
        name = "router" if hasattr(part, "router") else "gate"
    elif name.startswith("experts."):
        experts = getattr(layer, "experts", None) or part.experts
        return _weight_of_expert(experts, name.removeprefix("experts."), target.expert)
    elif hasattr(layer, "shared_mlp"):
        part, name = layer.shared_mlp, _SHARED_OF_GRANITE[name]
    return part.get_submodule(name).weight  # type: ignore[no-any-return]


def _weight_of_expert(experts: Any, name: str, expert: int) -> torch.Tensor:
    is_transposed = hasattr(experts, "gate_up_proj_bias")  # GPT-OSS, which interleaves, too
    stacked = experts.down_proj if name == "down_proj" else experts.gate_up_proj
    weight: torch.Tensor = stacked[expert].T if is_transposed else stacked[expert]
    if name == "down_proj":
        return weight
    gate, up = (weight[::2], weight[1::2]) if is_transposed else weight.chunk(2)
    return gate if name == "gate_proj" else up
