"""Picks the backend of a device: once, when a model is loaded. The choice is passed down."""

import functools
import logging

import torch

from loraplex.kernels.native.backend import NativeKernels
from loraplex.kernels.native.library import NativeLibrary, NativeLibraryError, load_library
from loraplex.kernels.ops import Kernels
from loraplex.kernels.reference import ReferenceKernels

logger = logging.getLogger(__name__)


def select_kernels(device: torch.device) -> Kernels:
    """The fastest backend that works here.

    On a CPU it uses as many threads as torch does at this moment.
    """
    library = _host_library() if device.type == "cpu" else None
    if library is None:
        return ReferenceKernels(device)
    return NativeKernels(library, torch.get_num_threads())


@functools.cache
def _host_library() -> NativeLibrary | None:
    """Loaded once in a process, so that what is lost without it is said once."""
    try:
        return load_library()
    except NativeLibraryError as error:
        logger.warning(
            "no native CPU kernels (%s): torch computes instead, several times slower; they are "
            "built when loraplex is installed where there is a C++20 compiler",
            error,
        )
        return None
