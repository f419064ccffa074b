"""Norms, rotation, gate and table rows at the sizes of real models, against float64."""

import pytest
import torch

from loraplex.kernels.activations import Activation
from loraplex.kernels.cuda import elementwise
from loraplex.kernels.reference import ReferenceKernels

pytestmark = pytest.mark.gpu

# Relative to each value: the two roundings of the dtype, and little else.
ROUNDING = {torch.float32: 3e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
DTYPES = pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
TOKENS = pytest.mark.parametrize("num_tokens", [1, 3, 64, 256, 4096])


def random(*shape, dtype=torch.float32):
    generator = torch.Generator("cuda").manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def assert_rounded(actual, expected, dtype):
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, rtol=ROUNDING[dtype], atol=1e-6)


def normed(x, weight, eps):
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@DTYPES
@TOKENS
@pytest.mark.parametrize("size", [896, 2880, 4096, 5120, 16_384])
def test_norms(num_tokens, size, dtype):
    x, weight = random(num_tokens, size, dtype=dtype), random(size, dtype=dtype)
    residual = random(num_tokens, size + 64, dtype=dtype)[:, :size]
    assert_rounded(elementwise.rms_norm(x, weight, 1e-5), normed(x, weight, 1e-5), dtype)
    output, total = elementwise.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, residual + x)
    assert torch.equal(output, elementwise.rms_norm(total, weight, 1e-5))


@DTYPES
@TOKENS
@pytest.mark.parametrize("size", [768, 1600, 5120])
def test_layer_norms(num_tokens, size, dtype):
    x, residual = random(2, num_tokens, size, dtype=dtype)
    weight, bias = random(2, size, dtype=dtype)
    wide = x.double()
    variance = wide.var(-1, keepdim=True, correction=0)
    expected = (wide - wide.mean(-1, keepdim=True)) / (variance + 1e-5).sqrt()
    expected = expected * weight.double() + bias.double()
    # The parts of a sum may be much larger than it is.
    output = elementwise.layer_norm(x, weight, bias, 1e-5)
    torch.testing.assert_close(output.double(), expected, rtol=ROUNDING[dtype], atol=4e-6)
    output, total = elementwise.add_layer_norm(x, residual, weight, bias, 1e-5)
    assert torch.equal(total, residual + x)
    assert torch.equal(output, elementwise.layer_norm(total, weight, bias, 1e-5))


@DTYPES
@TOKENS
def test_heads_of_a_fused_view_are_normed_and_turned(num_tokens, dtype):
    fused = random(num_tokens, 48 * 128, dtype=dtype)
    before = fused.clone().view(num_tokens, 48, 128)
    query = fused[:, : 32 * 128].view(num_tokens, 32, 128)
    key = fused[:, 32 * 128 : 40 * 128].view(num_tokens, 8, 128)
    weight = random(128, dtype=dtype)
    assert_rounded(elementwise.rms_norm(key, weight, 1e-6), normed(key, weight, 1e-6), dtype)
    angles = 6 * torch.rand(num_tokens, 64, device="cuda")
    elementwise.rotary(query, key, angles.cos(), angles.sin())
    cos, sin = angles.cos().double().unsqueeze(1), angles.sin().double().unsqueeze(1)
    first, second = before[:, :40].double().chunk(2, dim=-1)
    expected = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    after = fused.view(num_tokens, 48, 128)
    # The parts of a difference are much larger than it may be.
    tolerance = ROUNDING[dtype]
    torch.testing.assert_close(after[:, :40].double(), expected, rtol=tolerance, atol=1e-5)
    assert torch.equal(after[:, 40:], before[:, 40:])


@DTYPES
@TOKENS
@pytest.mark.parametrize("size", [4864, 11_008, 14_336])
@pytest.mark.parametrize("activation", Activation)
def test_gates(num_tokens, size, activation, dtype):
    x = random(num_tokens, 2 * size, dtype=dtype)
    gate, up = x.double().chunk(2, dim=-1)
    expected = ReferenceKernels(x.device).activate(gate, activation) * up
    assert_rounded(elementwise.gate(x, activation), expected, dtype)


