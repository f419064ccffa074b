"""What rounding to 8 and 4 bits costs, and that no row pays for another."""

from collections.abc import Callable

import pytest
import torch

from loraplex.core.errors import ConfigError
from loraplex.core.weight_precision import WeightPrecision
from loraplex.kernels.dispatch import select_kernels
from loraplex.kernels.ops import Kernels
from loraplex.kernels.quantization import (
    QuantizedWeight,
    fp8_linear,
    group_size_of,
    quantization_error,
    quantize,
    quantize_fp8_rows,
    quantized_linear,
    regrouped,
    rounded_linear,
)
from loraplex.kernels.reference import ReferenceKernels
from support.naming import naming

CPU = torch.device("cpu")
INT8, INT4, FP8 = WeightPrecision.INT8, WeightPrecision.INT4, WeightPrecision.FP8
QUANTIZED = [INT8, INT4]

# Relative errors in the 2-norm with Gaussian weights; 16-bit inputs add nothing that shows.
LARGEST_ERROR = {INT8: 0.01, INT4: 0.12, FP8: 0.03}


def gaussian(*sizes: int) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes)))


def error_of(y: torch.Tensor, exact: torch.Tensor) -> float:
    return float((y.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("precision", QUANTIZED)
@pytest.mark.parametrize("in_features", [2048, 1376, 96])
def test_the_error_is_that_of_rounding_the_weight(
    precision: WeightPrecision, in_features: int
) -> None:
    weight, x = gaussian(300, in_features), gaussian(9, in_features)
    exact = x.double() @ weight.double().t()
    quantized = quantize(weight, precision)
    assert error_of(quantized_linear(x, quantized, None), exact) < LARGEST_ERROR[precision]
    rounded = x.double() @ quantized.dequantized().double().t()
    assert error_of(quantized_linear(x, quantized, None), rounded) < 1e-4
    assert error_of(rounded_linear(x, quantized, None), rounded) < 0.01


@pytest.mark.parametrize("precision", [*QUANTIZED, FP8])
def test_the_reported_error_is_that_of_the_whole_weight(precision: WeightPrecision) -> None:
    weight = gaussian(1000, 512)
    difference = quantize(weight, precision).dequantized() - weight
    expected = float(difference.norm() / weight.norm())
    assert quantization_error(weight, precision) == pytest.approx(expected, rel=0.02)
    assert 0 < expected < LARGEST_ERROR[precision]
    assert quantization_error(torch.zeros(10, 512), precision) == 0.0


def test_what_is_not_quantised_has_no_error() -> None:
    assert quantization_error(gaussian(10, 10), WeightPrecision.NATIVE) == 0.0


@pytest.mark.parametrize("precision", QUANTIZED)
def test_every_number_is_within_half_a_step(precision: WeightPrecision) -> None:
    weight = gaussian(64, 640) * torch.logspace(-30, 30, 64).unsqueeze(1)
    quantized = quantize(weight, precision)
    steps = quantized.scales.abs().repeat_interleave(quantized.group_size, 1)[:, :640]
    # The largest number of the other sign may be cut off at 7 of int4's 8 steps.
    allowed = 0.5001 if precision is INT8 else 1.0001
    assert ((quantized.dequantized() - weight).abs() <= allowed * steps).all()
    limits = {INT8: (-127, 127), INT4: (-8, 7)}[precision]
    assert (int(quantized.values.min()), int(quantized.values.max())) == limits


@pytest.mark.parametrize("precision", [*QUANTIZED, FP8])
def test_zeros_and_the_smallest_numbers_stay_finite(precision: WeightPrecision) -> None:
    weight = torch.zeros(3, 128)
    weight[1], weight[2, 5] = 1e-44, 1e-38
    quantized = quantize(weight, precision)
    assert quantized.dequantized().isfinite().all()
    assert torch.equal(quantized.values, torch.zeros_like(quantized.values))


@pytest.mark.parametrize("precision", [*QUANTIZED, FP8])
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_a_weight_must_hold_numbers(precision: WeightPrecision, bad: float) -> None:
    weight = gaussian(3, 128)
    weight[1, 100] = bad
    with pytest.raises(ConfigError, match=naming("NaN")):
        quantize(weight, precision)


def test_group_sizes() -> None:
    sizes = {inputs: group_size_of(INT4, inputs) for inputs in (2048, 5632, 576, 1376, 128, 32)}
    assert sizes == {2048: 128, 5632: 128, 576: 64, 1376: 32, 128: 128, 32: 32}
    assert group_size_of(INT8, 7) == 128
    assert group_size_of(WeightPrecision.NATIVE, 7) == 0
    with pytest.raises(ConfigError, match=naming(100, 32)):
        group_size_of(INT4, 100)


@pytest.mark.parametrize("linear", [quantized_linear, rounded_linear])
@pytest.mark.parametrize("precision", QUANTIZED)
def test_a_large_row_changes_no_bit_of_another(
    precision: WeightPrecision,
    linear: Callable[[torch.Tensor, QuantizedWeight, torch.Tensor | None], torch.Tensor],
) -> None:
    weight, x = quantize(gaussian(40, 256), precision), gaussian(6, 256)
    expected = linear(x, weight, None)
    x[2] *= 20.0
    x[4] = torch.nan
    y = linear(x, weight, None)
    assert torch.equal(y[[0, 1, 3, 5]], expected[[0, 1, 3, 5]])
    assert y[4].isnan().all()


@pytest.mark.parametrize("kernels", [ReferenceKernels(CPU), select_kernels(CPU)], ids=type)
@pytest.mark.parametrize("precision", QUANTIZED)
def test_every_backend_serves_the_same_numbers(
    kernels: Kernels, precision: WeightPrecision
) -> None:
    """Inputs that 8 bits hold exactly: some kernels round inputs, too."""
    weight, bias = gaussian(50, 256), gaussian(50)
    x = (gaussian(9, 256) * 40).round().clamp(-127, 127)
    x[:, ::128] = 127.0
    packed = kernels.pack_linear(weight, bias, precision)
    expected = quantized_linear(x, quantize(weight, precision), bias)
    assert error_of(kernels.linear(x, packed), expected.double()) < 1e-4
    assert error_of(kernels.linear(x, packed), x.double() @ weight.double().t() + bias) > 1e-3


@pytest.mark.parametrize("precision", [*QUANTIZED, FP8])
def test_the_largest_number_of_a_group_is_kept(precision: WeightPrecision) -> None:
    """Whatever its sign, and although int4 reaches further below zero than above."""
    weight = gaussian(64, 512)
    quantized = quantize(weight, precision)
    groups = weight.reshape(-1, quantized.group_size)
    places = groups.abs().argmax(1, keepdim=True)
    kept = quantized.dequantized().reshape_as(groups).gather(1, places)
    torch.testing.assert_close(kept, groups.gather(1, places), rtol=1e-6, atol=0.0)


def test_fp8_has_one_scale_for_each_output() -> None:
    weight = gaussian(20, 96) * torch.logspace(-20, 20, 20).unsqueeze(1)
    quantized = quantize(weight, FP8)
    assert (quantized.values.dtype, quantized.scales.shape) == (torch.float8_e4m3fn, (20, 1))
    assert quantized.group_size == group_size_of(FP8, 96) == 96
    # 3 bits after the point, and steps of 2^-9 where numbers are small.
    allowed = (weight.abs() * 2**-4).maximum(quantized.scales * 2**-10) * 1.0001
    assert ((quantized.dequantized() - weight).abs() <= allowed).all()


def test_the_products_of_fp8() -> None:
    weight, bias, x = gaussian(48, 96), gaussian(48), gaussian(9, 96)
    quantized = quantize(weight, FP8)
    rows, scales = quantize_fp8_rows(x)
    assert error_of(rows.double() * scales, x.double()) < LARGEST_ERROR[FP8]
    y = fp8_linear(x, quantized, bias)
    rounded = (rows.double() * scales) @ quantized.dequantized().double().t() + bias
    assert error_of(y, rounded) < 1e-6
    assert error_of(y, x.double() @ weight.double().t() + bias) < 2 * LARGEST_ERROR[FP8]
    assert fp8_linear(x.half(), quantized, bias).dtype == torch.float16


def test_in_fp8_too_a_row_keeps_to_itself() -> None:
    weight, x = quantize(gaussian(40, 256), FP8), gaussian(7, 256)
    expected = fp8_linear(x, weight, None)
    x[2] *= 1000.0
    x[3], x[4, 5], x[5, 0] = 0.0, torch.nan, torch.inf
    y = fp8_linear(x, weight, None)
    assert torch.equal(y[[0, 1, 6]], expected[[0, 1, 6]])
    assert y[2].isfinite().all()
    assert torch.equal(y[3], torch.zeros(40))
    assert y[4:6].isnan().all()


def test_the_reference_backend_multiplies_rounded_weights() -> None:
    weight, x = gaussian(50, 256), gaussian(9, 256)
    kernels = ReferenceKernels(CPU)
    y = kernels.linear(x, kernels.pack_linear(weight, None, FP8))
    assert error_of(y, x.double() @ quantize(weight, FP8).dequantized().double().t()) < 1e-6


def test_weights_of_stored_formats_mean_what_their_formulas_say() -> None:
    generator = torch.Generator().manual_seed(3)
    values = torch.randint(-8, 8, (5, 48), generator=generator, dtype=torch.int8)
    scales, offsets = torch.rand(2, 5, 3, generator=generator)
    weight = QuantizedWeight(WeightPrecision.INT4, 16, values, scales, offsets=offsets)
    wide = [group.repeat_interleave(16, 1) for group in (scales, offsets)]
    assert torch.equal(weight.dequantized(), values.float() * wide[0] - wide[1])
    assert torch.equal(regrouped(weight, 8).dequantized(), weight.dequantized())

    table = tuple(range(-40, 40, 5))
    codes = torch.randint(16, (5, 48), generator=generator, dtype=torch.int8)
    by_table = QuantizedWeight(WeightPrecision.INT4, 16, codes, scales, table=table)
    assert torch.equal(by_table.dequantized(), (codes.float() * 5 - 40) * wide[0])

    x = torch.randn(4, 48, generator=generator)
    for stored in (weight, by_table):
        wanted = x.double() @ stored.dequantized().double().t()
        assert torch.allclose(quantized_linear(x, stored, None).double(), wanted, atol=2e-2)


def test_one_group_of_any_size_is_cut() -> None:
    values = torch.ones(2, 20, dtype=torch.int8)
    weight = QuantizedWeight(WeightPrecision.INT8, 20, values, torch.tensor([[2.0], [3.0]]))
    cut = regrouped(weight, 16)
    assert cut.scales.tolist() == [[2.0, 2.0], [3.0, 3.0]]
    assert torch.equal(cut.dequantized(), weight.dequantized())
