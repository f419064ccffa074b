"""Modules of a fused linear layer in a program: their places, and the tiles of their outputs."""

import triton
import triton.language as tl


@triton.jit
def pick(number, VALUES: tl.constexpr):
    """VALUES[number], for a number that is known at run time only."""
    value = tl.full((), VALUES[0], tl.int32)
    for index in tl.static_range(1, len(VALUES)):
        value = tl.where(number == index, VALUES[index], value)
    return value


@triton.jit
def module_of_tile(tile, SIZES: tl.constexpr, BLOCK: tl.constexpr):
    """Module of a tile among those of all modules, BLOCK columns each; and the tile within it."""
    module = tl.full((), 0, tl.int32)
    first = tl.full((), 0, tl.int32)
    end = 0
    for index in tl.static_range(1, len(SIZES)):
        end += (SIZES[index - 1] + BLOCK - 1) // BLOCK
        module = tl.where(tile >= end, index, module)
        first = tl.where(tile >= end, end, first)
    return module, tile - first
