"""Products of bfloat16 in the orders of addition of instructions for them (ADR 47, 49, 53)."""

from collections.abc import Callable, Iterator

import torch

from loraplex.kernels.native.library import NativeLibrary

Sums = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""x [T, in] and weight [out, in] bfloat16 -> [T, out] float32."""

_TILE_STEP = 32


def sums_of(library: NativeLibrary) -> Sums | None:
    """What the kernels of this library compute on this CPU; None: the sum of multiply-adds."""
    _, _, instructions = library.arithmetic.partition(" with ")
    return {
        "AMX": tile_sums,
        "AVX512-BF16": pair_sums,
        "BF16": matrix_sums,
        "": None,
    }[instructions]


def tile_sums(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Add inputs with even numbers, of each 32, in one chain of multiply-adds, and those with odd
    ones in another; both are added, then that to the sum.
    """
    sums = torch.zeros(len(x), len(weight))
    products = list(_products(x, weight))
    for first in range(0, len(products), _TILE_STEP):
        chains = torch.zeros(2, len(x), len(weight))
        for i, product in enumerate(products[first : first + _TILE_STEP]):
            chains[i % 2] = (chains[i % 2].double() + product).float()
        sums += chains[0] + chains[1]
    return sums


def pair_sums(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Add all in one chain of multiply-adds, in which the second input of each pair comes first."""
    sums = torch.zeros(len(x), len(weight))
    products = list(_products(x, weight))
    for first in range(0, len(products), 2):
        for product in reversed(products[first : first + 2]):
            sums = (sums.double() + product).float()
    return sums


def matrix_sums(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Add the sum of each pair's products to one chain; both sums are rounded to odd."""
    sums = torch.zeros(len(x), len(weight))
    products = list(_products(x, weight))
    for first in range(0, len(products), 2):
        pair = _round_to_odd(torch.stack(products[first : first + 2]).sum(0))
        sums = _round_to_odd(sums.double() + pair.double())
    return sums


def _round_to_odd(exact: torch.Tensor) -> torch.Tensor:
    """Round float64 to float32 towards 0, but to the odd one of two neighbours where bits are
    lost.
    """
    bits = exact.view(torch.int64)
    lost = bits & ((1 << 29) - 1)
    return (bits - lost | (lost != 0).long() << 29).view(torch.float64).float()


def _products(x: torch.Tensor, weight: torch.Tensor) -> Iterator[torch.Tensor]:
    """Give the product of each input, which is exact; float64 rounds no sum with it."""
    for i in range(x.shape[1]):
        yield x[:, i, None].double() * weight[:, i].double()
