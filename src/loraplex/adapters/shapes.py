"""What an adapter is checked against: the modules of a base model."""

import msgspec

NO_MODULE = "no module: it is served without LoRA (enable_lora, or a build without lora_plugin)"
"""What follows "can be adapted in" where adapters are off."""


class BaseShapes(msgspec.Struct, frozen=True):
    num_layers: int
    modules: dict[str, tuple[int, int]]
    """(in_features, out_features) of every linear layer of a decoder layer that may be adapted."""
    vocab_size: int = 0
    """0: only the linear layers of the decoder layers may be adapted, and only by LoRA."""
    hidden_size: int = 0
    biased_modules: tuple[str, ...] = ()
    """The linear layers that have a bias."""
    ties_embeddings: bool = False
    """lm_head's weight is the token embedding's."""
    enabled_modules: tuple[str, ...] | None = None
    """The modules that adapters may change, if the operator restricts them; empty: no adapters."""

    def enables(self, module: str) -> bool:
        """module: a linear layer, or an end of the model; ends go with any linear layer."""
        if self.enabled_modules is None:
            return True
        return module in self.enabled_modules if module in self.modules else self.is_adaptable

    @property
    def is_adaptable(self) -> bool:
        return self.enabled_modules is None or bool(self.enabled_modules)

    @property
    def largest_target(self) -> int:
        """in_features + out_features of the largest linear layer."""
        return max((sum(features) for features in self.modules.values()), default=0)
