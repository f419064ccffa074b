"""Tensors of a GGUF file under their Hugging Face names, in the order of Hugging Face's rows."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from loraplex.core.errors import ConfigError
from loraplex.execution.weights.quantized.gguf_blocks import decoded_blocks
from loraplex.execution.weights.quantized.stored_weight import StoredWeight
from loraplex.models.gguf import read_gguf
from loraplex.models.gguf_config import family_of, hugging_face_name
from loraplex.models.spec import ModelSpec

_ROTATED = ("q_proj", "k_proj")


class GgufWeights:
    """Implements `TensorFile`."""

    def __init__(self, path: Path, spec: ModelSpec) -> None:
        """Raises ConfigError, UnsupportedModelError."""
        self.path = path
        self._file = read_gguf(path)
        self._family = family_of(self._file)
        self._head_dim = spec.layers[0].attention.head_dim
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
        stored = self.stored(name)
        tensor = stored.decoded() if isinstance(stored, StoredWeight) else stored
        is_norm = name.endswith("norm.weight")
        return tensor.float() + self._family.norm_offset if is_norm else tensor

    def stored(self, name: str) -> torch.Tensor | StoredWeight:
        """Return a weight as it is, but for the order of its rows."""
        own = self._tensors[name]
        described = self._file.tensors[own]
        found = decoded_blocks(
            f"{self.path}: {own}", self._file.bytes_of(own), described.kind, described.shape
        )
        if not self._family.has_permuted_heads or name.split(".")[-2] not in _ROTATED:
            return found
        rows = self._rows(name, described.shape[0])
        return found.rows(rows) if isinstance(found, StoredWeight) else found[rows]

    def _rows(self, name: str, num_rows: int) -> torch.Tensor:
        """Return the file's row of each row: within a head, pairs that rotate are neighbours."""
        if num_rows % self._head_dim:
            raise ConfigError(
                f"{self.path}: {name} has {num_rows} rows, no multiple of {self._head_dim}"
            )
        rows = torch.arange(num_rows).view(-1, self._head_dim // 2, 2)
        return rows.mT.flatten()
