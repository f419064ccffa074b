"""A Llama of a few thousand random weights in a folder, made without transformers."""

import json
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file

from loraplex.models.parameters import checkpoint_shapes
from loraplex.models.registry import read_config

_CONFIG: Final = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
    "max_position_embeddings": 64,
}


class TinyCheckpoint:
    """Writes config.json at once; `tensors` may be changed before they are saved."""

    def __init__(self, folder: Path, *, seed: int = 0, **changes: Any) -> None:
        """changes: fields of config.json."""
        self.folder = folder
        (folder / "config.json").write_text(json.dumps(_CONFIG | changes))
        self.config = read_config(folder)
        generator = torch.Generator().manual_seed(seed)
        self.tensors = {
            name: torch.randn(shape, generator=generator)
            for name, shape in checkpoint_shapes(self.config).items()
        }

    def save(self) -> Path:
        """Write model.safetensors; returns the folder."""
        save_file(self.tensors, self.folder / "model.safetensors")
        return self.folder
