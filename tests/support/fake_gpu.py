"""Tensors of a GPU that is not there: shapes, types and strides on "cuda", and no memory.

torch's FakeTensorMode makes them. What it lacks where torch was built without CUDA is here.
"""

import contextlib
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

GPUS = {
    80: types.SimpleNamespace(name="A100", major=8, minor=0, multi_processor_count=108),
    90: types.SimpleNamespace(name="H200", major=9, minor=0, multi_processor_count=132),
}
"""Properties that torch reports of a GPU, by architecture."""


class _Indexing(TorchFunctionMode):
    """tensor[...] by the operations that it stands for; torch's own needs CUDA's runtime."""

    def __torch_function__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.__getitem__ and args[0].device.type == "cuda":
            return _view(*args)
        if func is torch.Tensor.__setitem__ and args[0].device.type == "cuda":
            return _write(*args)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def fake_gpu(arch: int) -> Iterator[None]:
    """Tensors that are made here are fake; "cuda" is a GPU of this architecture."""
    gpu = GPUS[arch]
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        _Indexing(),
        mock.patch.object(torch.cuda, "current_device", return_value=0),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=gpu),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(gpu.major, gpu.minor)),
    ):
        yield


def _view(tensor: torch.Tensor, key: Any) -> torch.Tensor:
    """tensor[key]."""
    keys = key if isinstance(key, tuple) else (key,)
    used = sum(part is not None and part is not Ellipsis for part in keys)
    unnamed = tensor.dim() - used
    indices: list[torch.Tensor | None] = []
    dim = 0
    for part in keys:
        match part:
            case None:
                tensor = tensor.unsqueeze(dim)
                dim += 1
            case slice():
                first, end, step = part.indices(tensor.shape[dim])
                tensor = torch.ops.aten.slice.Tensor(tensor, dim, first, max(first, end), step)
                dim += 1
            case torch.Tensor():
                indices += [None] * (dim - len(indices)) + [part]
                dim += 1
            case int():
                tensor = tensor.select(dim, part)
            case _:
                assert part is Ellipsis, f"a fake tensor is not indexed by {part!r}"
                dim += unnamed
    return torch.ops.aten.index.Tensor(tensor, indices) if indices else tensor


def _write(tensor: torch.Tensor, key: Any, value: Any) -> None:
    """tensor[key] = value."""
    keys = key if isinstance(key, tuple) else (key,)
    if any(isinstance(part, torch.Tensor) for part in keys):
        assert all(isinstance(part, torch.Tensor) for part in keys), "mixed indices are not written"
        if not isinstance(value, torch.Tensor):
            value = torch.full((), value, dtype=tensor.dtype, device=tensor.device)
        tensor.index_put_(keys, value)
    elif isinstance(value, torch.Tensor):
        _view(tensor, key).copy_(value)
    else:
        _view(tensor, key).fill_(value)
