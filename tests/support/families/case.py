"""Tiny configuration of a model family, with the names that adapters of the family have."""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

VOCAB_SIZE = 97
LLAMA_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_PARAMETER_SCALE = 0.3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FamilyCase:
    config: Callable[[], PretrainedConfig]
    linears: tuple[str, ...] = LLAMA_LINEARS
    """Last names of all linear layers of a decoder layer."""
    outer_linears: tuple[str, ...] = ()
    """Last names of linear layers outside the decoder layers that adapters may change."""
    parameters: tuple[str, ...] = ()
    """Last names of a decoder layer's weights that are no linear layer's in transformers."""
    scope: str = r".*\."
    """Regular expression for what precedes the number of a decoder layer in a module's path."""
    model_class: Any = AutoModelForCausalLM
    attention: str = "eager"
    """Implementation that transformers takes."""
    embedding_factor: float = 1.0
    """What the random embedding is multiplied by: the larger, the more tokens differ."""
    is_quick: bool = False
    """Whether `make test` runs it, on one backend. The others run in CI only."""
    prepare: Callable[[Any], None] | None = None
    """Changes a random model before it is saved."""
    convert: Callable[[Path], None] | None = None
    """Rewrites a saved checkpoint or adapter, for families that transformers has no class of."""

    def targets(self, layer: str, linears: tuple[str, ...]) -> str:
        """Return what PEFT finds linear layers of decoder layers by. layer: regular expression."""
        return rf"{self.scope}{layer}\.(?:.*\.)?({'|'.join(linears)})"

    @property
    def all_targets(self) -> str:
        """What PEFT finds all linear layers by."""
        outer = [rf"|.*\.{name}" for name in self.outer_linears]
        return self.targets(r"\d+", self.linears) + "".join(outer)

    def save(self, folder: Path) -> Any:
        """Save a random model, and return that of transformers."""
        torch.default_generator.manual_seed(0)
        model = self.model_class.from_config(
            self.config(), attn_implementation=self.attention, experts_implementation="eager"
        )
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(_PARAMETER_SCALE * torch.randn_like(parameter))
            model.get_input_embeddings().weight.mul_(self.embedding_factor)
            if self.prepare is not None:
                self.prepare(model)
        model.tie_weights()
        model.save_pretrained(folder)
        if self.convert is not None:
            self.convert(folder)
        return model.eval()


def parameters(cases: Mapping[str, FamilyCase], quick: Collection[str]) -> list[Any]:
    """Return names of cases: `make test` runs those in `quick`, CI also one of each family, and
    `make soak` the others.
    """

    def marks(name: str) -> tuple[pytest.MarkDecorator, ...]:
        if name in quick:
            return ()
        return (pytest.mark.slow if cases[name].is_quick else pytest.mark.soak,)

    return [pytest.param(name, marks=marks(name)) for name in cases]


def sizes(**changes: Any) -> dict[str, Any]:
    """Fields that most configurations take."""
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "bos_token_id": None,
        "eos_token_id": None,
    } | changes
