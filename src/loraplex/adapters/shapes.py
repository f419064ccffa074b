"""Shapes of a base model that adapters are checked against."""

import msgspec

NO_MODULE = "no module: it is served without LoRA (enable_lora, or a build without lora_plugin)"
"""Text after "can be adapted in" where adapters are off."""


class BaseShapes(msgspec.Struct, frozen=True):
    num_layers: int
    modules: dict[str, tuple[int, int]]
    """(in_features, out_features) of each adaptable linear layer of a decoder layer."""
    vocab_size: int = 0
    """Vocabulary size; 0 if only linear layers of decoder layers may be adapted, only by LoRA."""
    hidden_size: int = 0
    biased_modules: tuple[str, ...] = ()
    """Linear layers that have a bias."""
    ties_embeddings: bool = False
    """Whether lm_head's weight is the token embedding's."""
    enabled_modules: tuple[str, ...] | None = None
    """Modules that adapters may change, if the operator restricts them; empty: no adapters."""

    def enables(self, module: str) -> bool:
        """Whether adapters may change a module. Embedding and head go with any linear layer."""
        if self.enabled_modules is None:
            return True
        return module in self.enabled_modules if module in self.modules else self.is_adaptable

    @property
    def is_adaptable(self) -> bool:
        return self.enabled_modules is None or bool(self.enabled_modules)

    @property
    def largest_target(self) -> int:
        """Largest in_features + out_features of a linear layer."""
        return max((sum(features) for features in self.modules.values()), default=0)
