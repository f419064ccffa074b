"""Parser of the tensor names of a PEFT adapter: the module and the slot of each tensor.

PEFT writes base_model.model.<path of the module>.<slot>; <path> begins with a root that depends on
the class that was trained, which need not be the class that is served: all known roots are read.
Older versions and other tools leave the prefix out, keep the adapter's name in the slot
(lora_A.default.weight) or the names of torch's wrappers anywhere in the path.
"""

import enum
import re
from typing import NamedTuple

from loraplex.adapters.shapes import BaseShapes
from loraplex.core.adapter import EMBEDDING, LM_HEAD, SCORE
from loraplex.core.module_names import without_wrappers


class PeftSlot(enum.Enum):
    """Role of a tensor in its module. The value is its name in messages."""

    A = "lora_A"
    B = "lora_B"
    B_BIAS = "lora_B.bias"
    MAGNITUDE = "lora_magnitude_vector"
    WEIGHT = "weight"
    """Trained copy of the module (modules_to_save), or a tensor of the module itself."""
    BIAS = "bias"
    BASE_WEIGHT = "base_layer.weight"
    """The base's own weight, which PEFT saves with LoRA of an embedding, or with any change of one
    that was resized, and loads again."""
    BASE_BIAS = "base_layer.bias"
    TOKENS = "trainable_tokens_delta"


class TensorName(NamedTuple):
    """Parsed tensor name."""

    path: str
    """Module path that adapter_config.json matches: model.layers.0.self_attn.q_proj."""
    layer: int | None
    module: str
    """Last part of the path; with its parent for GPT-2, which has two layers called c_proj.

    embed_tokens, lm_head, score and the parts of layers with experts whatever the family calls
    them.
    """
    expert: int | None
    slot: PeftSlot

    @property
    def is_stacked(self) -> bool:
        """Whether the tensor is of all experts."""
        return self.expert is None and self.module.partition(".")[0] == OUTER_STACK


FINAL_NORM = "norm"
NORMS = ("input_layernorm", "post_attention_layernorm", "q_norm", "k_norm")
"""Modules of a decoder layer."""

_ROOTS = (
    *("", "model.", "model.model.", "transformer.", "gpt_neox.", "decoder.", "model.decoder."),
    *("language_model.", "language_model.model.", "model.language_model."),
    *("model.language_model.model.", "backbone.", "model.backbone."),
)
"""Paths from the class that was trained to the decoder: of causal LMs and multimodal wrappers."""
_PARENTS = (
    *("self_attn", "self_attention", "attention", "attn", "mlp", "feed_forward"),
    *("linear_attn", "mamba", "mixer", "conv"),
)
_CONVOLUTIONS = ("conv1d", "conv")
"""Convolutions of layers, whose LoRA is not served."""
_EXPERT_MODULES = {
    **{name: f"experts.{name}" for name in ("gate_proj", "up_proj", "down_proj")},
    "w1": "experts.gate_proj",
    "w3": "experts.up_proj",
    "w2": "experts.down_proj",
}
"""Canonical names of an expert's linear layers, by all that files have."""
OUTER_STACK = "experts"
INNER_STACK = "experts.base_layer"
GATE_UP_STACK = "experts.gate_up_proj"
_STACKS = {
    OUTER_STACK: OUTER_STACK,
    INNER_STACK: INNER_STACK,
    GATE_UP_STACK: GATE_UP_STACK,
    **{f"experts.{name}": module for name, module in _EXPERT_MODULES.items()},
    "input_linear": GATE_UP_STACK,
    "output_linear": "experts.down_proj",
}
"""Modules that have tensors of all experts, by all names that files have.

PEFT wraps the module of a parameter once for each target: the names of two targets of one module
are those of the wrappers, whatever the parameters are called.
"""
_BESIDE_EXPERTS = {
    "gate": "router",
    "router": "router",
    "router.layer": "router",
    "router.proj": "router",
    "shared_expert_gate": "shared_expert_gate",
    "shared_mlp.input_linear": "shared_expert.gate_up_proj",
    "shared_mlp.output_linear": "shared_expert.down_proj",
    **{
        f"{parent}.{part}": f"shared_expert.{part}"
        for parent in ("shared_expert", "shared_experts")
        for part in ("gate_proj", "up_proj", "down_proj", "gate_up_proj")
    },
}
"""Canonical names of the other modules of a layer with experts, by all that files have."""
_EMBEDDINGS = (
    EMBEDDING,
    "wte",
    "word_embeddings",
    "embed_in",
    "tok_embeddings",
    "embeddings",
    "shared",
)
_HEADS = (LM_HEAD, "embed_out", "output")
CLASSIFIERS = ("classifier", SCORE)
"""Names of classification heads, both of which PEFT puts into modules_to_save."""
_OTHER_TOWERS = re.compile(
    r".*?\b(?:visual|vision_tower|vision_model|multi_modal_projector|audio_tower"
    r"|embed_vision|embed_audio|mtp)\..*"
)

