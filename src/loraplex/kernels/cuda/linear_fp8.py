"""Products of float8 by float8: half the bytes of 16 bits, for weights and activations.

The weight has a scale for each output. A step's activations are rounded with one for each token, so
that no request feels another.
"""

from collections.abc import Callable

import torch

from loraplex.core.errors import ConfigError
from loraplex.kernels.cuda.linear_packing import PackedWeight
from loraplex.kernels.cuda.linear_products import fixed_linear
from loraplex.kernels.cuda.programs.linear_fp8 import quantize_rows
from loraplex.kernels.quantization import FP8_DTYPE, FP8_MAX, SMALLEST_ROW, QuantizedWeight
from loraplex.kernels.quantization import fp8_linear as reference_linear

_SIZE_UNIT = 16
_LEAST_CAPABILITY = (8, 9)
_READ_AT_ONCE = 2048

Fp8Product = Callable[[torch.Tensor, PackedWeight, torch.dtype], torch.Tensor]
"""x [T, in] of 16 or 32 bits -> [T, out] of x's type, or float32."""


def fp8_product(device: torch.device, *, batch_invariant: bool) -> Fp8Product:
    """What multiplies there; in torch on a CPU, where every sum is exact."""
    if device.type == "cpu":
        return _exact_linear
    return _fixed_linear if batch_invariant else _cublas_linear


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


def _cublas_linear(x: torch.Tensor, packed: PackedWeight, dtype: torch.dtype) -> torch.Tensor:
    """torch has bfloat16 results only where rows and columns are scaled."""
    if dtype != x.dtype:
        return _fixed_linear(x, packed, dtype)
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


def _fixed_linear(x: torch.Tensor, packed: PackedWeight, dtype: torch.dtype) -> torch.Tensor:
    """float8 made float16, which is exact, in tiles that do not depend on T."""
    rows, row_scales = quantize_fp8_rows(x)
    return fixed_linear(rows, packed, row_scales=row_scales, dtype=dtype)


def _exact_linear(x: torch.Tensor, packed: PackedWeight, dtype: torch.dtype) -> torch.Tensor:
    assert packed.scales is not None
    scales = packed.scales.t()
    weight = QuantizedWeight(packed.precision, packed.group_size, packed.weight, scales)
    return reference_linear(x.to(dtype), weight, packed.bias)
