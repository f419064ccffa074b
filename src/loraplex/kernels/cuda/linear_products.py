"""Launches the products with weights: which tiles, and how a long sum is split.

Nothing of a quantised weight is ever written back as floating-point numbers for cuBLAS: that would
take up to a GiB for a moment and round each weight once more. By its bytes it could pay only in
steps of a thousand tokens and more, which are rare where prompts are computed in chunks.
"""

import dataclasses
import functools
from typing import Any

import torch

from loraplex.core.weight_precision import WeightPrecision
from loraplex.kernels.cuda.generations import keeps_products_in_registers
from loraplex.kernels.cuda.linear_packing import PackedWeight
from loraplex.kernels.cuda.programs.linear import invariant_linear
from loraplex.kernels.cuda.programs.linear_quantized import (
    add_splits,
    quantized_linear,
)

_TILES_TOGETHER = 8
_ADDED_AT_ONCE = 256
_MAX_SPLITS = 16
_LEAST_BLOCKS = 4
"""Minimum blocks of a split: fewer do not fill the pipeline of loads."""


@dataclasses.dataclass(frozen=True, slots=True)
class Tile:
    """How one program computes some rows and outputs."""

    rows: int
    outputs: int
    num_warps: int
    num_stages: int
    programs: int = 1
    """A sum is split until there are so many programs; 1: never."""

    @property
    def options(self) -> dict[str, Any]:
        return {
            "BLOCK_M": self.rows,
            "BLOCK_N": self.outputs,
            "GROUP_M": _TILES_TOGETHER,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }

    def count(self, num_rows: int, num_outputs: int) -> int:
        return -(-num_rows // self.rows) * -(-num_outputs // self.outputs)


_DECODE = Tile(rows=16, outputs=128, num_warps=4, num_stages=4, programs=264)
_FEW_ROWS = Tile(rows=64, outputs=64, num_warps=4, num_stages=3, programs=264)
_MANY_ROWS = Tile(rows=128, outputs=128, num_warps=8, num_stages=2, programs=132)
# Products of float32 are no matrix instructions: small tiles keep the factors in registers.
_WIDE = Tile(rows=16, outputs=32, num_warps=4, num_stages=3, programs=512)
# Sums of inputs, and addresses of a table, need registers: tiles are smaller, or have more threads.
_OFFSETS = dataclasses.replace(_FEW_ROWS, num_warps=8, num_stages=2)
_WIDE_TABLE = dataclasses.replace(_WIDE, num_warps=8, num_stages=2)

_DENSE = Tile(rows=64, outputs=64, num_warps=4, num_stages=4)
_DENSE_INPUTS = 64
_DENSE_WIDE = Tile(rows=32, outputs=32, num_warps=4, num_stages=3)
_DENSE_WIDE_INPUTS = 32


def fixed_linear(
    x: torch.Tensor,
    packed: PackedWeight,
    *,
    row_scales: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x [T, in] -> [T, out] with a weight of x's type; a row's bits do not depend on T.

    row_scales [T] and dtype, that of the result: where x is float8.
    """
    num_rows = x.shape[0]
    y = torch.empty(num_rows, packed.out_features, dtype=dtype or x.dtype, device=x.device)
    tile, inputs = _DENSE, _DENSE_INPUTS
    if x.dtype == torch.float32:
        tile, inputs = _DENSE_WIDE, _DENSE_WIDE_INPUTS
    invariant_linear[(tile.count(num_rows, packed.out_features),)](
        *(y, x, packed.weight, packed.bias, row_scales, packed.scales),
        *(num_rows, packed.out_features, packed.in_features),
        *(y.stride(0), x.stride(0), packed.weight.stride(0)),
        HAS_BIAS=packed.bias is not None,
        IS_FLOAT8=row_scales is not None,
        EVEN_K=packed.in_features % inputs == 0,
        BLOCK_K=inputs,
        **tile.options,
    )
    return y


class ScaledLinear:
    """Products with weights of int8 and int4."""

    def __init__(self, device: torch.device, *, batch_invariant: bool) -> None:
        """batch_invariant: a row's bits do not depend on how many there are."""
        self._is_fixed = batch_invariant
        self._many_rows = _FEW_ROWS if keeps_products_in_registers(device) else _MANY_ROWS

    def apply(self, x: torch.Tensor, packed: PackedWeight, dtype: torch.dtype) -> torch.Tensor:
        """x [T, in] -> [T, out] of this dtype."""
        num_rows = x.shape[0]
        tile = self._tile(num_rows, x.dtype, packed)
        y = torch.empty(num_rows, packed.out_features, dtype=dtype, device=x.device)
        num_splits, blocks_per_split = _splits(tile, num_rows, packed)
        if num_splits == 1:
            _launch(y, x, packed, packed.bias, tile, (1, blocks_per_split))
            return y
        partial = torch.empty(num_splits, *y.shape, dtype=torch.float32, device=x.device)
        _launch(partial[0], x, packed, None, tile, (num_splits, blocks_per_split))
        add_splits[(num_rows, -(-packed.out_features // _ADDED_AT_ONCE))](
            *(y, partial, packed.bias, num_rows, packed.out_features),
            NUM_SPLITS=num_splits,
            HAS_BIAS=packed.bias is not None,
            BLOCK_N=_ADDED_AT_ONCE,
            num_warps=2,
        )
        return y

    def _tile(self, num_rows: int, dtype: torch.dtype, packed: PackedWeight) -> Tile:
        if dtype == torch.float32:
            tile = _WIDE if packed.table is None else _WIDE_TABLE
        elif num_rows <= _DECODE.rows and not self._is_fixed:
            tile = _DECODE
        elif packed.offsets is not None:
            tile = _OFFSETS
        elif num_rows <= _FEW_ROWS.rows or self._is_fixed or packed.table is not None:
            tile = _FEW_ROWS
        else:
            tile = self._many_rows
        return dataclasses.replace(tile, programs=1) if self._is_fixed else tile


def _launch(
    y: torch.Tensor,
    x: torch.Tensor,
    packed: PackedWeight,
    bias: torch.Tensor | None,
    tile: Tile,
    splits: tuple[int, int],
) -> None:
    """y [T, out] is the first split's; those of the others follow it."""
    num_rows = x.shape[0]
    num_splits, blocks_per_split = splits
    quantized_linear[(tile.count(num_rows, packed.out_features), num_splits)](
        *(y, x, packed.weight, packed.scales, packed.offsets, packed.table, bias),
        *(num_rows, packed.out_features, packed.in_features),
        *(y.stride(0), x.stride(0), packed.weight.stride(0), blocks_per_split),
        IS_INT4=packed.precision is WeightPrecision.INT4,
        GROUP_SIZE=packed.group_size,
        HAS_BIAS=bias is not None,
        EVEN_K=packed.in_features % packed.block == 0,
        **tile.options,
    )


def _splits(tile: Tile, num_rows: int, packed: PackedWeight) -> tuple[int, int]:
    """(how many, blocks of inputs in each).

    All splits together have no more programs than the tile wants, so no more partial sums either.
    """
    num_blocks = -(-packed.in_features // packed.block)
    tiles = tile.count(num_rows, packed.out_features)
    return _split_blocks(num_blocks, min(tile.programs // tiles, _MAX_SPLITS))


@functools.cache
def _split_blocks(num_blocks: int, most: int) -> tuple[int, int]:
    """A power of two, so that there are few kernels to compile; none is empty."""
    num_splits = 1
    while num_splits * 2 <= most and num_blocks >= num_splits * 2 * _LEAST_BLOCKS:
        num_splits *= 2
    return num_splits, -(-num_blocks // num_splits)
