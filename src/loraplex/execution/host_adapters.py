"""Adapters in host memory: the upper tier's bytes.

Written by the loader's thread, read by the bank. The adapter cache (memory) decides what is here.
"""

import dataclasses
import threading

import torch

from loraplex.core.adapter import AdapterHandle, LoraTarget


@dataclasses.dataclass(frozen=True, slots=True)
class HostWeight:
    """One adapted linear layer, in the dtype of its file."""

    target: LoraTarget
    a: torch.Tensor  # [rank, in_features]
    b: torch.Tensor  # [out_features, rank]
    scale: float
    """The adapter's own: alpha / rank, or what its file says. A float32 value."""


@dataclasses.dataclass(frozen=True, slots=True)
class HostAdapter:
    digest: str
    weights: tuple[HostWeight, ...]
    """In the order of AdapterSource.targets."""

    @property
    def targets(self) -> tuple[LoraTarget, ...]:
        return tuple(weight.target for weight in self.weights)

    @property
    def num_bytes(self) -> int:
        return sum(weight.a.nbytes + weight.b.nbytes for weight in self.weights)


class HostAdapters:
    """The table that the loader fills and the bank reads. Safe to use from two threads."""

    def __init__(self) -> None:
        self._adapters: dict[AdapterHandle, HostAdapter] = {}
        self._lock = threading.Lock()

    def put(self, handle: AdapterHandle, adapter: HostAdapter) -> None:
        with self._lock:
            self._adapters[handle] = adapter

    def get(self, handle: AdapterHandle) -> HostAdapter | None:
        with self._lock:
            return self._adapters.get(handle)

    def discard(self, handle: AdapterHandle) -> None:
        """Forget it, if it is here."""
        with self._lock:
            self._adapters.pop(handle, None)

    def __len__(self) -> int:
        with self._lock:
            return len(self._adapters)
