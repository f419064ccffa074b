"""Tensors of a GGUF file under their Hugging Face names, in the order of Hugging Face's rows."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from loraplex.core.gguf import read_gguf
from loraplex.core.gguf_names import family_of, hugging_face_name
from loraplex.execution.weights.quantized.gguf_blocks import decoded_blocks
from loraplex.execution.weights.quantized.stored_weight import StoredWeight
from loraplex.models.spec import ModelSpec


class GgufWeights:
    """Implements `TensorFile`."""

    def __init__(self, path: Path, spec: ModelSpec) -> None:
        """Raises ConfigError, UnsupportedModelError."""
        self.path = path
        self._file = read_gguf(path)
        self._family = family_of(self._file)
        self._head_dims = {
            path: group.head_dim
            for layer in spec.layers
            for group in layer.linears.values()
            for path in group.paths
        }
        self._tensors = {
            name: tensor
            for tensor in self._file.tensors
            if (name := hugging_face_name(self._file, tensor)) is not None
        }
        self.names: Sequence[str] = list(self._tensors)

    def __enter__(self) -> "GgufWeights":
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Nothing is open between reads."""

    def tensor(self, name: str) -> Any:
        """Return a tensor; a quantised weight as float32."""
        stored = self._read(name)
        tensor = stored.decoded() if isinstance(stored, StoredWeight) else stored
        is_norm = name.endswith("norm.weight")
        return tensor.float() + self._family.norm_offset if is_norm else tensor

    def stored(self, name: str) -> StoredWeight | None:
        """Return a quantised weight, but for the order of its rows as it is; None for others."""
        found = self._read(name)
        return found if isinstance(found, StoredWeight) else None

    def _read(self, name: str) -> torch.Tensor | StoredWeight:
        own = self._tensors[name]
        described = self._file.tensors[own]
        found = decoded_blocks(
            f"{described.path}: {own}", self._file.bytes_of(own), described.kind, described.shape
        )
        head_dim = self._head_dims.get(name.rpartition(".")[0])
        if head_dim is None:
            return found  # has no heads, whose rows could have another order
        rows = self._family.file_rows(name, described.shape[0], head_dim)
        if rows is None:
            return found
        if isinstance(found, StoredWeight):
            return found.rows(lambda tensor: tensor[rows])
        return found[rows]
