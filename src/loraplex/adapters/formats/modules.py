"""LoRA modules of TensorRT-LLM by number, and the Hugging Face layers that each one contains.

Numbers and names are those of TensorRT-LLM's loraModule.h. For gated MLPs mlp_h_to_4h (5) is
gate_proj, the activated branch, and mlp_gate (7) is up_proj: all converters write them so, though
TensorRT-LLM's documentation describes the two the other way round.

A layer is called by its last name; those of GPT-2, two of which are c_proj, by attn.c_proj etc.
"""

import dataclasses
from collections.abc import Collection, Container, Iterable

from loraplex.core.errors import ConfigError


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

    def parts_in(self, modules: Container[str]) -> tuple[str, ...]:
        """Return the model's layers that form the module; empty if the model lacks one."""
        whole = next((name for name in self.wholes if name in modules), None)
        if whole is not None:
            return (whole,)
        return self.parts if all(part in modules for part in self.parts) else ()


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
        ("cross_attn_qkv", ()),
        ("cross_attn_q", ()),
        ("cross_attn_k", ()),
        ("cross_attn_v", ()),
        ("cross_attn_dense", ()),
        ("moe_h_to_4h", ()),
        ("moe_4h_to_h", ()),
        ("moe_gate", ()),
        ("moe_router", ()),
        ("mlp_router", ()),
        # Hugging Face's gate_up_proj has the gate first.
        ("mlp_gate_up", ("up_proj", "gate_proj")),
        ("shared_expert_h_to_4h", ()),
        ("shared_expert_4h_to_h", ()),
        ("shared_expert_gate", ()),
    ]
    wholes = {
        "attn_qkv": ("attn.c_attn",),
        "attn_dense": ("attn.c_proj", "dense", "out_proj", "wo"),
        "mlp_h_to_4h": ("mlp.c_fc", "c_fc", "fc1", "fc_in", "dense_h_to_4h", "w1"),
        "mlp_4h_to_h": ("mlp.c_proj", "c_proj", "fc2", "fc_out", "dense_4h_to_h", "w2"),
        "mlp_gate": ("w3",),
    }
    return tuple(
        LoraModule(index, name, parts, wholes.get(name, ()))
        for index, (name, parts) in enumerate(named)
    )


LORA_MODULES = _modules()
"""LoRA modules by id."""

_IDS_BY_PATH = {
    ("self_attn", "qkv_proj"): 0,
    ("attn", "c_attn"): 0,
    ("self_attn", "q_proj"): 1,
    ("self_attn", "k_proj"): 2,
    ("self_attn", "v_proj"): 3,
    ("self_attn", "o_proj"): 4,
    ("self_attn", "dense"): 4,
    ("attn", "c_proj"): 4,
    ("mlp", "gate_proj"): 5,
    ("mlp", "c_fc"): 5,
    ("mlp", "down_proj"): 6,
    ("mlp", "c_proj"): 6,
    ("mlp", "up_proj"): 7,
    ("mlp", "gate_up_proj"): 18,
}


def module_of(parent: str, hf_module: str) -> LoraModule | None:
    """Return the module with the Hugging Face layer `parent`.`hf_module`; None if there is none."""
    index = _IDS_BY_PATH.get((parent, hf_module))
    return None if index is None else LORA_MODULES[index]


def hf_modules(names: Iterable[str], modules: Collection[str]) -> tuple[str, ...]:
    """Return the model's modules, each once, for names of either naming scheme.

    c_proj means both of GPT-2's. Raises ConfigError for a name of neither scheme.
    """
    known = {module.name: module.parts_in(modules) for module in LORA_MODULES}
    known |= {part: () for module in LORA_MODULES for part in module.parts if part not in modules}
    for module in modules:
        known[module] = (module,)
        last = module.rpartition(".")[2]
        known[last] = tuple(other for other in modules if other.rpartition(".")[2] == last)
    found: dict[str, None] = {}
    for name in names:
        if name not in known:
            raise ConfigError(
                f"lora_target_modules: there is no module {name!r}; there are {', '.join(known)}"
            )
        found |= dict.fromkeys(known[name])
    return tuple(found)


def linear_path(layer: int, module: str, parent: str = "") -> str:
    """Return the full name, in a causal LM, of a decoder layer's linear layer.

    parent: self_attn or mlp; the default is the parent in LORA_MODULES.
    """
    if "." in module:
        return f"transformer.h.{layer}.{module}"
    parent = parent or next(parent for parent, known in _IDS_BY_PATH if known == module)
    return f"model.layers.{layer}.{parent}.{module}"
