"""Picks the backend of a device: once, when a model is loaded. The choice is passed down."""

import torch

from loraplex.kernels.ops import Kernels
from loraplex.kernels.reference import ReferenceKernels


def select_kernels(device: torch.device) -> Kernels:
    """The fastest backend that works here."""
    return ReferenceKernels(device)
