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
}
"""Parts of fused layers, in the order of their outputs, by Hugging Face's names."""


def other_layout(module: str) -> tuple[str, ...]:
    """Return the parts of a fused layer, or the fused layers that a layer may be a part of."""
    wholes = tuple(whole for whole, parts in FUSED_MODULES.items() if module in parts)
    return FUSED_MODULES.get(module, wholes)


class BaseShapes(msgspec.Struct, frozen=True):
    num_layers: int
    modules: dict[str, tuple[int, int]]
    """(in_features, out_features) of each adaptable linear layer of a decoder layer."""
    vocab_size: int = 0
    """Vocabulary size; 0 if only linear layers of decoder layers may be adapted, only by LoRA."""
    hidden_size: int = 0
    biased_modules: tuple[str, ...] = ()
    """Linear layers that have a bias; lm_head, too."""
    paths: dict[str, str] = {}
    """Hugging Face path of each module, with {} for the layer and {expert} for the expert.

    Empty: Llama's and GPT-2's.
    """
    fused: dict[str, dict[str, int]] = {}
    """Outputs of the parts of a fused linear layer, in order: qkv_proj's q_proj, k_proj, v_proj."""
    adapts_ends: bool = True
    """Whether the embedding and the output layer can be adapted."""
    ties_embeddings: bool = False
    """Whether lm_head's weight is the token embedding's."""
    enabled_modules: tuple[str, ...] | None = None
    """Modules that adapters may change, if the operator restricts them; empty: no adapters."""
    num_experts: dict[str, int] = {}
    """Number of experts by module, of modules that have experts."""
    module_layers: dict[str, tuple[int, ...]] = {}
    """Layers that have a module, of modules that not all layers have."""
    has_transposed_experts: bool = False
    """Whether transformers has the experts' weights as [experts, in, out], not [.., out, in]."""
    has_interleaved_experts: bool = False
    """Whether the outputs of gate and up alternate in transformers' gate_up_proj of experts."""
    architecture: str = ""
    """Hugging Face's name of the model's class, such as LlamaForCausalLM; empty if unknown."""
    head_dim: int = 1
    """Outputs of q_proj and k_proj for one head, by which GGUF files order their rows."""
    stored_format: str = ""
    """Format of weights that are stored quantised, such as gptq; empty: they are not."""
    expert_lora_layout: tuple[ExpertLoraLayout, ...] = ()
    """The operator's words about LoRA of experts whose files can be read in more than one way."""

    def enables(self, module: str) -> bool:
        """Whether adapters may change a module. Embedding and head go with any linear layer."""
        if self.enabled_modules is None:
            return True
        return module in self.enabled_modules if module in self.modules else self.is_adaptable

    def names_module(self, path: str, module: str) -> bool:
        """Whether a path of an adapter ends as that of the base's module does.

        A module's name that is not the end of its path, such as router, stands for other paths too.
        """
        own = self.paths.get(module, "")
        is_end = own.endswith(f".{module}")
        return not is_end or f".{path}".endswith("." + own.partition("{}.")[2])

    def has_module(self, layer: int, module: str) -> bool:
        """Whether a decoder layer has an adaptable linear layer of this name."""
        layers = self.module_layers.get(module)
        return module in self.modules and (layers is None or layer in layers)

    def of_layers(self) -> list[dict[str, tuple[int, int]]]:
        """Return the modules of each decoder layer, with their shapes."""
        return [
            {
                module: features
                for module, features in self.modules.items()
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
        return max((sum(features) for features in self.modules.values()), default=0)
