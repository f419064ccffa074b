"""Launches of Triton kernels, noted instead of done: what a GPU of some architecture would compile.

For a process of its own that has TRITON_INTERPRET off.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import triton
from torch._subclasses.fake_tensor import FakeTensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from support.fake_gpu import fake_gpu

_WARP_SIZE = 32
_AN_ADDRESS = 1 << 32  # of every storage; the allocator of a GPU aligns them to 512 bytes


@dataclasses.dataclass(frozen=True, slots=True)
class KernelLaunch:
    """One kernel as it was specialised for the arguments of a launch."""

    case: str
    kernel: JITFunction[Any]
    source: Any  # triton's ASTSource
    options: dict[str, Any]
    grid: tuple[int, ...]
    key: str
    """Launches of one key are of one compiled kernel."""

    @property
    def name(self) -> str:
        return str(self.kernel.fn.__name__)


class _NoGpu:
    """Triton's driver for an absent GPU: it reports the architecture and runs nothing."""

    def __init__(self, arch: int) -> None:
        self._target = GPUTarget("cuda", arch, _WARP_SIZE)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, _device: int) -> None:
        pass

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)


class _Pointer:
    """A fake tensor as Triton sees a tensor: a type and an address, aligned as it would be."""

    def __init__(self, tensor: FakeTensor) -> None:
        self.dtype = tensor.dtype
        self._address = _AN_ADDRESS + int(tensor.storage_offset()) * tensor.element_size()

    def data_ptr(self) -> int:
        return self._address


class LaunchRecorder:
    """Fake tensors live, and launches are noted, while it is entered."""

    def __init__(self, arch: int) -> None:
        self.arch = arch
        self.case = ""
        """What the next launches are said to be of."""
        self.launches: list[KernelLaunch] = []

    @contextlib.contextmanager
    def record(self) -> Iterator[None]:
        triton.runtime.driver.set_active(_NoGpu(self.arch))
        with fake_gpu(self.arch), mock.patch.object(JITFunction, "run", self._run()):
            yield

    def _run(self) -> Any:
        def run(
            kernel: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any
        ) -> None:
            del warmup
            args = tuple(_as_pointer(arg) for arg in args)
            kwargs = {name: _as_pointer(value) for name, value in kwargs.items()}
            self.launches.append(self._launch(kernel, args, grid, kwargs))

        return run

    def _launch(
        self, kernel: JITFunction[Any], args: tuple[Any, ...], grid: Any, kwargs: dict[str, Any]
    ) -> KernelLaunch:
        """Do what JITFunction.run does, up to the point where it would compile."""
        _, _, _, backend, bind = kernel.create_binder()
        bound, specialization, given = bind(*args, **kwargs)
        key = f"{kernel.module}.{kernel.fn.__qualname__} {specialization} {given}"
        options, signature, constexprs, attrs = kernel._pack_args(
            backend, kwargs, bound, specialization, given
        )
        source = kernel.ASTSource(kernel, signature, constexprs, attrs)
        size = tuple(int(extent) for extent in (grid(bound) if callable(grid) else grid))
        assert all(extent > 0 for extent in size), f"{key}: an empty grid {size}"
        assert size[0] < 2**31, f"{key}: the grid is too long: {size}"
        assert all(extent < 2**16 for extent in size[1:]), f"{key}: the grid is too wide: {size}"
        return KernelLaunch(self.case, kernel, source, options.__dict__, size, key)


def _as_pointer(value: Any) -> Any:
    if isinstance(value, FakeTensor):
        assert value.device.type == "cuda", f"a kernel is given a tensor on {value.device}"
        return _Pointer(value)
    assert not isinstance(value, torch.Tensor), "a kernel is given a tensor of the host"
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_as_pointer, value))
    return value
