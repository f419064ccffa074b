"""Weights in 8 or 4 bits: how they are rounded, what that costs, and references of their products.

A weight [out, in] is cut along the inputs into groups. Each output has one scale for each group, so
w = q s, with q an integer: in int8 -127 .. 127, s = max |w| / 127; in int4 -8 .. 7, where s takes
the sign that gives the largest weight of the group the number -8 (as llama.cpp's Q4_0). In fp8 the
group is the whole row and q a number of e4m3, s = max |w| / 448. What is rounded is the same for
every backend.

Checkpoints that are quantised already have groups of other sizes, and more: w = q s - o with an
offset o for each group, or w = t[q] s with a table t of 16 numbers.
"""

import dataclasses
from collections.abc import Iterator

import torch

from loraplex.core.errors import ConfigError
from loraplex.core.weight_precision import WeightPrecision

INT8_GROUP_SIZE = 128

INT4_GROUP_SIZES = (128, 64, 32)

GROUP_SIZES = (16, 32, 64, 128, 256, 512)
"""Group sizes of weights that were quantised elsewhere."""

FP8_DTYPE = torch.float8_e4m3fn
FP8_MAX = 448.0

SMALLEST_ROW = 2.0**-100
"""A row or group of numbers that are all smaller counts as zeros: its scale has no reciprocal."""

_INT8_MAX = 127.0
_INT16_MAX = 32767.0
_SAMPLED_ROWS = 256


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """Weight [..., out, in] as numbers and scales. The last group may be shorter."""

    precision: WeightPrecision
    """Width of the numbers: INT8 -128 .. 127, INT4 -8 .. 7, or 0 .. 15 with a table; or FP8."""
    group_size: int
    values: torch.Tensor  # [..., out, in] int8, or FP8_DTYPE
    scales: torch.Tensor  # [..., out, groups] float32
    offsets: torch.Tensor | None = None  # [..., out, groups] float32, subtracted; None: 0
    table: tuple[int, ...] | None = None  # what each of 16 numbers stands for; None: itself

    def to(self, device: torch.device) -> "QuantizedWeight":
        """Return the same weight on this device."""
        return dataclasses.replace(
            self,
            values=self.values.to(device),
            scales=self.scales.to(device),
            offsets=None if self.offsets is None else self.offsets.to(device),
        )

    def dequantized(self) -> torch.Tensor:
        """[..., out, in] float32"""
        values = self.whole_numbers().float() * self._spread(self.scales)
        return values if self.offsets is None else values - self._spread(self.offsets)

    def whole_numbers(self) -> torch.Tensor:
        """Return the factors of the scales: [..., out, in]."""
        if self.table is None:
            return self.values
        return torch.tensor(self.table, device=self.values.device)[self.values.int()]

    def _spread(self, groups: torch.Tensor) -> torch.Tensor:
        """Return a number for each input from one for each group."""
        return groups.repeat_interleave(self.group_size, -1)[..., : self.values.shape[-1]]


def largest_entry(group_size: int) -> int:
    """Return what no number of a table may exceed, so that the sum of a group fits in 32 bits."""
    return (1 << 16) // group_size - 1