OF_FIRST_LAYER = "per_layer_model_projection"
"""What makes the own inputs of all layers: a module of the first one in canonical adapters."""

_PLAIN_PATH = re.compile(
    r"(?:model\.){0,2}layers\.|(?:transformer\.)?h\.\d+\.(?:attn|mlp)\.c_|\w+$|$"
)

_STACK_PARENTS = {
    "SelfAttention": "",
    "self_attn": "",
    "EncDecAttention": "cross_attn.",
    "encoder_attn": "cross_attn.",
    "DenseReluDense": "",
}
"""How modules of encoder-decoder models begin in canonical adapters, by their parents in files."""
_STACK_MODULES = {
    "q": "q_proj",
    "k": "k_proj",
    "v": "v_proj",
    "o": "o_proj",
    "wi": "fc1",
    "wi_0": "gate_proj",
    "wi_1": "up_proj",
    "wo": "down_proj",
}
"""Canonical names of T5's linear layers; the other families' are the last names in files."""

_OF_EXPERTS = (
    r"(?:(?:mlp|block_sparse_moe|feed_forward|mixer)\.)?(?:"
    rf"experts\.(?P<expert>\d{{1,6}})\.(?P<of_expert>{'|'.join(_EXPERT_MODULES)})"
    rf"|(?P<stack>{'|'.join(map(re.escape, _STACKS))})"
    rf"|(?P<beside>{'|'.join(map(re.escape, _BESIDE_EXPERTS))}))"
)
_ROOT = "(?:" + "|".join(re.escape(root) for root in _ROOTS) + ")"
_PATH = (
    r"(?P<path>"
    r"(?:transformer\.)?h\.(?P<block>\d{1,6})\."
    r"(?P<whole>attn\.(?:c_attn|c_proj)|mlp\.(?:c_fc|c_proj))"
    r"|(?P<t5>encoder|decoder)\.block\.(?P<t5_layer>\d{1,6})\.layer\.\d\."
    rf"(?:(?P<t5_parent>{'|'.join(_STACK_PARENTS)})\.)?(?P<t5_module>\w+)"
    r"|(?:model\.)?(?P<bart>encoder)\.layers\.(?P<bart_layer>\d{1,6})\."
    rf"(?:(?P<bart_parent>{'|'.join(_STACK_PARENTS)})\.)?(?P<bart_module>\w+)"
    r"|(?:model\.)?(?P<cross>decoder)\.layers\.(?P<cross_layer>\d{1,6})\."
    r"(?P<cross_parent>encoder_attn)\.(?P<cross_module>\w+)"
    rf"|{_ROOT}(?:layers|h)\.(?P<layer>\d{{1,6}})\."
    rf"(?:{_OF_EXPERTS}|(?:(?:{'|'.join(_PARENTS)})\.)?"
    rf"(?P<inner>(?!lora_|(?:{'|'.join(_CONVOLUTIONS)})\.)\w+))"
    rf"|{_ROOT}(?:(?P<embedding>{'|'.join(_EMBEDDINGS)})|(?P<top>{FINAL_NORM})"
    rf"|(?P<first>{OF_FIRST_LAYER}))"
    rf"|(?:(?:language_)?model\.)?(?P<head>{'|'.join(_HEADS)})"
    rf"|(?P<classifier>{'|'.join(CLASSIFIERS)}))"
)
_MODULES = ("inner", "whole", "top", "first")
_STACKED = ("t5", "bart", "cross")
"""Groups of encoder-decoder models: the stack; with a suffix its layer, parent and module."""
_LAYERS = ("layer", "block", *(f"{kind}_layer" for kind in _STACKED))
_ADAPTER = r"(?:\.[^.\s]+)?"
_SLOTS = {
    PeftSlot.A: rf"(?:lora_A{_ADAPTER}\.weight|lora_embedding_A{_ADAPTER})",
    PeftSlot.B: rf"(?:lora_B{_ADAPTER}\.weight|lora_embedding_B{_ADAPTER})",
    PeftSlot.B_BIAS: rf"lora_B{_ADAPTER}\.bias",
    PeftSlot.MAGNITUDE: rf"lora_magnitude_vector(?:{_ADAPTER}\.weight|{_ADAPTER})",
    PeftSlot.WEIGHT: rf"(?:modules_to_save{_ADAPTER}\.)?weight",
    PeftSlot.BIAS: rf"(?:modules_to_save{_ADAPTER}\.)?bias",
    PeftSlot.BASE_WEIGHT: r"(?:(?:token_adapter\.)?base_layer|original_module)\.weight",
    PeftSlot.BASE_BIAS: r"(?:(?:token_adapter\.)?base_layer|original_module)\.bias",
    PeftSlot.TOKENS: rf"token_adapter\.trainable_tokens_delta{_ADAPTER}",
}
_NAME = re.compile(
    rf"(?:base_model\.model\.)?{_PATH}\.(?:"
    + "|".join(f"(?P<{slot.name}>{pattern})" for slot, pattern in _SLOTS.items())
    + ")"
)


