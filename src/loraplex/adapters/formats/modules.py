"""LoRA modules of TensorRT-LLM by number, and the Hugging Face layers that each one contains.

Numbers and names are those of TensorRT-LLM's loraModule.h, from 22 on of its LoraModuleType. For
gated MLPs mlp_h_to_4h (5) is gate_proj, the activated branch, and mlp_gate (7) is up_proj: all
converters write them so, though TensorRT-LLM's documentation describes the two the other way round.
So it is for experts (13, 15).

A layer is called by its last name; those of GPT-2, two of which are c_proj, by attn.c_proj etc.,
and those of layers with experts by one name for all families (`_EXPERT_PATHS`).
"""

import dataclasses
import itertools
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Final

from loraplex.adapters.shapes import FUSED_MODULES
from loraplex.core.errors import ConfigError

ROUTER: Final = "router"
EXPERT_MODULES: Final = ("experts.gate_proj", "experts.up_proj", "experts.down_proj")
"""Modules of which each expert has its own."""
_SHARED: Final = "shared_expert."
_IN: Final = "in_proj"
_OUT: Final = "out_proj"
"""Attention's in some families. In a layer with one of `_RECURRENT_INPUTS` it is the mixer's."""
_RECURRENT_INPUTS: Final = (_IN, "in_proj_qkv", "in_proj_qkvz")
_CROSS: Final = "cross_attn."
"""How the names of cross attention's linear layers begin."""
_DENSE_MLP: Final = (5, 6, 7, 18)
"""Modules of a dense MLP by id."""
_EXPERT_PATHS: Final[Mapping[str, str]] = MappingProxyType(
    {
        ROUTER: "mlp.gate",
        **{module: f"mlp.{module.replace('.', '.{expert}.')}" for module in EXPERT_MODULES},
        "experts.gate_up_proj": "mlp.experts.{expert}.gate_up_proj",
        "shared_expert.gate_proj": "mlp.shared_expert.gate_proj",
        "shared_expert.up_proj": "mlp.shared_expert.up_proj",
        "shared_expert.gate_up_proj": "mlp.shared_expert.gate_up_proj",
        "shared_expert.down_proj": "mlp.shared_expert.down_proj",
        "shared_expert_gate": "mlp.shared_expert_gate",
    }
)
"""Paths in Qwen's families of what a layer with experts has."""


@dataclasses.dataclass(frozen=True, slots=True)
class LoraModule:
    """LoRA module of TensorRT-LLM."""

    id: int
    name: str
    parts: tuple[str, ...] = ()
    """Hugging Face layers in it, in the order of B's rows; they share A. Empty for a module
    that no served model has."""
    wholes: tuple[str, ...] = ()
    """Names that other families have for a single layer that is the whole module."""

    @property
    def shared_parts(self) -> tuple[str, ...]:
        """Layers of the shared expert that it contains where a layer has no dense MLP."""
        return tuple(_SHARED + part for part in self.parts) if self.id in _DENSE_MLP else ()

    def parts_in(self, modules: Container[str]) -> tuple[str, ...]:
        """Return which of a layer's linear layers form the module; empty if one is missing."""
        if self.parts == (_OUT,) and _IN not in modules:
            return ()
        is_recurrent = any(name in modules for name in _RECURRENT_INPUTS)
        wholes = (name for name in self.wholes if not (is_recurrent and name == _OUT))
        whole = next((name for name in wholes if name in modules), None)
        if whole is not None:
            return (whole,)
        for parts in (self.parts, self.shared_parts):
            if parts and all(part in modules for part in parts):
                return parts
        return ()


def _modules() -> tuple[LoraModule, ...]:
    named: list[tuple[str, tuple[str, ...]]] = [
        ("attn_qkv", ("q_proj", "k_proj", "v_proj")),
        ("attn_q", ("q_proj",)),
        ("attn_k", ("k_proj",)),
        ("attn_v", ("v_proj",)),
        ("attn_dense", ("o_proj",)),
        ("mlp_h_to_4h", ("gate_proj",)),
        ("mlp_4h_to_h", ("down_proj",)),
        ("mlp_gate", ("up_proj",)),
        ("cross_attn_qkv", tuple(f"{_CROSS}{name}_proj" for name in "qkv")),
        ("cross_attn_q", (f"{_CROSS}q_proj",)),
        ("cross_attn_k", (f"{_CROSS}k_proj",)),
        ("cross_attn_v", (f"{_CROSS}v_proj",)),
        ("cross_attn_dense", (f"{_CROSS}o_proj",)),
        ("moe_h_to_4h", ("experts.gate_proj",)),
        ("moe_4h_to_h", ("experts.down_proj",)),
        ("moe_gate", ("experts.up_proj",)),
        ("moe_router", ("router",)),
        ("mlp_router", ("shared_expert_gate",)),
        # Hugging Face's gate_up_proj has the gate first.
        ("mlp_gate_up", ("up_proj", "gate_proj")),
        ("shared_expert_h_to_4h", ("shared_expert.gate_proj",)),
        ("shared_expert_4h_to_h", ("shared_expert.down_proj",)),
        ("shared_expert_gate", ("shared_expert.up_proj",)),
        ("mamba_in_proj", (_IN,)),
        ("mamba_out_proj", (_OUT,)),
        ("moe_latent_fc1", ("fc1_latent_proj",)),
        ("moe_latent_fc2", ("fc2_latent_proj",)),
    ]
    wholes = {
        "attn_qkv": ("attn.c_attn",),
        "attn_dense": ("attn.c_proj", "dense", _OUT, "wo"),
        "mlp_h_to_4h": ("mlp.c_fc", "c_fc", "fc1", "fc_in", "dense_h_to_4h", "w1"),
        "mlp_4h_to_h": ("mlp.c_proj", "c_proj", "fc2", "fc_out", "dense_4h_to_h", "w2"),
        "mlp_gate": ("w3",),
        "cross_attn_dense": (f"{_CROSS}{_OUT}",),
    }
    return tuple(
        LoraModule(index, name, parts, wholes.get(name, ()))
        for index, (name, parts) in enumerate(named)
    )


