"""Linear layers on a GPU: real shapes and bfloat16, against float64."""

import dataclasses

import pytest
import torch

from loraplex.core.weight_precision import WeightPrecision
from loraplex.kernels import quantization
from loraplex.kernels.cuda import linear_products
from loraplex.kernels.cuda.linear import CudaLinear
from loraplex.kernels.quantization import quantize
from support.stored_weights import FORMS, stored_weight

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
NATIVE, INT8, INT4, FP8 = WeightPrecision
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# cuBLAS may add float32 in another order; the results are rounded to the dtype once.
TOLERANCE = {torch.bfloat16: 3e-3, torch.float16: 5e-4, torch.float32: 2e-6}
# (in, out): qkv and down of an 8B model, a small model's odd width, a part of an lm_head.
SIZES = [(4096, 6144), (14336, 4096), (1376, 528), (2048, 32000)]
COUNTS = (1, 16, 17, 64, 65, 300)


def gaussian(*sizes: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator(CUDA).manual_seed(sum(sizes))
    return torch.randn(sizes, generator=generator, device=CUDA).to(dtype)


def has_fp8() -> bool:
    return torch.cuda.get_device_capability() >= (8, 9)


def skip_without_fp8(precision: WeightPrecision) -> None:
    if precision is FP8 and not has_fp8():
        pytest.skip("this GPU has no fp8")


def error_of(y: torch.Tensor, expected: torch.Tensor) -> float:
    return float((y.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("batch_invariant", [False, True], ids=["free", "fixed"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("precision", [NATIVE, INT8, INT4])
@pytest.mark.parametrize(("in_features", "out_features"), SIZES, ids=str)
def test_it_is_the_product(in_features, out_features, precision, dtype, batch_invariant):
    kernel = CudaLinear(CUDA, batch_invariant=batch_invariant)
    weight = gaussian(out_features, in_features, dtype=dtype)
    bias = gaussian(out_features, dtype=dtype)
    packed = kernel.pack(weight, bias, precision)
    exact = weight if precision is NATIVE else quantize(weight, precision).dequantized()
    exact = exact.double()
    torch.testing.assert_close(kernel.squared_row_norms(packed), exact.square().sum(1))
    for num_rows in COUNTS:
        x = gaussian(num_rows, in_features, dtype=dtype)
        expected = x.double() @ exact.t() + bias.double()
        assert error_of(kernel.apply(x, packed), expected) < TOLERANCE[dtype], num_rows


@pytest.mark.parametrize("batch_invariant", [False, True], ids=["free", "fixed"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group_size", [16, 32, 128, 512])
@pytest.mark.parametrize("form", FORMS)
def test_weights_of_checkpoints_are_the_product(form, group_size, dtype, batch_invariant):
    """bfloat16 rounds the entries of a table."""
    kernel = CudaLinear(CUDA, batch_invariant=batch_invariant)
    made = stored_weight(form, group_size, 1536, 200, torch.Generator().manual_seed(group_size))
    scales = made.scales / 1000
    offsets = None if made.offsets is None else made.offsets / 10000
    weight = dataclasses.replace(made, scales=scales, offsets=offsets).to(CUDA)
    packed = kernel.pack(weight, None, NATIVE)
    exact = weight.dequantized().double()
    tolerance = 4e-3 if made.table and dtype == torch.bfloat16 else TOLERANCE[dtype]
    for num_rows in COUNTS:
        x = gaussian(num_rows, 1536, dtype=dtype)
        y = kernel.apply(x, packed)
        assert error_of(y, x.double() @ exact.t()) < tolerance, num_rows
        if batch_invariant:
            assert torch.equal(kernel.apply(x[:1], packed), y[:1])


@pytest.mark.parametrize("batch_invariant", [False, True], ids=["free", "fixed"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("in_features", "out_features"), SIZES, ids=str)
def test_fp8_is_the_product_of_what_was_rounded(in_features, out_features, dtype, batch_invariant):
    skip_without_fp8(FP8)
    kernel = CudaLinear(CUDA, batch_invariant=batch_invariant)
    weight = gaussian(out_features, in_features, dtype=dtype)
    bias = gaussian(out_features, dtype=dtype)
    packed = kernel.pack(weight, bias, FP8)
    exact = quantize(weight, FP8).dequantized().double()
    for num_rows in COUNTS:
        x = gaussian(num_rows, in_features, dtype=dtype)
        rows, scales = quantization.quantize_fp8_rows(x)
        expected = (rows.double() * scales.double()) @ exact.t() + bias.double()
        # The free product comes as bfloat16, whatever the model's type.
        assert error_of(kernel.apply(x, packed), expected) < 5e-3, num_rows


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_activations_are_rounded_as_the_reference_rounds_them(dtype):
    skip_without_fp8(FP8)
    x = gaussian(40, 5000, dtype=dtype) * torch.logspace(-4, 4, 40, device=CUDA).to(dtype)[:, None]
    x[2], x[4, 7], x[5, 0] = 0.0, torch.nan, -torch.inf
    rows, scales = linear_products.quantize_fp8_rows(x)
    expected_rows, expected_scales = quantization.quantize_fp8_rows(x)
    torch.testing.assert_close(scales, expected_scales, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(rows.view(torch.uint8), expected_rows.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("precision", list(WeightPrecision))
@pytest.mark.parametrize(("in_features", "out_features"), [(4096, 6144), (1376, 528)], ids=str)
def test_a_row_has_the_same_bits_alone_and_in_company(in_features, out_features, precision, dtype):
    skip_without_fp8(precision)
    kernel = CudaLinear(CUDA, batch_invariant=True)
    weight = gaussian(out_features, in_features, dtype=dtype)
    packed = kernel.pack(weight, gaussian(out_features, dtype=dtype), precision)
    x = gaussian(300, in_features, dtype=dtype)
    expected = kernel.apply(x, packed)
    for num_rows in (*range(1, 41), 64, 65, 128, 299):
        assert torch.equal(kernel.apply(x[:num_rows], packed), expected[:num_rows]), num_rows
    for row in (1, 63, 64, 299):
        assert torch.equal(kernel.apply(x[row : row + 1], packed)[0], expected[row]), row


@pytest.mark.parametrize("precision", list(WeightPrecision))
def test_the_same_call_gives_the_same_bits(precision):
    """Also where sums are split: nothing is added in order of arrival."""
    skip_without_fp8(precision)
    kernel = CudaLinear(CUDA, batch_invariant=False)
    packed = kernel.pack(gaussian(4096, 14336, dtype=torch.bfloat16), None, precision)
    for num_rows in (1, 16, 40, 300):
        x = gaussian(num_rows, 14336, dtype=torch.bfloat16)
        first = kernel.apply(x, packed)
        for _ in range(20):
            assert torch.equal(kernel.apply(x, packed), first)


@pytest.mark.parametrize("precision", list(WeightPrecision))
def test_a_graph_can_hold_it(precision):
    skip_without_fp8(precision)
    kernel = CudaLinear(CUDA, batch_invariant=False)
    packed = kernel.pack(gaussian(6144, 4096, dtype=torch.bfloat16), None, precision)
    x = gaussian(8, 4096, dtype=torch.bfloat16)
    kernel.apply(x, packed)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = kernel.apply(x, packed)
    x.copy_(gaussian(9, 4096, dtype=torch.bfloat16)[1:])
    graph.replay()
    assert torch.equal(y, kernel.apply(x, packed))


@pytest.mark.parametrize("precision", [INT8, INT4, FP8])
def test_packing_a_large_weight_takes_little_beside_it(precision):
    skip_without_fp8(precision)
    kernel = CudaLinear(CUDA, batch_invariant=False)
    weight = gaussian(64128, 4096, dtype=torch.bfloat16)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    packed = kernel.pack(weight, None, precision)
    peak = torch.cuda.max_memory_allocated() - before
    kept = sum(tensor.nbytes for tensor in kernel.parts(packed).tensors if tensor is not None)
    assert kept < 0.53 * weight.nbytes
    assert peak < kept + (512 << 20)
