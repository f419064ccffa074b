"""CUDA graphs of whole steps: recorded at the start for some numbers of tokens, then replayed.

A graph reads the addresses that it was recorded with. So what differs between two steps is copied
there first, unless it lies there already.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Hashable, Iterator, Sequence

import torch

from loraplex.kernels.accelerator import Accelerator, Graph


@dataclasses.dataclass(frozen=True, slots=True)
class _Recording:
    inputs: tuple[torch.Tensor, ...]
    """Inputs of the first computation: the graph reads them."""
    result: torch.Tensor
    graph: Graph


class StepGraphs:
    """Recorded graphs by key. Recording takes long, so it is done only while `is_recording`."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._recordings: dict[Hashable, _Recording] = {}
        self.is_recording = False

    def __len__(self) -> int:
        return len(self._recordings)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._recordings

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        self.is_recording = True
        try:
            yield
        finally:
            self.is_recording = False

    def clear(self) -> None:
        """Forget all, such as those of a KV cache that is gone."""
        self._recordings.clear()

    def repeat(
        self, key: Hashable, inputs: Sequence[torch.Tensor], compute: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """compute(), which reads the inputs; or the same by a graph, if there is one of this key.

        Under one key the inputs have the same shapes and types. The result is valid until the next
        call.
        """
        recording = self._recordings.get(key)
        if recording is None:
            if not self.is_recording:
                return compute()
            recording = self._record(inputs, compute)
            self._recordings[key] = recording
        for fixed, given in zip(recording.inputs, inputs, strict=True):
            if fixed.data_ptr() != given.data_ptr():
                fixed.copy_(given, non_blocking=True)
        recording.graph.replay()
        return recording.result

    def _record(
        self, inputs: Sequence[torch.Tensor], compute: Callable[[], torch.Tensor]
    ) -> _Recording:
        result, graph = self._accelerator.record(compute)
        return _Recording(tuple(inputs), result, graph)
