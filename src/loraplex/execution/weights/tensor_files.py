"""Open files of weights: safetensors, and `.bin` with torch's restricted unpickler only."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from loraplex.core.errors import ConfigError


class TensorFile(Protocol):
    path: Path
    names: Sequence[str]

    def __enter__(self) -> "TensorFile": ...

    def __exit__(self, *exc_info: object) -> None: ...

    def tensor(self, name: str) -> Any: ...


class SafetensorsFile:
    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._handle: Any = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"cannot read {path}: {error}") from error
        self.names: Sequence[str] = list(self._handle.keys())  # type: ignore[no-untyped-call]

    def __enter__(self) -> "SafetensorsFile":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._handle.__exit__(None, None, None)

    def tensor(self, name: str) -> Any:
        try:
            return self._handle.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"cannot read {self.path}: {error}") from error


class PickledFile:
    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # torch.load raises whatever the bytes lead it to
            raise ConfigError(
                f"cannot read {path}: it must be a plain state dict in torch's zip format "
                f"({type(error).__name__})"
            ) from error
        if not isinstance(tensors, dict):
            raise ConfigError(f"{path} holds no state dict")
        self._tensors: Mapping[str, Any] = tensors
        self.names: Sequence[str] = list(tensors)

    def __enter__(self) -> "PickledFile":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._tensors = {}

    def tensor(self, name: str) -> Any:
        return self._tensors[name]