def regrouped(weight: QuantizedWeight, group_size: int) -> QuantizedWeight:
    """Return the same weight in smaller groups, of a size that divides the present one.

    A single group has any size.
    """
    num_groups = -(-weight.values.shape[-1] // group_size)

    def repeated(groups: torch.Tensor) -> torch.Tensor:
        is_one = groups.shape[-1] == 1
        times = num_groups if is_one else weight.group_size // group_size
        return groups.repeat_interleave(times, -1)[..., :num_groups].contiguous()

    return dataclasses.replace(
        weight,
        group_size=group_size,
        scales=repeated(weight.scales),
        offsets=None if weight.offsets is None else repeated(weight.offsets),
    )


def group_size_of(precision: WeightPrecision, in_features: int) -> int:
    """Inputs that share a scale; 0 where there are no scales.

    Raises ConfigError if int4 has no group size that divides in_features.
    """
    if precision is WeightPrecision.NATIVE:
        return 0
    if precision is WeightPrecision.INT8:
        return INT8_GROUP_SIZE
    if precision is WeightPrecision.FP8:
        return in_features
    for group_size in INT4_GROUP_SIZES:
        if in_features % group_size == 0:
            return group_size
    raise ConfigError(
        f"a linear layer of {in_features} inputs cannot be quantised to int4: its inputs must be a "
        f"multiple of {INT4_GROUP_SIZES[-1]}; int8 takes any number"
    )


def quantize(
    weight: torch.Tensor, precision: WeightPrecision, group_size: int | None = None
) -> QuantizedWeight:
    """weight [out, in] of a floating type. group_size: of int4, instead of the usual one.

    Raises ConfigError if the weight holds an infinity or a NaN, or int4 has no group size.
    """
    out_features, in_features = weight.shape
    group_size = group_size or group_size_of(precision, in_features)
    padding = -in_features % group_size
    groups = torch.nn.functional.pad(weight.float(), (0, padding))
    groups = groups.reshape(out_features, -1, group_size)
    largest = groups.abs().amax(2)
    if not bool(largest.isfinite().all()):
        raise ConfigError("a weight that holds an infinity or a NaN cannot be quantised")
    if precision is WeightPrecision.INT4:
        scales = torch.where(-groups.amin(2) == largest, -largest, largest) / -8.0
    else:
        scales = largest / (127.0 if precision is WeightPrecision.INT8 else FP8_MAX)
    # A group of numbers so small that their scale is 0, or has no reciprocal, becomes zeros.
    factors = torch.where(largest < SMALLEST_ROW, 0.0, 1.0 / scales)
    values = _rounded(groups * factors.unsqueeze(2), precision)
    values = values.reshape(out_features, -1)[:, :in_features].contiguous()
    return QuantizedWeight(precision, group_size, values, scales.contiguous())


def _rounded(numbers: torch.Tensor, precision: WeightPrecision) -> torch.Tensor:
    """numbers: float32 in units of their scales; overwritten."""
    match precision:
        case WeightPrecision.FP8:
            return numbers.clamp_(-FP8_MAX, FP8_MAX).to(FP8_DTYPE)
        case WeightPrecision.INT8:
            return numbers.round_().clamp_(-127, 127).to(torch.int8)
    return numbers.round_().clamp_(-8, 7).to(torch.int8)


def quantization_error(weight: torch.Tensor, precision: WeightPrecision) -> float:
    """How far the quantised weight is from `weight`: |difference| / |weight| in the 2-norm.

    From at most 256 of its rows, evenly spaced; 0 for NATIVE and for a weight of zeros.
    """
    if precision is WeightPrecision.NATIVE:
        return 0.0
    step = -(-weight.shape[0] // _SAMPLED_ROWS)
    sample = weight[::step].float()
    norm = float(sample.norm())
    difference = quantize(sample, precision).dequantized() - sample
    return float(difference.norm()) / norm if norm > 0 else 0.0


def quantized_linear(
    x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None
) -> torch.Tensor:
    """x [T, in] -> [T, out] of x's type: the bits that the native kernels give, slowly.

    Each row is rounded to 16 bits with a scale of its own. The sums of a group, of products and of
    inputs alone, are whole numbers and exact, in float64 as in int32.
    """
    rows, row_scales = _rounded_rows(x.float(), _INT16_MAX)
    values = weight.whole_numbers().double()
    y = torch.zeros(x.shape[0], values.shape[0])
    for group, inputs in enumerate(_groups(weight)):
        share = (rows[:, inputs] @ values[:, inputs].t()).float() * weight.scales[:, group]
        if weight.offsets is not None:
            input_sums = rows[:, inputs].sum(1, keepdim=True).float()
            share -= input_sums * weight.offsets[:, group]
        y += share
    y *= row_scales
    if bias is not None:
        y += bias.float()
    return y.to(x.dtype)


def rounded_linear(
    x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None
) -> torch.Tensor:
    """Do the same with inputs that are rounded to 8 bits: each row has a scale for each group.

    For weights without offsets.
    """
    values = weight.whole_numbers().double()
    y = torch.zeros(x.shape[0], values.shape[0])
    for group, inputs in enumerate(_groups(weight)):
        rows, row_scales = _rounded_rows(x[:, inputs].float(), _INT8_MAX)
        share = (rows @ values[:, inputs].t()).float() * weight.scales[:, group]
        y += share * row_scales
    if bias is not None:
        y += bias.float()
    return y.to(x.dtype)


def _groups(weight: QuantizedWeight) -> Iterator[slice]:
    for first in range(0, weight.values.shape[-1], weight.group_size):
        yield slice(first, first + weight.group_size)


def _rounded_rows(x: torch.Tensor, most: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole numbers [T, in] in float64, of magnitudes up to `most`, and scales [T, 1].

    A row of tiny numbers counts as zeros; the scale of one that holds an infinity or a NaN is NaN.
    """
    largest = x.abs().amax(1, keepdim=True)
    is_finite, is_zero = largest.isfinite(), largest < SMALLEST_ROW
    scales = torch.where(is_finite, largest / most, torch.nan)
    scales = torch.where(is_zero, 0.0, scales)
    # A number over a tensor would be rounded twice: torch multiplies by the reciprocal.
    factors = torch.full_like(largest, most) / largest
    factors = torch.where(is_finite & ~is_zero, factors, 0.0)
    rows = torch.where(is_finite, x, 0.0) * factors
    return rows.round().double(), scales


def quantize_fp8_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Activations x [T, in] as FP8_DTYPE [T, in], and float32 scales [T, 1]: a row is the product.

    A row of tiny numbers counts as zeros; the scale of one that holds an infinity or a NaN is NaN.
    """
    wide = x.float()
    largest = wide.abs().amax(1, keepdim=True)
    is_finite, is_zero = largest.isfinite(), largest < SMALLEST_ROW
    # Numbers over tensors would be rounded twice: torch multiplies by the reciprocal.
    most = torch.full_like(largest, FP8_MAX)
    scales = torch.where(is_finite, torch.where(is_zero, 0.0, largest / most), torch.nan)
    factors = torch.where(is_finite & ~is_zero, most / largest, 0.0)
    rows = torch.where(is_finite, wide, 0.0) * factors
    return rows.clamp_(-FP8_MAX, FP8_MAX).to(FP8_DTYPE), scales


def fp8_linear(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """x [T, in] -> [T, out] of x's type, slowly, where no device multiplies fp8.

    The sums are exact: each product is a multiple of 2^-18, and float64 holds them all.
    """
    rows, row_scales = quantize_fp8_rows(x)
    y = (rows.double() @ weight.values.double().t()).float()
    y *= weight.scales[:, 0] * row_scales
    if bias is not None:
        y += bias.float()
    return y.to(x.dtype)
