"""Packed weights stand for what quantization.py rounded, number by number."""

import pytest
import torch

from loraplex.core.weight_precision import WeightPrecision
from loraplex.kernels.cuda import linear_packing
from loraplex.kernels.cuda.linear import CudaLinear
from loraplex.kernels.cuda.linear_packing import dequantized_rows, empty_weight, pack_weight
from loraplex.kernels.quantization import quantize

NATIVE, INT8, INT4, FP8 = WeightPrecision
SIZES = [(INT8, 7), (INT8, 1040), (INT4, 32), (INT4, 96), (INT4, 320), (INT4, 384), (FP8, 48)]


def gaussian(*sizes: int) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes)))


@pytest.mark.parametrize("values_at_once", [1, 5000, 1 << 24])
@pytest.mark.parametrize(("precision", "in_features"), SIZES, ids=str)
def test_nothing_is_lost_in_packing(monkeypatch, precision, in_features, values_at_once):
    monkeypatch.setattr(linear_packing, "_VALUES_AT_ONCE", values_at_once)
    weight = gaussian(50, in_features)
    weight[7] = 0.0
    expected = quantize(weight, precision).dequantized()
    packed = pack_weight(weight, None, precision)
    assert torch.equal(dequantized_rows(packed, slice(0, 50)), expected)
    assert torch.equal(dequantized_rows(packed, slice(3, 9)), expected[3:9])
    norms = linear_packing.squared_row_norms(packed)
    assert norms.dtype == torch.float64
    torch.testing.assert_close(norms, expected.double().square().sum(1))


@pytest.mark.parametrize("precision", [INT8, INT4])
def test_words_hold_every_number(precision):
    """The smallest and the largest, in every place of a word."""
    lowest, highest = (-127, 127) if precision is INT8 else (-8, 7)
    weight = torch.arange(lowest, highest + 1).repeat(300)[: 4 * 256].view(4, 256).float()
    weight[:, ::8] = lowest
    packed = pack_weight(weight, None, precision)
    assert torch.equal(dequantized_rows(packed, slice(0, 4)), weight)


def test_a_weight_that_is_not_quantised_is_kept_itself():
    weight, bias = gaussian(5, 7), gaussian(5)
    packed = pack_weight(weight, bias, NATIVE)
    assert packed.weight is weight
    assert packed.bias is bias
    expected = weight.double().square().sum(1)
    torch.testing.assert_close(linear_packing.squared_row_norms(packed), expected)


@pytest.mark.parametrize("precision", list(WeightPrecision))
def test_a_layer_can_be_taken_apart_and_joined(precision):
    kernel = CudaLinear(torch.device("cpu"), batch_invariant=False)
    bias = gaussian(32)
    packed = kernel.pack(gaussian(32, 96), bias, precision)
    parts = kernel.parts(packed)
    assert kernel.join(parts) == packed
    assert parts.tensors[1] is bias, "readers of a layer's bias look there"


@pytest.mark.parametrize("precision", [INT8, INT4, FP8])
def test_the_form_is_known_before_the_numbers(precision):
    weight = gaussian(32, 96)
    packed, empty = pack_weight(weight, None, precision), empty_weight(weight, None, precision)
    for one, other in ((packed.weight, empty.weight), (packed.scales, empty.scales)):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
