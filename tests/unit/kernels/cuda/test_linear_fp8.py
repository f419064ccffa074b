"""fp8 where there is no GPU: what is refused, what rounds activations, and the fixed product."""

import pytest
import torch

from loraplex.core.errors import ConfigError
from loraplex.core.weight_precision import WeightPrecision
from loraplex.kernels import quantization
from loraplex.kernels.cuda import linear_products
from loraplex.kernels.cuda.linear import CudaLinear
from loraplex.kernels.cuda.linear_packing import pack_weight
from support.fake_gpu import fake_gpu
from support.naming import naming

FP8 = WeightPrecision.FP8


def gaussian(*sizes: int) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes)))


@pytest.mark.parametrize("shape", [(48, 100), (50, 96)])
def test_sizes_must_be_multiples_of_16(shape):
    kernel = CudaLinear(torch.device("cpu"), batch_invariant=False)
    with pytest.raises(ConfigError, match=naming(16, "int8")):
        kernel.pack(gaussian(*shape), None, FP8)


def test_an_old_gpu_is_refused_and_a_new_one_is_not():
    with fake_gpu(90):
        linear_products.check_fp8(torch.empty(16, 16, device="cuda"))
    with fake_gpu(80), pytest.raises(ConfigError, match=naming("8.9", "8.0", "int8")):
        linear_products.check_fp8(torch.empty(16, 16, device="cuda"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_what_cublas_is_given_fits(monkeypatch, dtype):
    """torch itself checks shapes, strides and types, also of tensors that are fake."""
    monkeypatch.setattr(linear_products, "quantize_rows", {(5,): lambda *args, **kwargs: None})
    with fake_gpu(90):
        packed = linear_products.CudaWeight(
            *(FP8, 64, 64, torch.empty(32, 64, dtype=torch.float8_e4m3fn, device="cuda")),
            torch.empty(32, dtype=dtype, device="cuda"),
            torch.empty(1, 32, device="cuda"),
        )
        kernel = CudaLinear(torch.device("cuda"), batch_invariant=False)
        y = kernel.apply(torch.empty(5, 64, dtype=dtype, device="cuda"), packed)
        assert (y.shape, y.dtype) == ((5, 32), dtype)


def test_activations_get_a_scale_for_each_row():
    """Numbers that are exact in e4m3: the interpreter rounds others wrongly."""
    x = gaussian(9, 100).to(torch.float8_e4m3fn).float()
    x[:, 50] = 448.0
    x *= 2.0 ** torch.arange(-4, 5).unsqueeze(1)
    x[2], x[3] = 0.0, 2.0**-110
    x[4, 7], x[5, 0] = torch.nan, -torch.inf
    rows, scales = linear_products.quantize_fp8_rows(x)
    expected_rows, expected_scales = quantization.quantize_fp8_rows(x)
    assert torch.equal(rows.float(), expected_rows.float())
    torch.testing.assert_close(scales, expected_scales, rtol=0, atol=0, equal_nan=True)
    good = [0, 1, 6, 7, 8]
    assert torch.equal(rows[good].float() * scales[good], x[good])
    assert not rows[2:4].float().any()
    assert scales[4:6].isnan().all()


def test_the_fixed_product_of_float8():
    weight, bias, x = gaussian(48, 96), gaussian(48), gaussian(70, 96)
    packed = pack_weight(weight, bias, FP8)
    rows, scales = quantization.quantize_fp8_rows(x)
    y = linear_products.fixed_linear(rows, packed, row_scales=scales, dtype=torch.float32)
    expected = quantization.fp8_linear(x, quantization.quantize(weight, FP8), bias)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    for num_rows in (1, 16, 41):
        part = linear_products.fixed_linear(
            rows[:num_rows], packed, row_scales=scales[:num_rows], dtype=torch.float32
        )
        assert torch.equal(part, y[:num_rows])
