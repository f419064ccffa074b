"""Picks the backend of a device: once, when a model is loaded. The choice is passed down."""

import functools
import importlib
import logging
from collections.abc import Mapping
from types import MappingProxyType

import torch

from loraplex.kernels.accelerator import Accelerator, CudaAccelerator
from loraplex.kernels.channel import Channel, DeviceChannel
from loraplex.kernels.native.backend import NativeKernels
from loraplex.kernels.native.channel import SharedMemoryChannel
from loraplex.kernels.native.library import NativeLibrary, NativeLibraryError, load_library
from loraplex.kernels.ops import Kernels
from loraplex.kernels.reference import ReferenceKernels
from loraplex.kernels.sizes import chosen_sizes

logger = logging.getLogger(__name__)


def select_accelerator(device: torch.device) -> Accelerator | None:
    """Return the accelerator; None: there is none, or only torch can use it."""
    if device.type != "cuda" or not _has_triton():
        return None
    return CudaAccelerator(device)


def select_kernels(
    device: torch.device,
    accelerator: Accelerator | None = None,
    *,
    batch_invariant: bool = False,
    attention_backend: str = "auto",
    channel: Channel | None = None,
    sizes: Mapping[str, str] = MappingProxyType({}),
) -> Kernels:
    """Return the fastest backend that works here. On a CPU it has torch's current thread count.

    accelerator: what `select_accelerator` gave for the device. batch_invariant, attention_backend:
    as in RunnerSettings. channel: of the thread that computes, to the other ranks; None: there are
    none. sizes: those of a GPU's programs that a tuning chose, as in kernels.sizes.
    """
    if accelerator is not None:
        assert channel is None or isinstance(channel, DeviceChannel)
        # A machine without a GPU need not have Triton.
        from loraplex.kernels.cuda.backend import CudaKernels  # noqa: PLC0415

        return CudaKernels(
            accelerator,
            batch_invariant=batch_invariant,
            attention_backend=attention_backend,
            channel=channel,
            sizes=chosen_sizes(sizes),
        )
    library = _host_library() if device.type == "cpu" else None
    if library is None:
        return ReferenceKernels(device, channel)
    assert channel is None or isinstance(channel, SharedMemoryChannel)
    return NativeKernels(library, torch.get_num_threads(), channel)


@functools.cache
def _host_library() -> NativeLibrary | None:
    """Load the library once in a process, so that a failure is logged once."""
    try:
        return load_library()
    except NativeLibraryError as error:
        logger.warning(
            "no native CPU kernels (%s): torch computes instead, several times slower; they are "
            "built when loraplex is installed where there is a C++20 compiler",
            error,
        )
        return None


@functools.cache
def _has_triton() -> bool:
    """Whether Triton can be imported; the reason is logged once."""
    try:
        importlib.import_module("triton")
    except ImportError as error:
        logger.warning(
            "no Triton (%s): torch computes on the GPU instead, many times slower, without CUDA "
            "graphs; torch's own builds for CUDA bring Triton",
            error,
        )
        return False
    return True
