"""Rounding of a weight to symmetric integers, by itself or for the inputs that it meets.

Without inputs each weight is rounded to the nearest code, with the scale of each group that has the
least squared error. With the second moments H = X^T X of the inputs X the columns are rounded one
after another, and the columns that follow take up each one's error: GPTQ (Frantar et al., 2022,
arXiv:2210.17323, algorithm 1), which lessens the squared error of the outputs, tr(E H E^T).
"""

import dataclasses
import math

import torch

from loraplex.execution.weights.quantized.stored_weight import StoredWeight

_CLIPS = 24
"""Number of scales that are tried for each group."""
_SMALLEST_CLIP = 0.5
"""Smallest share of a group's largest magnitude that the largest code stands for."""
_DAMPING = 0.01
"""Share of H's mean diagonal that is added to it, as in GPTQ."""
_BLOCK = 128
"""Columns whose errors reach the columns after them in one product."""
_ROWS = 1 << 21
"""Weights whose scales are searched at once."""


_SMALLEST_GROUP = 32


@dataclasses.dataclass(frozen=True, slots=True)
class IntegerForm:
    bits: int
    group_size: int | None
    """Inputs that share a scale; None: all of an output."""

    def size_for(self, num_inputs: int) -> int | None:
        """Return the inputs that share a scale, in equal groups as the format demands; None: all.

        Where group_size does not divide the inputs it is the greatest common divisor, if kernels
        of other servers have it (32 or more).
        """
        if self.group_size is None:
            return None
        size = math.gcd(num_inputs, self.group_size)
        return size if size >= min(self.group_size, _SMALLEST_GROUP) else None


@dataclasses.dataclass(frozen=True, slots=True)
class WeightError:
    """Squared norms; they add over parts of a layer."""

    weight: float
    """Squared norm of the difference."""
    weight_total: float
    output: float = 0.0
    """That of the difference of the outputs, for the inputs of H; 0 without."""
    output_total: float = 0.0

    def __add__(self, other: "WeightError") -> "WeightError":
        return WeightError(
            self.weight + other.weight,
            self.weight_total + other.weight_total,
            self.output + other.output,
            self.output_total + other.output_total,
        )

    @property
    def relative_weight(self) -> float:
        return math.sqrt(self.weight / self.weight_total) if self.weight_total else 0.0

    @property
    def relative_output(self) -> float | None:
        """None: no inputs were seen."""
        return math.sqrt(self.output / self.output_total) if self.output_total else None


def quantize_weight(
    weight: torch.Tensor, form: IntegerForm, moments: torch.Tensor | None = None
) -> tuple[StoredWeight, WeightError]:
    """Return the codes of a weight [out, in], and what they cost.

    moments: H [in, in] float32 or float64 of the inputs; None: none are known. The scales are
    exact in the weight's type. Deterministic.
    """
    wide, size = weight.float(), form.size_for(weight.shape[1]) or weight.shape[1]
    if moments is None or not bool(moments.any()):
        scales = _scales(wide, form.bits, size, weight.dtype)
        codes = _nearest(wide, scales.repeat_interleave(size, 1), form.bits)
    else:
        codes, scales = _with_feedback(wide, form.bits, size, weight.dtype, moments)
    middle = 1 << (form.bits - 1)
    stored = StoredWeight(
        codes=(codes + middle).to(torch.uint8),
        scales=scales,
        zeros=torch.full(scales.shape, middle, dtype=torch.uint8),
        group_size=size,
        bits=form.bits,
    )
    return stored, _error(wide, stored.decoded(), moments)


def _error(
    weight: torch.Tensor, decoded: torch.Tensor, moments: torch.Tensor | None
) -> WeightError:
    difference = weight - decoded
    errors = [tensor.double().square().sum().item() for tensor in (difference, weight)]
    if moments is not None:
        for tensor in (difference, weight):
            product = tensor @ moments.to(tensor.dtype)
            errors.append(max((product * tensor).double().sum().item(), 0.0))
    return WeightError(*errors)


def _nearest(weight: torch.Tensor, scales: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the codes, as floats from -2^(bits - 1)."""
    largest = (1 << (bits - 1)) - 1
    return (weight / scales).round_().clamp_(-largest - 1, largest)


def _scales(
    weight: torch.Tensor,
    bits: int,
    size: int,
    dtype: torch.dtype,
    importance: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the best scale of each group: [out, in] -> [out, in / size] float32, exact in dtype.

    importance: factors [in] of the squared errors; None: 1.
    """
    groups = weight.view(weight.shape[0], -1, size)
    if importance is None:
        importance = torch.ones(weight.shape[1])
    factors = importance.view(-1, size)
    rows = max(1, _ROWS // weight.shape[1])
    found = [_best_scales(part, bits, dtype, factors) for part in torch.split(groups, rows)]
    return torch.cat(found)


def _best_scales(
    groups: torch.Tensor, bits: int, dtype: torch.dtype, factors: torch.Tensor
) -> torch.Tensor:
    """groups [out, n, size], factors [n, size] -> [out, n]."""
    largest_code = (1 << (bits - 1)) - 1
    largest = groups.abs().amax(-1)
    smallest = torch.finfo(dtype).tiny
    best = torch.full_like(largest, torch.inf)
    scales = torch.empty_like(largest)
    for clip in torch.linspace(1.0, _SMALLEST_CLIP, _CLIPS).tolist():
        tried = (largest * (clip / largest_code)).to(dtype).float().clamp_(min=smallest)
        wide = tried.unsqueeze(-1)
        error = groups - _nearest(groups, wide, bits) * wide
        squared = (error.square_() * factors).sum(-1)
        is_better = squared < best
        best = torch.where(is_better, squared, best)
        scales = torch.where(is_better, tried, scales)
    return scales


def _with_feedback(
    weight: torch.Tensor, bits: int, size: int, dtype: torch.dtype, moments: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes [out, in] and scales [out, in / size]."""
    num_inputs = weight.shape[1]
    left = weight.clone()
    diagonal = moments.diagonal()
    factor = _inverse_factor(moments).to(left.dtype)
    importance = diagonal.to(left.dtype)
    codes, scales = torch.empty_like(left), torch.empty(len(left), num_inputs // size)
    if size > _BLOCK:
        scales = _scales(left, bits, size, dtype, importance)
    for first in range(0, num_inputs, step := min(size, _BLOCK)):
        end = min(first + step, num_inputs)
        group = first // size
        if size <= _BLOCK:
            # The scales suit the weights with the errors that they have taken up so far.
            own = _scales(left[:, first:end], bits, size, dtype, importance[first:end])
            scales[:, group : group + 1] = own
        block, errors = left[:, first:end], torch.empty(len(left), end - first)
        upper = factor[first:end, first:end]
        for column in range(end - first):
            scale = scales[:, (first + column) // size]
            code = _nearest(block[:, column], scale, bits)
            codes[:, first + column] = code
            error = (block[:, column] - code * scale) / upper[column, column]
            block[:, column:] -= error.unsqueeze(1) * upper[column, column:]
            errors[:, column] = error
        left[:, end:] -= errors @ factor[first:end, end:]
    return codes, scales


def _inverse_factor(moments: torch.Tensor) -> torch.Tensor:
    """Return the upper triangular U with U^T U = (H + damping)^-1, float64."""
    damped = moments.double()
    # An input that was always 0 has no weight in the error, and must not make H singular.
    damping = _DAMPING * damped.diagonal().mean()
    damped = damped + torch.eye(len(damped), dtype=damped.dtype) * damping
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    upper: torch.Tensor = torch.linalg.cholesky(inverse, upper=True)
    return upper
