"""Launches the products with weights: which tiles, and how a long sum is split.

Nothing of a quantised weight is ever written back as floating-point numbers for cuBLAS: that would
take up to a GiB for a moment and round each weight once more. By its bytes it could pay only in
steps of a thousand tokens and more, which are rare where prompts are computed in chunks.

Products of float8 by float8 read half the bytes of 16 bits, for weights and activations. The weight
has a scale for each output. A step's activations are rounded with one for each token, so that no
request feels another.
"""

import dataclasses
import functools
from collections.abc import Callable

import torch

from loraplex.core.errors import ConfigError
from loraplex.core.weight_precision import WeightPrecision
from loraplex.kernels.accelerator import keeps_products_in_registers
from loraplex.kernels.cuda.linear_packing import CudaWeight
from loraplex.kernels.cuda.programs.linear import invariant_linear, quantize_rows
from loraplex.kernels.cuda.programs.linear_quantized import add_splits, quantized_linear
from loraplex.kernels.quantization import FP8_DTYPE, FP8_MAX, SMALLEST_ROW, QuantizedWeight
from loraplex.kernels.quantization import fp8_linear as reference_linear
from loraplex.kernels.sizes import (
    DECODE_ROWS,
    DEFAULT_SIZES,
    FEW_ROWS,
    ProductTile,
    ProgramSizes,
)

_ADDED_AT_ONCE = 256
_MAX_SPLITS = 16
_LEAST_BLOCKS = 4
"""Minimum blocks of a split: fewer do not fill the pipeline of loads."""


# Products of float32 are no matrix instructions: small tiles keep the factors in registers.
_WIDE = ProductTile(rows=16, outputs=32, num_warps=4, num_stages=3, programs=512)
# Sums of inputs, and addresses of a table, need registers: tiles are smaller, or have more threads.
_OFFSETS = ProductTile(rows=64, outputs=64, num_warps=8, num_stages=2, programs=264)
_WIDE_TABLE = dataclasses.replace(_WIDE, num_warps=8, num_stages=2)

_DENSE_INPUTS = 64
_DENSE_WIDE = ProductTile(rows=32, outputs=32, num_warps=4, num_stages=3)
_DENSE_WIDE_INPUTS = 32


def fixed_linear(
    x: torch.Tensor,
    packed: CudaWeight,
    *,
    row_scales: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    tile: ProductTile = DEFAULT_SIZES.invariant,
) -> torch.Tensor:
    """x [T, in] -> [T, out] with a weight of x's type; a row's bits do not depend on T.

    row_scales [T] and dtype, that of the result: where x is float8. tile: of 16 bits and float8.
    """
    num_rows = x.shape[0]
    y = torch.empty(num_rows, packed.out_features, dtype=dtype or x.dtype, device=x.device)
    inputs = _DENSE_INPUTS
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

    def __init__(
        self, device: torch.device, *, batch_invariant: bool, sizes: ProgramSizes = DEFAULT_SIZES
    ) -> None:
        """batch_invariant: a row's bits do not depend on how many there are."""
        self._is_fixed = batch_invariant
        self._sizes = sizes
        self._has_small_tiles = keeps_products_in_registers(device)

    def apply(self, x: torch.Tensor, packed: CudaWeight, dtype: torch.dtype) -> torch.Tensor:
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

    def size_of(self, num_rows: int, dtype: torch.dtype, packed: CudaWeight) -> str | None:
        """Return the name of the size that decides the tiles of a product; None: a constant."""
        if dtype == torch.float32:
            return None
        if num_rows <= DECODE_ROWS and not self._is_fixed:
            return "decode"
        if packed.offsets is not None or packed.table is not None:
            return None
        is_few = num_rows <= FEW_ROWS or self._is_fixed or self._has_small_tiles
        return "few_rows" if is_few else "many_rows"

    def _tile(self, num_rows: int, dtype: torch.dtype, packed: CudaWeight) -> ProductTile:
        name = self.size_of(num_rows, dtype, packed)
        if name is not None:
            tile: ProductTile = getattr(self._sizes, name)
        elif dtype == torch.float32:
            tile = _WIDE if packed.table is None else _WIDE_TABLE
        else:
            tile = DEFAULT_SIZES.few_rows if packed.offsets is None else _OFFSETS
        return dataclasses.replace(tile, programs=1) if self._is_fixed else tile


