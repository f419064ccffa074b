"""TensorRT-LLM's numbered LoRA modules, and which Hugging Face layers each of them holds.

Numbers and names as in TensorRT-LLM's loraModule.h. For gated MLPs mlp_h_to_4h (5) is gate_proj,
the activated branch, and mlp_gate (7) is up_proj: so do all converters write them, though the prose
of TensorRT-LLM's documentation describes the two the other way round. Knows names only.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class LoraModule:
    """One module id."""

    id: int
    name: str
    parts: tuple[str, ...] = ()
    """The Hugging Face layers in it, in the order of B's rows; A is one for all. Empty: a module
    that no model served here has."""


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
    return tuple(LoraModule(index, name, parts) for index, (name, parts) in enumerate(named))


LORA_MODULES = _modules()
"""By id."""

_IDS_BY_PATH = {
    ("self_attn", "qkv_proj"): 0,
    ("self_attn", "q_proj"): 1,
    ("self_attn", "k_proj"): 2,
    ("self_attn", "v_proj"): 3,
    ("self_attn", "o_proj"): 4,
    ("self_attn", "dense"): 4,
    ("mlp", "gate_proj"): 5,
    ("mlp", "c_fc"): 5,
    ("mlp", "down_proj"): 6,
    ("mlp", "c_proj"): 6,
    ("mlp", "up_proj"): 7,
    ("mlp", "gate_up_proj"): 18,
}


def module_of(parent: str, hf_module: str) -> LoraModule | None:
    """The module that holds the Hugging Face layer `parent`.`hf_module`; None if none does."""
    index = _IDS_BY_PATH.get((parent, hf_module))
    return None if index is None else LORA_MODULES[index]


def parent_of(hf_module: str) -> str:
    """Where in a decoder layer a part of a LoraModule is: self_attn or mlp."""
    return next(parent for parent, module in _IDS_BY_PATH if module == hf_module)