def parse_name(name: str) -> TensorName | None:
    """Parse a name; None if it is unknown."""
    match = _NAME.fullmatch(without_wrappers(name))
    if match is None:
        return None
    slot = next(slot for slot in _SLOTS if match[slot.name])
    module = _module(match)
    is_embedding_slot = "lora_embedding_" in name
    if is_embedding_slot != (module == EMBEDDING and slot in (PeftSlot.A, PeftSlot.B)):
        return None
    layer = next((match[name] for name in _LAYERS if match[name]), "0" if match["first"] else None)
    expert = match["expert"]
    return TensorName(
        match["path"],
        None if layer is None else int(layer),
        module,
        None if expert is None else int(expert),
        slot,
    )


def _module(match: re.Match[str]) -> str:
    if match["embedding"] or match["head"]:
        return EMBEDDING if match["embedding"] else LM_HEAD
    if match["classifier"]:
        return SCORE
    if match["of_expert"]:
        return _EXPERT_MODULES[match["of_expert"]]
    if match["stack"]:
        return _STACKS[match["stack"]]
    if match["beside"]:
        return _BESIDE_EXPERTS[match["beside"]]
    for kind in _STACKED:
        if match[kind]:
            return _of_stack(match[kind], match[f"{kind}_parent"] or "", match[f"{kind}_module"])
    return next(match[part] for part in _MODULES if match[part])


def _of_stack(stack: str, parent: str, module: str) -> str:
    """Return the canonical name of a module of an encoder or a decoder."""
    prefix = "encoder." if stack == "encoder" else ""
    return prefix + _STACK_PARENTS.get(parent, "") + _STACK_MODULES.get(module, module)


def is_of_other_root(path: str) -> bool:
    """Whether a module's path is neither Llama's nor GPT-2's, nor one without a root."""
    return not _PLAIN_PATH.match(path)


def is_of_other_tower(name: str) -> bool:
    """Whether a tensor is of a part for images, sound or draft tokens alone."""
    return _OTHER_TOWERS.fullmatch(name) is not None


def is_unread(name: str, shapes: BaseShapes) -> bool:
    """Whether a tensor is of keys or values that a layer of the base does not have."""
    place = parse_name(name)
    return place is not None and shapes.leaves_out(place.layer, place.module)


def parameter_path(module_path: str) -> str:
    """Return the name of a module in a Hugging Face checkpoint, such as model.norm."""
    bare = re.sub(r"^(?:model\.)*", "", module_path)
    return bare if bare in (LM_HEAD, SCORE) else f"model.{bare}"
