"""Shapes of a base model that adapters are checked against."""

from collections.abc import Mapping
from typing import Final

import msgspec

from loraplex.core.adapter import ExpertLoraLayout

NO_MODULE = "no module: it is served without LoRA (enable_lora, or a build without lora_plugin)"
"""Text after "can be adapted in" where adapters are off."""


_QKV: Final = ("q_proj", "k_proj", "v_proj")
FUSED_MODULES: Final[Mapping[str, tuple[str, ...]]] = {
    "qkv_proj": _QKV,
    "W_pack": _QKV,
    "gate_up_proj": ("gate_proj", "up_proj"),
    "shared_expert.gate_up_proj": ("shared_expert.gate_proj", "shared_expert.up_proj"),
    # SGLang's of Qwen3.5. Qwen3-Next's own layers of these names have another order.
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}
"""Parts of fused layers, in the order of their outputs, by Hugging Face's names."""


def other_layout(module: str) -> tuple[str, ...]:
    """Return the parts of a fused layer, or the fused layers that a layer may be a part of."""
    wholes = tuple(whole for whole, parts in FUSED_MODULES.items() if module in parts)
    return FUSED_MODULES.get(module, wholes)


class LayerShapes(msgspec.Struct, frozen=True):
    """Adaptable linear layers of one decoder layer."""

    modules: dict[str, tuple[int, int]]
    num_experts: dict[str, int] = {}
    biased_modules: tuple[str, ...] = ()
    paths: dict[str, str] = {}
    fused: dict[str, dict[str, int]] = {}
    head_dim: int = 1
    split_heads: dict[str, int] = {}


class BaseShapes(msgspec.Struct, frozen=True):
    """What adapters are checked against. Read what is of a layer through `layer`."""

    num_layers: int
    modules: dict[str, tuple[int, int]]
    """(in_features, out_features) of each linear layer that any decoder layer has.

    These and the other fields of LayerShapes are those of all layers without an entry in
    `own_layers`: a description of each layer of equal ones would be sent with every adapter.
    """
    vocab_size: int = 0
    """Vocabulary size; 0 if only linear layers of decoder layers may be adapted, only by LoRA."""
    hidden_size: int = 0
    biased_modules: tuple[str, ...] = ()
    """Linear layers that have a bias; lm_head, too."""
    paths: dict[str, str] = {}
    """Hugging Face path of each module, with {} for the layer and {expert} for the expert.

    Empty: Llama's and GPT-2's.
    """
    end_paths: dict[str, tuple[str, ...]] = {}
    """Paths that embed_tokens and lm_head may have in checkpoints; empty: Llama's."""
    fused: dict[str, dict[str, int]] = {}
    """Outputs of the parts of a fused linear layer, in order: qkv_proj's q_proj, k_proj, v_proj."""
    adapts_ends: bool = True
    """Whether the embedding and the output layer can be adapted."""
    score_size: int = 0
    """Inputs of a classification head; 0: adapters may bring none."""
    ties_embeddings: bool = False
    """Whether lm_head's weight is the token embedding's."""
    enabled_modules: tuple[str, ...] | None = None
    """Modules that adapters may change, if the operator restricts them; empty: no adapters."""
    num_experts: dict[str, int] = {}
    """Number of experts by module, of modules that have experts."""
    module_layers: dict[str, tuple[int, ...]] = {}
    """Layers that have a module, of modules that not all layers have."""
    unread_layers: dict[str, tuple[int, ...]] = {}
    """Layers whose module changes nothing, though adapters may have it: k_proj and v_proj where a
    layer reads the keys and values of another one."""
    has_transposed_experts: bool = False
    """Whether transformers has the experts' weights as [experts, in, out], not [.., out, in]."""
    has_interleaved_experts: bool = False
    """Whether the outputs of gate and up alternate in transformers' gate_up_proj of experts."""
    architecture: str = ""
    """Hugging Face's name of the model's class, such as LlamaForCausalLM; empty if unknown."""
    head_dim: int = 1
    """Outputs of q_proj and k_proj for one head, by which GGUF files order their rows."""
    split_heads: dict[str, int] = {}
    """Number of heads of a fused linear layer that has all parts of a head side by side, and then
    those of the next head."""
    num_key_heads: int = 0
    """Key heads of delta rules, by which GGUF files order values; 0: no layer has one."""
    stored_format: str = ""
    """Format of weights that are stored quantised, such as gptq; empty: they are not."""
    own_layers: dict[int, LayerShapes] = {}
    """Layers with a module that has another shape, or is another one, under its name."""
    expert_lora_layout: tuple[ExpertLoraLayout, ...] = ()
    """The operator's words about LoRA of experts whose files can be read in more than one way."""

    def enables(self, module: str) -> bool:
        """Whether adapters may change a module. Embedding and head go with any linear layer."""
        if self.enabled_modules is None:
            return True
        return module in self.enabled_modules if module in self.modules else self.is_adaptable

    def names_module(self, path: str, layer: int, module: str) -> bool:
        """Whether a path of an adapter ends as that of the layer's module does.

        A module's name that is not the end of its path, such as router, stands for other paths too.
        """
        own = self.layer(layer).paths.get(module, "")
        is_end = own.endswith(f".{module}")
        inner = own.partition("{}.")[2] or module  # a path outside layers has no number
        return not is_end or f".{path}".endswith(f".{inner}")

    def has_module(self, layer: int, module: str) -> bool:
        """Whether a decoder layer has an adaptable linear layer of this name."""
        layers = self.module_layers.get(module)
        is_there = layers is None or layer in layers
        return is_there and module in self.layer(layer).modules

    def leaves_out(self, layer: int | None, module: str) -> bool:
        """Whether nothing depends on a module that adapters may have."""
        return layer in self.unread_layers.get(module, ())

    def layer(self, layer: int) -> LayerShapes:
        """Return the shapes of a layer, and maybe of modules that it lacks (`has_module`)."""
        if layer in self.own_layers:
            return self.own_layers[layer]
        sizes = (self.modules, self.num_experts, self.biased_modules)
        return LayerShapes(*sizes, self.paths, self.fused, self.head_dim, self.split_heads)

    def is_biased(self, layer: int | None, module: str) -> bool:
        """Whether a module of a layer has a bias. layer: None: it is outside the layers."""
        return module in (self if layer is None else self.layer(layer)).biased_modules

    @property
    def layer_forms(self) -> tuple[LayerShapes, ...]:
        """Each different form of layers; the usual one is first."""
        return (self.layer(-1), *self.own_layers.values())

    def of_layers(self) -> list[dict[str, tuple[int, int]]]:
        """Return the modules of each decoder layer, with their shapes."""
        return [
            {
                module: features
                for module, features in self.layer(layer).modules.items()
                if self.has_module(layer, module)
            }
            for layer in range(self.num_layers)
        ]

    @property
    def is_adaptable(self) -> bool:
        return self.enabled_modules is None or bool(self.enabled_modules)

    @property
    def largest_target(self) -> int:
        """Largest in_features + out_features of a linear layer."""
        forms = (self.modules, *(layer.modules for layer in self.own_layers.values()))
        return max((sum(size) for form in forms for size in form.values()), default=0)
