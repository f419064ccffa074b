"""Tensors of a model folder by their Hugging Face names, each read when it is requested.

Reads safetensors, and `.bin` files with torch's restricted unpickler only; both are mapped. Every
tensor must be accounted for: one that is missing, unknown, twice there or of another shape is an
error.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from loraplex.core.errors import ConfigError
from loraplex.execution.weights.tensor_files import (
    PickledFile,
    SafetensorsFile,
    TensorFile,
)
from loraplex.execution.weights.trtllm import TrtllmWeights
from loraplex.execution.weights.weight_files import weight_files
from loraplex.models.engine_folder import is_foreign_checkpoint
from loraplex.models.parameters import checkpoint_shapes
from loraplex.models.spec import ModelSpec

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class Checkpoint:
    """The open files of one folder. What `read` gave is valid until the checkpoint is closed."""

    def __init__(self, folder: Path, spec: ModelSpec) -> None:
        """Raises ConfigError, which names the file and the weight."""
        self._shapes = checkpoint_shapes(spec)
        self._files: dict[str, _Entry] = {}
        with contextlib.ExitStack() as stack:
            for file in open_files(folder, spec):
                self._add(stack.enter_context(file), spec)
            missing = sorted(self._shapes.keys() - self._files.keys())
            if missing:
                raise ConfigError(
                    f"{folder} lacks {len(missing)} weights of {spec.architecture}, "
                    f"the first of them {missing[0]}"
                )
            self._stack = stack.pop_all()

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __len__(self) -> int:
        """The number of tensors."""
        return len(self._files)

    def close(self) -> None:
        self._stack.close()
        self._files.clear()

    def read(self, name: str) -> torch.Tensor:
        """A tensor of the shape that the configuration means, on the host; not to be written to."""
        (file, stored_name), shape = self._files[name], self._shapes[name]
        tensor = file.tensor(stored_name)
        if not isinstance(tensor, torch.Tensor):
            raise ConfigError(f"{file.path}: {name} is no tensor but {type(tensor).__name__}")
        if tensor.shape != shape:
            raise ConfigError(
                f"{file.path}: {name} has shape {list(tensor.shape)}, "
                f"config.json means {list(shape)}"
            )
        if tensor.dtype not in _FLOATS:
            raise ConfigError(
                f"{file.path}: {name} is {tensor.dtype}; floating-point weights are supported"
            )
        return tensor

    def _add(self, file: "TensorFile", spec: ModelSpec) -> None:
        for name in file.names:
            full_name = spec.names.canonical(name)
            if full_name is None or _is_redundant(full_name, spec):
                continue
            if full_name not in self._shapes:
                raise ConfigError(
                    f"{file.path}: unknown weight {name}; config.json does not account for it"
                )
            if full_name in self._files:
                raise ConfigError(f"{file.path}: weight {name} is there twice")
            self._files[full_name] = _Entry(file, name)


def _is_redundant(name: str, spec: ModelSpec) -> bool:
    """Tied checkpoints may store the embedding twice; stored_head compared the two."""
    return spec.tie_word_embeddings and name == f"{spec.names.lm_head}.weight"


class _Entry(NamedTuple):
    """Where a tensor is, and what it is called there."""

    file: TensorFile
    name: str


def open_files(folder: Path, spec: ModelSpec) -> Iterator[TensorFile]:
    """Yield the files of weights, open."""
    if is_foreign_checkpoint(folder):
        yield TrtllmWeights(folder, spec)
        return
    for path in weight_files(folder):
        yield SafetensorsFile(path) if path.suffix == ".safetensors" else PickledFile(path)