def _launch(
    y: torch.Tensor,
    x: torch.Tensor,
    packed: CudaWeight,
    bias: torch.Tensor | None,
    tile: ProductTile,
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


def _splits(tile: ProductTile, num_rows: int, packed: CudaWeight) -> tuple[int, int]:
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


_SIZE_UNIT = 16
_LEAST_CAPABILITY = (8, 9)
_READ_AT_ONCE = 2048

Fp8Product = Callable[[torch.Tensor, CudaWeight, torch.dtype], torch.Tensor]
"""x [T, in] of 16 or 32 bits -> [T, out] of x's type, or float32."""


def fp8_product(
    device: torch.device, *, batch_invariant: bool, sizes: ProgramSizes = DEFAULT_SIZES
) -> Fp8Product:
    """What multiplies there; in torch on a CPU, where every sum is exact."""
    if device.type == "cpu":
        return _exact_linear
    fixed = functools.partial(_fixed_linear, tile=sizes.invariant)
    return fixed if batch_invariant else functools.partial(_cublas_linear, fixed=fixed)


def check_fp8(weight: torch.Tensor) -> None:
    """Raise ConfigError if the device of the weight [..., out, in], or its size, forbids it."""
    out_features, in_features = weight.shape[-2:]
    if out_features % _SIZE_UNIT or in_features % _SIZE_UNIT:
        raise ConfigError(
            f"fp8 takes linear layers whose sizes are multiples of {_SIZE_UNIT}; this one has "
            f"{in_features} inputs and {out_features} outputs; int8 takes any"
        )
    if weight.device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(weight.device)
    if capability < _LEAST_CAPABILITY:
        raise ConfigError(
            "fp8 needs a GPU of compute capability 8.9 or more (Ada, Hopper, Blackwell), this one "
            f"has {capability[0]}.{capability[1]}: int8 takes as little memory"
        )


def quantize_fp8_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Same as quantization.quantize_fp8_rows, in one launch: x [T, in] -> [T, in], [T, 1]."""
    num_rows, in_features = x.shape
    rows = torch.empty(num_rows, in_features, dtype=FP8_DTYPE, device=x.device)
    scales = torch.empty(num_rows, 1, dtype=torch.float32, device=x.device)
    quantize_rows[(num_rows,)](
        *(rows, scales, x, x.stride(0), in_features),
        MOST=FP8_MAX,
        SMALLEST=SMALLEST_ROW,
        BLOCK=_READ_AT_ONCE,
    )
    return rows, scales


def _cublas_linear(
    x: torch.Tensor, packed: CudaWeight, dtype: torch.dtype, *, fixed: Fp8Product
) -> torch.Tensor:
    """torch has bfloat16 results only where rows and columns are scaled. fixed: for float32."""
    if dtype != x.dtype:
        return fixed(x, packed, dtype)
    rows, row_scales = quantize_fp8_rows(x)
    assert packed.scales is not None
    is_fused = x.dtype == torch.bfloat16
    y = torch._scaled_mm(
        rows,
        packed.weight.t(),
        scale_a=row_scales,
        scale_b=packed.scales,
        bias=packed.bias if is_fused else None,
        out_dtype=torch.bfloat16,
    ).to(x.dtype)
    if packed.bias is not None and not is_fused:
        y += packed.bias
    return y


def _fixed_linear(
    x: torch.Tensor, packed: CudaWeight, dtype: torch.dtype, *, tile: ProductTile
) -> torch.Tensor:
    """float8 made float16, which is exact, in tiles that do not depend on T."""
    rows, row_scales = quantize_fp8_rows(x)
    return fixed_linear(rows, packed, row_scales=row_scales, dtype=dtype, tile=tile)


def _exact_linear(x: torch.Tensor, packed: CudaWeight, dtype: torch.dtype) -> torch.Tensor:
    assert packed.scales is not None
    scales = packed.scales.t()
    weight = QuantizedWeight(packed.precision, packed.group_size, packed.weight, scales)
    return reference_linear(x.to(dtype), weight, packed.bias)