LORA_MODULES = _modules()
"""LoRA modules by id."""

_FUSED: Final = {
    "qkv_proj": "attn_qkv",
    "W_pack": "attn_qkv",
    "gate_up_proj": "mlp_gate_up",
}
"""Fused layers whose outputs lie in the order of the module's parts, or with two halves swapped."""
_ATTENTION_PARENTS: Final = (
    *("self_attn", "self_attention", "attention", "attn", "mixer"),
    *("SelfAttention", "encoder_attn", "EncDecAttention"),
)
_MLP_PARENTS: Final = ("mlp", "feed_forward", "mixer", "DenseReluDense")
_RECURRENT_PARENTS: Final = ("mamba", "mixer", "conv")


def _holders() -> Mapping[str, LoraModule]:
    """Return the module that contains exactly one Hugging Face layer, by the layer's name."""
    by_name = {module.name: module for module in LORA_MODULES}
    holders = {layer: by_name[name] for layer, name in _FUSED.items()}
    for module in LORA_MODULES:
        single = module.parts if len(module.parts) == 1 else ()
        holders |= dict.fromkeys((*single, *module.wholes), module)
    holders[_OUT] = by_name["attn_dense"]
    return MappingProxyType(holders)


_HOLDERS: Final = _holders()


def is_of_experts(module: str) -> bool:
    """Whether only layers with experts have a linear layer of this name."""
    return module in _EXPERT_PATHS


def module_of(parent: str, hf_module: str) -> LoraModule | None:
    """Return the module that is the Hugging Face layer `parent`.`hf_module`; None if there is none.

    parent: the last part of the path before the layer's name; a number for OPT's fc1 and fc2.
    """
    if hf_module in (_IN, _OUT) and parent in _RECURRENT_PARENTS:
        name = "mamba_in_proj" if hf_module == _IN else "mamba_out_proj"
        return next(module for module in LORA_MODULES if module.name == name)
    module = _HOLDERS.get(hf_module)
    if module is None or "." in hf_module or hf_module in _EXPERT_PATHS:
        return module  # a name of one layer only
    if module.id in _DENSE_MLP:
        return module if parent in _MLP_PARENTS or parent.isdigit() else None
    return module if parent in _ATTENTION_PARENTS else None


def hf_modules(
    names: Iterable[str], modules: Collection[str], paths: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """Return the model's modules, each once, for names of either naming scheme.

    A name means every module whose name or path ends with it: c_proj both of GPT-2's; gate_proj
    that of a dense layer, of the experts and of the shared expert; gate the router. TensorRT-LLM's
    names of a dense MLP mean the shared expert, too. Raises ConfigError for a name of neither
    scheme.
    """
    known: dict[str, dict[str, None]] = {}
    for lora_module in LORA_MODULES:
        known[lora_module.name] = dict.fromkeys(_enabled_by(lora_module, modules))
    for part in (part for lora_module in LORA_MODULES for part in lora_module.parts):
        known.setdefault(part, {})
    for module in modules:
        own, common = (paths or {}).get(module, ""), _EXPERT_PATHS.get(module, "")
        inner = (module, own.partition("{}.")[2], common)
        for name in itertools.chain.from_iterable(map(_endings, inner)):
            known.setdefault(name, {})[module] = None
    found: dict[str, None] = {}
    for name in names:
        if name not in known:
            listed = ", ".join(name for name in known if known[name] and "." not in name)
            raise ConfigError(
                f"lora_target_modules: there is no module {name!r}; there are {listed}"
            )
        found |= known[name]
    return tuple(found)


def _enabled_by(module: LoraModule, modules: Collection[str]) -> Iterator[str]:
    """Yield the layers of a model that TensorRT-LLM's name of a module enables."""
    yield from module.parts_in(modules)
    parts = (*module.parts, *module.shared_parts)
    yield from (part for part in module.shared_parts if part in modules)
    for fused, of_fused in FUSED_MODULES.items():
        if fused in modules and any(part in parts for part in of_fused):
            yield fused


def _endings(path: str) -> tuple[str, ...]:
    """Return a path within a layer without its first 0, 1, 2, ... parts and the expert."""
    parts = path.replace("{expert}.", "").split(".")
    return tuple(".".join(parts[first:]) for first in range(len(parts)) if path)


def linear_path(layer: int, module: str, parent: str = "") -> str:
    """Return the full name, in a causal LM, of a decoder layer's linear layer.

    Of an expert's it has {expert} for the number. parent: the last part before the layer's name;
    the default is that of Llama.
    """
    if module in _EXPERT_PATHS:
        return f"model.layers.{layer}.{_EXPERT_PATHS[module]}"
    if "." in module:
        return f"transformer.h.{layer}.{module}"
    if not parent:
        holder = _HOLDERS.get(module)
        is_of_mlp = holder is not None and holder.id in _DENSE_MLP
        parent = (_MLP_PARENTS if is_of_mlp else _ATTENTION_PARENTS)[0]
    return f"model.layers.{layer}.{parent}.{module}"
