"""Products with the weights of experts, one launch for all of them.

The number of tiles that routes may need follows from the numbers of pairs and experts: a program
without rows ends at once. A decoding step takes tiles of few rows: what it costs is to read the
weights of its experts once, and there are enough outputs to fill the processors without splitting
a sum.
"""

import dataclasses
from typing import Any

import torch
import triton

from loraplex.core.weight_precision import WeightPrecision
from loraplex.kernels import quantization
from loraplex.kernels.accelerator import keeps_products_in_registers
from loraplex.kernels.cuda.linear_packing import CudaWeight
from loraplex.kernels.cuda.linear_products import quantize_fp8_rows
from loraplex.kernels.cuda.programs.grouped_linear import (
    grouped_linear,
    grouped_quantized_linear,
)
from loraplex.kernels.cuda.ranks import RankSums
from loraplex.kernels.ops import PackedLinear
from loraplex.kernels.routing import Routes
from loraplex.kernels.sizes import DEFAULT_SIZES, ProductTile, ProgramSizes

_FEW_ROWS = 8
"""Rows of an expert, on average, up to which tiles are as small as matrix units allow."""
_SOME_ROWS = 64

_WIDE_INPUTS = 32
_INPUTS = 64


@dataclasses.dataclass(frozen=True, slots=True)
class _Tiles:
    """Tiles by the rows of an expert."""

    few: ProductTile
    some: ProductTile
    many: ProductTile


def _rows_name(rows_per_expert: float, *, is_fixed: bool) -> str:
    """Return the name of the tile for so many rows, as _Tiles has it."""
    if is_fixed:
        return "some"
    if rows_per_expert <= _FEW_ROWS:
        return "few"
    return "some" if rows_per_expert <= _SOME_ROWS else "many"


def _narrow(sizes: ProgramSizes) -> _Tiles:
    return _Tiles(sizes.few_experts, sizes.some_experts, sizes.many_experts)


_NARROW = _narrow(DEFAULT_SIZES)
# Factors become float16 in registers, where larger tiles of them do not fit.
_FP8 = dataclasses.replace(_NARROW, many=_NARROW.some)
# Products of float32 are no matrix instructions: small tiles keep the factors in registers.
_WIDE_TILE = ProductTile(rows=16, outputs=32, num_warps=4, num_stages=3)
_WIDE = _Tiles(_WIDE_TILE, _WIDE_TILE, _WIDE_TILE)
_QUANTIZED = _Tiles(
    ProductTile(rows=16, outputs=64, num_warps=4, num_stages=4),
    ProductTile(rows=64, outputs=64, num_warps=4, num_stages=3),
    ProductTile(rows=128, outputs=128, num_warps=8, num_stages=2),
)
# Sums of inputs need registers.
_SOME_OFFSETS = ProductTile(rows=64, outputs=64, num_warps=8, num_stages=2)
_OFFSETS = _Tiles(
    ProductTile(rows=16, outputs=128, num_warps=4, num_stages=4), _SOME_OFFSETS, _SOME_OFFSETS
)


def most_tiles(num_pairs: int, num_experts: int, rows: int) -> int:
    """Return the number of tiles that pairs can need, however they are routed."""
    num_used = min(num_pairs, num_experts)
    return num_used + (num_pairs - num_used) // rows


