"""Adapters in host memory: the upper tier's bytes.

Written by the loader's thread, read by the bank. The adapter cache (memory) decides what is here.
"""

import dataclasses
import threading
from collections.abc import Mapping

import torch

from loraplex.core.adapter import AdapterHandle, LoraTarget
from loraplex.execution.adapters.pinned_pages import PageLease


@dataclasses.dataclass(frozen=True, slots=True)
class HostWeight:
    """One adapted linear layer, in the dtype of its file."""

    target: LoraTarget
    a: torch.Tensor  # [rank, in_features]
    b: torch.Tensor  # [out_features, rank]
    scale: float
    """The adapter's own: alpha / rank, or what its file says. A float32 value."""


@dataclasses.dataclass(frozen=True, slots=True)
class HostPart:
    """A piece of what an adapter has beside LoRA, in the dtype of its file."""

    target: LoraTarget
    values: torch.Tensor
    """[rank, out_features] of the target; of a vector [out_features]."""
    scale: float = 1.0
    """What a shift is multiplied with."""
    indices: torch.Tensor | None = None
    """Of trained tokens: their ids, [rank] int64."""
    is_base: bool = False
    """Rows that stand for the base's own parameter: what is tied to it changes, too."""
    is_quotient: bool = False
    """Of a factor: the magnitudes are divided by the norms already."""


@dataclasses.dataclass(frozen=True, slots=True)
class HostAdapter:
    digest: str
    weights: tuple[HostWeight, ...]
    """LoRA, in the order of AdapterSource.targets."""
    parts: tuple[HostPart, ...] = ()
    """The rest, in the same order."""
    factors: Mapping[tuple[int, str], torch.Tensor] = dataclasses.field(default_factory=dict)
    """DoRA's of each output, float64, by layer and module; once AdapterBank.prepare has run."""
    packed: PageLease | None = None
    """All of it as it will lie in the pool, for an accelerator; then the pieces have no values."""

    @property
    def targets(self) -> tuple[LoraTarget, ...]:
        weights = [weight.target for weight in self.weights]
        return tuple(sorted([*weights, *(part.target for part in self.parts)]))

    @property
    def num_bytes(self) -> int:
        if self.packed is not None:
            return self.packed.num_bytes
        weights = sum(weight.a.nbytes + weight.b.nbytes for weight in self.weights)
        return weights + sum(part.values.nbytes for part in self.parts)


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