@DTYPES
@TOKENS
@pytest.mark.parametrize("size", [2304, 4096])
def test_float32_weights_and_factors(num_tokens, size, dtype):
    x, residual = random(2, num_tokens, size, dtype=dtype)
    weight = random(size)
    assert_rounded(elementwise.rms_norm(x, weight, 1e-5), normed(x, weight, 1e-5), dtype)
    total = elementwise.add(x, residual, 0.22)
    # The parts of a sum may be much larger than it is.
    expected = residual.double() + 0.22 * x.double()
    torch.testing.assert_close(total.double(), expected, rtol=ROUNDING[dtype], atol=1e-5)
    for norm in (
        elementwise.add_rms_norm(x, residual, weight, 1e-5, 0.22),
        elementwise.add_layer_norm(x, residual, weight, weight, 1e-5, 0.22),
    ):
        assert torch.equal(norm[1], total)


@DTYPES
@TOKENS
@pytest.mark.parametrize("size", [4096, 256_000])
def test_scaled_and_capped(num_tokens, size, dtype):
    x = 20 * random(min(num_tokens, 64), size, dtype=dtype)
    expected = 30 * torch.tanh(x.double() * 0.5 / 30)
    elementwise.scale(x, 0.5, 30.0)
    assert_rounded(x, expected, dtype)


@DTYPES
@TOKENS
def test_layer_norms_of_heads(num_tokens, dtype):
    heads = random(num_tokens, 40, 128, dtype=dtype)[:, :32]
    weight, bias = random(2, 32, 128)
    wide = heads.double()
    variance = wide.var(-1, keepdim=True, correction=0)
    expected = (wide - wide.mean(-1, keepdim=True)) / (variance + 1e-5).sqrt()
    expected = expected * weight.double() + bias.double()
    output = elementwise.layer_norm(heads, weight, bias, 1e-5)
    torch.testing.assert_close(output.double(), expected, rtol=ROUNDING[dtype], atol=4e-6)


@DTYPES
@TOKENS
@pytest.mark.parametrize("size", [32, 64, 128])
def test_interleaved_pairs_of_a_part_of_heads(num_tokens, size, dtype):
    query = random(num_tokens, 32, 128, dtype=dtype)
    before = query.double()
    angles = 6 * torch.rand(num_tokens, size // 2, device="cuda")
    elementwise.rotary(query, query[:, :0], angles.cos(), angles.sin(), is_interleaved=True)
    cos, sin = angles.cos().double().unsqueeze(1), angles.sin().double().unsqueeze(1)
    first, second = before[..., 0:size:2], before[..., 1:size:2]
    turned = torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(2)
    expected = torch.cat((turned, before[..., size:]), -1)
    torch.testing.assert_close(query.double(), expected, rtol=ROUNDING[dtype], atol=1e-5)


@DTYPES
@TOKENS
@pytest.mark.parametrize("activation", Activation)
def test_activate(num_tokens, activation, dtype):
    x = 4 * random(num_tokens, 6400, dtype=dtype)
    expected = ReferenceKernels(x.device).activate(x.double(), activation)
    assert_rounded(elementwise.activate(x, activation), expected, dtype)


@DTYPES
@TOKENS
@pytest.mark.parametrize("size", [64, 896, 4096])
def test_take_rows(num_tokens, size, dtype):
    table = random(32_000, size, dtype=dtype)
    indices = torch.randint(0, 32_000, (num_tokens,), device="cuda")
    assert torch.equal(elementwise.take_rows(table, indices), table[indices])


def test_a_row_s_bits_do_not_depend_on_company():
    x, weight = random(300, 4096, dtype=torch.bfloat16), random(4096, dtype=torch.bfloat16)
    together = elementwise.rms_norm(x, weight, 1e-5)
    for part in (slice(0, 1), slice(100, 107), slice(299, 300)):
        assert torch.equal(elementwise.rms_norm(x[part], weight, 1e-5), together[part])
