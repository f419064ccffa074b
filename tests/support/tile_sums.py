"""Products of bfloat16 in the order of addition of AMX's tiles (ADR 47)."""

import torch

from loraplex.kernels.native.library import NativeLibrary, load_library

_STEP = 32


def has_tiles(library: NativeLibrary) -> bool:
    """Whether the kernels of this library multiply bfloat16 by tiles on this CPU."""
    return library.arithmetic != library.instruction_set


def best_library_has_tiles() -> bool:
    return has_tiles(load_library())


def tile_sums(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, in] and weight [out, in] bfloat16 -> [T, out] float32.

    Of each 32 inputs, those with even numbers are one chain of multiply-adds, those with odd ones
    another; both are added, then that to the sum.
    """
    sums = torch.zeros(len(x), len(weight))
    for first in range(0, x.shape[1], _STEP):
        chains = torch.zeros(2, len(x), len(weight))
        for i in range(first, min(x.shape[1], first + _STEP)):
            # Products of bfloat16 are exact in float32; float64 rounds no sum of usual sizes.
            product = x[:, i, None].double() * weight[:, i].double()
            chains[i % 2] = (chains[i % 2].double() + product).float()
        sums += chains[0] + chains[1]
    return sums