class GroupedLinear:
    """Applies packed weights of experts to the rows of pairs. The sums are float32."""

    def __init__(
        self,
        device: torch.device,
        *,
        batch_invariant: bool,
        sums: RankSums | None = None,
        sizes: ProgramSizes = DEFAULT_SIZES,
    ) -> None:
        """batch_invariant: a row's bits do not depend on the other rows; slower.

        sums: over the ranks of a row layer; None: there is one rank.
        """
        self._sums = sums
        self._is_fixed = batch_invariant
        self._is_host = device.type == "cpu"
        self._narrow = _narrow(sizes)
        self._quantized = _QUANTIZED
        if keeps_products_in_registers(device):
            self._quantized = dataclasses.replace(_QUANTIZED, many=_QUANTIZED.some)

    def apply(self, x: torch.Tensor, packed: PackedLinear, routes: Routes) -> torch.Tensor:
        """x [T, in] or [T * k, in] of the model's type -> [T * k, out]."""
        assert isinstance(packed, CudaWeight)
        if self._sums is None or not packed.is_row:
            return self._product(x, packed, routes, x.dtype)
        if not self._sums.adds_bias:
            packed = dataclasses.replace(packed, bias=None)
        share = self._product(x, packed, routes, torch.float32)
        return self._sums.total(share, None, x.dtype)

    def _product(
        self, x: torch.Tensor, packed: CudaWeight, routes: Routes, dtype: torch.dtype
    ) -> torch.Tensor:
        assert x.shape[1] == packed.in_features
        assert packed.num_experts == routes.num_experts
        num_pairs = len(routes.pairs)
        if x.stride(1) != 1:
            x = x.contiguous()
        y = torch.empty(num_pairs, packed.out_features, dtype=dtype, device=x.device)
        tile = self._tile(num_pairs, packed, x.dtype)
        if packed.precision in (WeightPrecision.INT8, WeightPrecision.INT4):
            _launch_quantized(y, x, packed, routes, tile)
            return y
        row_scales = None
        if packed.precision is WeightPrecision.FP8:
            # Triton's interpreter rounds to float8 wrongly.
            to_rows = quantization.quantize_fp8_rows if self._is_host else quantize_fp8_rows
            x, row_scales = to_rows(x)
        _launch(y, x, row_scales, packed, routes, tile)
        return y

    def size_of(self, x: torch.Tensor, packed: PackedLinear, routes: Routes) -> str | None:
        """Return the name of the size that decides `apply`; None: a constant."""
        assert isinstance(packed, CudaWeight)
        if packed.precision is not WeightPrecision.NATIVE or x.dtype == torch.float32:
            return None
        rows = len(routes.pairs) / packed.num_experts
        return f"{_rows_name(rows, is_fixed=self._is_fixed)}_experts"

    def _tile(self, num_pairs: int, packed: CudaWeight, dtype: torch.dtype) -> ProductTile:
        if packed.precision is WeightPrecision.FP8:
            tiles = _FP8
        elif dtype == torch.float32:
            tiles = _WIDE
        else:
            is_native = packed.precision is WeightPrecision.NATIVE
            tiles = self._narrow if is_native else self._quantized
            if packed.table is not None:
                tiles = dataclasses.replace(tiles, many=tiles.some)
            if packed.offsets is not None:
                tiles = _OFFSETS
        name = _rows_name(num_pairs / packed.num_experts, is_fixed=self._is_fixed)
        tile: ProductTile = getattr(tiles, name)
        return tile


def _launch(
    y: torch.Tensor,
    x: torch.Tensor,
    row_scales: torch.Tensor | None,
    packed: CudaWeight,
    routes: Routes,
    tile: ProductTile,
) -> None:
    grid, arguments, options = _common(y, x, packed, routes, tile)
    inputs = _WIDE_INPUTS if x.dtype == torch.float32 else _INPUTS
    grouped_linear[grid](
        *(y, x, packed.weight, packed.bias, row_scales, packed.scales),
        *arguments,
        EVEN_K=packed.in_features % inputs == 0,
        BLOCK_K=inputs,
        **options,
    )


def _launch_quantized(
    y: torch.Tensor, x: torch.Tensor, packed: CudaWeight, routes: Routes, tile: ProductTile
) -> None:
    grid, arguments, options = _common(y, x, packed, routes, tile)
    grouped_quantized_linear[grid](
        *(y, x, packed.weight, packed.bias, packed.scales, packed.offsets, packed.table),
        *arguments,
        IS_INT4=packed.precision is WeightPrecision.INT4,
        GROUP_SIZE=packed.group_size,
        EVEN_K=packed.in_features % packed.block == 0,
        **options,
    )


def _common(
    y: torch.Tensor, x: torch.Tensor, packed: CudaWeight, routes: Routes, tile: ProductTile
) -> tuple[tuple[int], tuple[Any, ...], dict[str, Any]]:
    """Grid, arguments and options that both programs have."""
    num_tiles = most_tiles(len(y), packed.num_experts, tile.rows)
    arguments = (
        *(routes.pairs, routes.starts, num_tiles),
        *(packed.out_features, packed.in_features, x.stride(0), packed.weight.stride(0)),
    )
    options = tile.options | {
        "NUM_EXPERTS": packed.num_experts,
        "DIVISOR": len(y) // len(x),
        "BLOCK_E": triton.next_power_of_2(packed.num_experts),
    }
    return (num_tiles * triton.cdiv(packed.out_features, tile.outputs),), arguments, options
