"""Safetensors files that are written tensor by tensor: only one is in memory."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch

from loraplex.adapters.durable_files import sync_folder
from loraplex.adapters.tensor_file import encode_sizes
from loraplex.core.errors import ConfigError

_DTYPES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_INDEX: Final = "model.safetensors.index.json"
_MAX_SIZES: Final = 150
"""Bytes of an entry of a header in addition to its name."""

_Entry = tuple[str, str, tuple[int, ...], int]


class ShardWriter:
    """Writes tensors into files of a folder, in the order in which they come."""

    def __init__(self, folder: Path, names: Iterable[str], max_bytes: int) -> None:
        """names: of all tensors, or more. max_bytes: of a file, unless one tensor is larger."""
        self._folder = folder
        self._max_bytes = max_bytes
        # A header precedes the data, and is known last: its place holds all names.
        place = encode_sizes((), {"format": "pt"})
        self._header_bytes = len(place) + sum(len(json.dumps(n)) + _MAX_SIZES for n in names)
        self._header_bytes += -self._header_bytes % 8
        self._file: BinaryIO | None = None
        self._shards: list[list[_Entry]] = []
        self.num_bytes = 0
        """Bytes of all tensors so far."""

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor, into the next file where this one is full.

        Raises ConfigError for a type that safetensors does not have, OSError.
        """
        if tensor.dtype not in _DTYPES:
            raise ConfigError(f"{name} is {tensor.dtype}, which cannot be written")
        data = tensor.contiguous().flatten().view(torch.uint8).numpy().data
        used = sum(entry[-1] for entry in self._shards[-1]) if self._shards else 0
        if self._file is None or (used and used + len(data) > self._max_bytes):
            self._end_shard()
            self._file = self._path(len(self._shards)).open("wb")
            self._file.seek(self._header_bytes)
            self._shards.append([])
        self._file.write(data)
        self._shards[-1].append((name, _DTYPES[tensor.dtype], tuple(tensor.shape), len(data)))
        self.num_bytes += len(data)

    def finish(self) -> None:
        """Give the files their names, and write the index if there are several."""
        self._end_shard()
        total = len(self._shards)
        weight_map: dict[str, str] = {}
        for number, entries in enumerate(self._shards):
            name = f"model-{number + 1:05}-of-{total:05}.safetensors"
            self._path(number).rename(self._folder / (name if total > 1 else "model.safetensors"))
            weight_map |= {entry[0]: name for entry in entries}
        if total > 1:
            index: dict[str, Any] = {"metadata": {"total_size": self.num_bytes}}
            text = json.dumps(index | {"weight_map": weight_map}, indent=2)
            (self._folder / _INDEX).write_text(text, encoding="utf-8")
        sync_folder(self._folder)

    def close(self) -> None:
        """Close the open file; what it holds is no safetensors file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _end_shard(self) -> None:
        if self._file is None:
            return
        header = encode_sizes(self._shards[-1], {"format": "pt"})[8:]
        padded = header + b" " * (self._header_bytes - 8 - len(header))
        self._file.seek(0)
        self._file.write(len(padded).to_bytes(8, "little") + padded)
        self._file.flush()
        os.fsync(self._file.fileno())
        self.close()

    def _path(self, number: int) -> Path:
        return self._folder / f"shard-{number}.partial"
