"""Weights in 8 or 4 bits: how they are rounded, what that costs, and references of their products.

A weight [out, in] is cut along the inputs into groups. Each output has one scale for each group, so
w = q s, with q an integer: in int8 -127 .. 127, s = max |w| / 127; in int4 -8 .. 7, where s takes
the sign that gives the largest weight of the group the number -8 (as llama.cpp's Q4_0). In fp8 the
group is the whole row and q a number of e4m3, s = max |w| / 448. What is rounded is the same for
every backend.

Checkpoints that are quantised already have groups of other sizes, and more: w = q s - o with an
offset o for each group, or w = t[q] s with a table t of 16 numbers. GGUF's K types have scales of
two levels: s = f d and o = m e, with whole numbers f and m for each group, and floats d and e for
each super-block of 256 inputs.
"""

import dataclasses
from collections.abc import Callable, Iterator

import torch

from loraplex.core.errors import ConfigError
from loraplex.core.weight_precision import WeightPrecision

INT8_GROUP_SIZE = 128

INT4_GROUP_SIZES = (128, 64, 32)

GROUP_SIZES = (16, 32, 64, 128, 256, 512)
"""Group sizes of weights that were quantised elsewhere."""

FP8_DTYPE = torch.float8_e4m3fn
FP8_MAX = 448.0

SUPER_BLOCK = 256
"""Inputs of a super-block."""

SUPER_BLOCK_GROUPS = (16, 32)
"""Group sizes of weights in super-blocks."""

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
    has_byte_inputs: bool = False  # whether a CPU may round inputs to 8 bits; not with the others

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


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ScaleLevels:
    """Scales of two levels: a group's is factor * scale, and minimum * minimum_scale is subtracted.

    SUPER_BLOCK inputs are a super-block.
    """

    factors: torch.Tensor  # [..., out, groups] int8
    scales: torch.Tensor  # [..., out, super-blocks] float32
    minima: torch.Tensor | None = None  # [..., out, groups] int8
    minimum_scales: torch.Tensor | None = None  # [..., out, super-blocks] float32

    def mapped(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "ScaleLevels":
        """Return what `change` gives for each tensor."""
        return ScaleLevels(
            change(self.factors),
            change(self.scales),
            None if self.minima is None else change(self.minima),
            None if self.minimum_scales is None else change(self.minimum_scales),
        )

    def group_scales(self) -> torch.Tensor:
        """[..., out, groups] float32"""
        return _of_groups(self.factors, self.scales)

    def group_offsets(self) -> torch.Tensor | None:
        """[..., out, groups] float32, subtracted; None: 0."""
        if self.minima is None or self.minimum_scales is None:
            return None
        return _of_groups(self.minima, self.minimum_scales)


def _of_groups(factors: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    per_super_block = factors.shape[-1] // scales.shape[-1]
    return factors.float() * scales.repeat_interleave(per_super_block, -1)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SuperBlockWeight:
    """Weight [..., out, in] whose scales have two levels; super-blocks divide the inputs."""

    bits: int
    """4: values are 0 .. 15; 6: -32 .. 31."""
    group_size: int
    values: torch.Tensor  # [..., out, in] int8
    levels: ScaleLevels

    def to(self, device: torch.device) -> "SuperBlockWeight":
        """Return the same weight on this device."""

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(device)

        return dataclasses.replace(
            self, values=moved(self.values), levels=self.levels.mapped(moved)
        )

    def dequantized(self) -> torch.Tensor:
        """[..., out, in] float32"""
        scales, offsets = self.levels.group_scales(), self.levels.group_offsets()
        values = self.values.float() * scales.repeat_interleave(self.group_size, -1)
        if offsets is None:
            return values
        return values - offsets.repeat_interleave(self.group_size, -1)


StoredNumbers = QuantizedWeight | SuperBlockWeight
"""A weight that is quantised already, in a form that kernels may multiply as it is."""


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


def super_block_linear(
    x: torch.Tensor, weight: SuperBlockWeight, bias: torch.Tensor | None
) -> torch.Tensor:
    """x [T, in] -> [T, out] of x's type: the bits that the native kernels give, slowly.

    Each row is rounded to 8 bits with a scale for each super-block. The sums of products times the
    groups' factors, and of inputs times the minima, are whole numbers and exact.
    """
    values, levels, size = weight.values.double(), weight.levels, weight.group_size
    num_groups = SUPER_BLOCK // size
    y = torch.zeros(x.shape[0], values.shape[0])
    for number, first in enumerate(range(0, values.shape[1], SUPER_BLOCK)):
        inputs = slice(first, first + SUPER_BLOCK)
        groups = slice(number * num_groups, (number + 1) * num_groups)
        rows, row_scales = _rounded_rows(x[:, inputs].float(), _INT8_MAX)
        factors = levels.factors[:, groups].double().repeat_interleave(size, 1)
        share = (rows @ (values[:, inputs] * factors).t()).float() * levels.scales[:, number]
        if levels.minima is not None and levels.minimum_scales is not None:
            minima = levels.minima[:, groups].double().repeat_interleave(size, 1)
            share -= (rows @ minima.t()).float() * levels.minimum_scales[:, number]
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
