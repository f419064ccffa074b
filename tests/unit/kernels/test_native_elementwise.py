"""What lies between products, natively, against plain formulas in float64; and a row's bits."""

import functools

import pytest
import torch

from loraplex.core.errors import InternalError
from loraplex.kernels.activations import Activation
from loraplex.kernels.native.elementwise import NativeElementwise
from loraplex.kernels.native.library import (
    NativeLibraryError,
    ThreadPool,
    available_instruction_sets,
    load_library,
)
from loraplex.kernels.reference import ReferenceKernels
from support.cases_in_turn import in_turn
from support.naming import naming

try:
    INSTRUCTION_SETS = available_instruction_sets()
except NativeLibraryError as error:
    pytest.skip(f"the native kernels are not built: {error}", allow_module_level=True)

# Relative to each value: half a step of the dtype for the one rounding, and little else.
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-8 + 1e-5, torch.float16: 2**-11 + 1e-5}
DTYPES = in_turn("dtype", ROUNDING)
REFERENCE = ReferenceKernels(torch.device("cpu"))
SIZES = in_turn("size", [1, 7, 8, 33, 64, 250, 2048])


@pytest.fixture(params=INSTRUCTION_SETS)
def library(request):
    torch.default_generator.manual_seed(0)
    return load_library([request.param])


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def kernel(request, library):
    return kernel_of(library, request.param)


def kernel_of(library, num_threads) -> NativeElementwise:
    return NativeElementwise(library, ThreadPool(library, num_threads))


def rows(num_rows, size, dtype):
    """A view with a longer stride that starts at an odd element."""
    return torch.randn(num_rows, size + 3).to(dtype)[:, 1 : size + 1]


def assert_rounded(actual, expected, dtype):
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, rtol=ROUNDING[dtype], atol=1e-6)


def normed(x, weight, eps):
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@DTYPES
@SIZES
def test_rms_norm(kernel, size, dtype):
    x, weight = rows(40, size, dtype), torch.randn(size).to(dtype)
    assert_rounded(kernel.rms_norm(x, weight, 1e-3), normed(x, weight, 1e-3), dtype)


def test_rms_norm_of_heads_inside_a_fused_view(kernel):
    fused, weight = torch.randn(5, 7 * 16), torch.randn(16)
    heads = fused[:, 16:64].view(5, 3, 16)
    output = kernel.rms_norm(heads, weight, 1e-6)
    assert output.is_contiguous()
    assert_rounded(output, normed(heads, weight, 1e-6), torch.float32)


def test_rms_norm_of_half_precision_sums_in_float32(kernel):
    x = torch.full((1, 4096), 300.0, dtype=torch.float16)  # its squares overflow float16
    weight = torch.ones(4096, dtype=torch.float16)
    assert torch.equal(kernel.rms_norm(x, weight, 1e-6), torch.ones_like(x))


@in_turn("dtype", [torch.bfloat16, torch.float16])
@SIZES
def test_rms_norm_by_a_float32_weight(kernel, size, dtype):
    x, weight = rows(40, size, dtype), 1 + 0.01 * torch.randn(size)
    assert_rounded(kernel.rms_norm(x, weight, 1e-3), normed(x, weight, 1e-3), dtype)
    output, total = kernel.add_rms_norm(x, x, weight, 1e-3)
    assert torch.equal(output, kernel.rms_norm(total, weight, 1e-3))


def test_a_weight_of_another_dtype_is_refused(kernel):
    x, weight = torch.ones(2, 8), torch.ones(8, dtype=torch.bfloat16)
    with pytest.raises(InternalError, match=naming("loraplex_rms_norm")):
        kernel.rms_norm(x, weight, 1e-6)


@pytest.mark.covering(2)
@pytest.mark.some(8)
@DTYPES
@SIZES
@pytest.mark.parametrize("factor", [1.0, 0.22, -3.0])
def test_add(kernel, size, dtype, factor):
    x, residual = rows(40, size, dtype), rows(40, size, dtype)
    total = kernel.add(x, residual, factor)
    assert total.is_contiguous()
    assert_rounded(total, residual.double() + factor * x.double(), dtype)
    weight = torch.randn(size).to(dtype)
    output, same_total = kernel.add_rms_norm(x, residual, weight, 1e-6, factor)
    assert torch.equal(same_total, total)
    assert torch.equal(output, kernel.rms_norm(total, weight, 1e-6))
    output, same_total = kernel.add_layer_norm(x, residual, weight, weight, 1e-6, factor)
    assert torch.equal(same_total, total)
    assert torch.equal(output, kernel.layer_norm(total, weight, weight, 1e-6))


@pytest.mark.covering(2)
@DTYPES
@SIZES
@pytest.mark.parametrize("soft_cap", [None, 30.0])
def test_scale(kernel, size, dtype, soft_cap):
    """The rows change in place, and nothing between them."""
    wide = (50 * torch.randn(40, size + 3)).to(dtype)
    before = wide.clone()
    kernel.scale(wide[:, 1 : size + 1], 0.7, soft_cap)
    expected = before.double()[:, 1 : size + 1] * 0.7
    if soft_cap is not None:
        expected = soft_cap * torch.tanh(expected / soft_cap)
    assert_rounded(wide[:, 1 : size + 1], expected, dtype)
    assert torch.equal(wide[:, 0], before[:, 0])
    assert torch.equal(wide[:, size + 1 :], before[:, size + 1 :])


def test_tanh_is_within_its_bound(kernel):
    x = torch.cat((torch.logspace(-30, 2, 100_000), torch.linspace(0, 12, 100_000)))
    x = torch.cat((x, -x)).unsqueeze(0)
    expected = torch.tanh(x.double())
    kernel.scale(x, 1.0, 1.0)
    torch.testing.assert_close(x.double(), expected, rtol=4e-7, atol=0)


def test_a_soft_cap_of_extreme_values(kernel):
    x = torch.tensor([[-torch.inf, -3e38, -0.0, 0.0, 3e38, torch.inf, torch.nan]])
    kernel.scale(x, 1.0, 50.0)
    expected = torch.tensor([[-50.0, -50.0, -0.0, 0.0, 50.0, 50.0, torch.nan]])
    torch.testing.assert_close(x, expected, equal_nan=True)


@DTYPES
@SIZES
def test_add_rms_norm(kernel, size, dtype):
    x, residual = rows(40, size, dtype), rows(40, size, dtype)
    weight = torch.randn(size).to(dtype)
    output, total = kernel.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    assert torch.equal(output, kernel.rms_norm(total, weight, 1e-6))


def standardized(x, weight, bias, eps):
    wide = x.double()
    variance = wide.var(-1, keepdim=True, correction=0)
    wide = (wide - wide.mean(-1, keepdim=True)) / (variance + eps).sqrt()
    return wide * weight.double() + bias.double()


@DTYPES
@SIZES
def test_layer_norm(kernel, size, dtype):
    x = (rows(40, size, torch.float32) + 2).to(dtype)
    weight, bias = torch.randn(2, size).to(dtype)
    output = kernel.layer_norm(x, weight, bias, 1e-3)
    assert output.is_contiguous()
    torch.testing.assert_close(
        output.double(), standardized(x, weight, bias, 1e-3), rtol=ROUNDING[dtype], atol=4e-6
    )


@pytest.mark.covering(2)
@DTYPES
@pytest.mark.parametrize("weight_dtype", [None, torch.float32], ids=str)
@in_turn("head_dim", [1, 20, 128])
def test_layer_norm_of_heads_with_weights_of_their_own(kernel, head_dim, weight_dtype, dtype):
    """Inside a fused view."""
    heads = rows(9, 5 * head_dim, dtype)[:, head_dim : 4 * head_dim].view(9, 3, head_dim)
    weight, bias = torch.randn(2, 3, head_dim).to(weight_dtype or dtype)
    for parts in ((weight, bias), (weight[0], bias[0])):
        output = kernel.layer_norm(heads, *parts, 1e-2)
        assert output.is_contiguous()
        expected = standardized(heads, *parts, 1e-2)
        torch.testing.assert_close(output.double(), expected, rtol=ROUNDING[dtype], atol=4e-6)


def test_layer_norm_of_values_far_from_zero(kernel):
    """Squares of the values themselves would have lost what they differ by."""
    x = torch.arange(64.0).unsqueeze(0) + 10_000
    output = kernel.layer_norm(x, torch.ones(64), torch.zeros(64), 1e-5)
    expected = standardized(x, torch.ones(64), torch.zeros(64), 1e-5)
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-6)


@DTYPES
@SIZES
def test_add_layer_norm(kernel, size, dtype):
    x, residual = rows(40, size, dtype), rows(40, size, dtype)
    weight, bias = torch.randn(2, size).to(dtype)
    output, total = kernel.add_layer_norm(x, residual, weight, bias, 1e-6)
    assert torch.equal(total, x + residual)
    assert torch.equal(output, kernel.layer_norm(total, weight, bias, 1e-6))


@DTYPES
@in_turn("head_dim", [2, 6, 64, 128])
def test_rotary_turns_pairs_of_a_fused_view(kernel, head_dim, dtype):
    """Compare with complex numbers: (x_i, x_{i + D/2}) times e^{i angle}; the rest is untouched."""
    fused = torch.randn(30, 5 * head_dim).to(dtype)
    before = fused.clone()
    query = fused[:, : 3 * head_dim].view(30, 3, head_dim)
    key = fused[:, 3 * head_dim : 4 * head_dim].view(30, 1, head_dim)
    angles = torch.rand(30, head_dim // 2) * 6
    cos, sin = angles.cos(), angles.sin()
    kernel.rotary(query, key, cos, sin)
    pairs = before.double().view(30, 5, 2, head_dim // 2)
    turn = torch.complex(cos.double(), sin.double()).unsqueeze(1)
    turned = torch.complex(pairs[:, :, 0], pairs[:, :, 1]) * turn
    expected = torch.cat((turned.real, turned.imag), dim=-1)[:, :4]
    assert_rounded(fused.view(30, 5, head_dim)[:, :4], expected, dtype)
    assert torch.equal(fused[:, 4 * head_dim :], before[:, 4 * head_dim :])


@pytest.mark.covering(2)
@DTYPES
@in_turn("head_dim, rotary_dim", [(2, 2), (6, 4), (80, 32), (300, 260)])
@pytest.mark.parametrize("is_interleaved", [False, True], ids=["halves", "interleaved"])
def test_rotary_of_a_part_of_each_head(kernel, head_dim, rotary_dim, is_interleaved, dtype):
    query, key = torch.randn(2, 9, 3, head_dim).to(dtype)
    angles = torch.rand(9, rotary_dim // 2) * 6
    cos, sin = angles.cos(), angles.sin()
    expected, expected_key = query.clone(), key.clone()
    REFERENCE.rotary(expected, expected_key, cos, sin, is_interleaved=is_interleaved)
    kernel.rotary(query, key, cos, sin, is_interleaved=is_interleaved)
    for part, other in ((query, expected), (key, expected_key)):
        assert_rounded(part[..., :rotary_dim], other[..., :rotary_dim].double(), dtype)
        assert torch.equal(part[..., rotary_dim:], other[..., rotary_dim:])


def test_rotary_without_keys_or_without_queries(kernel):
    heads, none = torch.randn(4, 2, 8), torch.empty(4, 0, 8)
    cos, sin = torch.randn(2, 4, 4)
    first, second = heads.clone(), heads.clone()
    kernel.rotary(first, none, cos, sin)
    kernel.rotary(none, second, cos, sin)
    assert torch.equal(first, second)
    assert not torch.equal(first, heads)


def test_a_rotation_beyond_the_head_is_refused(kernel):
    heads, cos = torch.randn(4, 2, 8), torch.randn(4, 5)
    with pytest.raises(InternalError, match="argument is invalid"):
        kernel.rotary(heads, heads, cos, cos)


ACTIVATIONS = {
    Activation.GELU: torch.nn.functional.gelu,
    Activation.GELU_TANH: lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    Activation.RELU: torch.relu,
    Activation.SQUARED_RELU: lambda x: torch.relu(x).square(),
    Activation.SILU: torch.nn.functional.silu,
}


@pytest.mark.covering(2)
@pytest.mark.some(10)
@DTYPES
@SIZES
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activate(kernel, size, activation, dtype):
    x = (4 * rows(40, size, torch.float32)).to(dtype)
    output = kernel.activate(x, activation)
    assert output.is_contiguous()
    assert_rounded(output, ACTIVATIONS[activation](x.double()), dtype)


@pytest.mark.covering(2)
@pytest.mark.some(10)
@DTYPES
@SIZES
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gate(kernel, size, activation, dtype):
    x = rows(40, 2 * size, dtype)
    gate, up = x[:, :size].double(), x[:, size:].double()
    output = kernel.gate(x, activation)
    assert output.is_contiguous()
    assert_rounded(output, ACTIVATIONS[activation](gate) * up, dtype)


@pytest.mark.covering(2)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_of_extreme_values(kernel, activation):
    x = torch.tensor([[-3e38, -120.0, -16.0, -5.5, -0.0, 5.5, 16.0, 3e38, torch.inf, torch.nan]])
    expected = ACTIVATIONS[activation](x.double()).float()
    torch.testing.assert_close(kernel.activate(x, activation), expected, equal_nan=True)
    gate_up = torch.cat((x, torch.ones_like(x)), dim=1)
    torch.testing.assert_close(kernel.gate(gate_up, activation), expected, equal_nan=True)


def xielu(x, positive, negative):
    curve = torch.where(x > 0, positive * x.square(), negative * (torch.expm1(x) - x))
    return curve + x / 2


@DTYPES
@SIZES
def test_xielu(kernel, size, dtype):
    x = (4 * rows(40, size, torch.float32)).to(dtype)
    x[:20] *= 1e-3
    output = kernel.xielu(x, 0.7, 1.3)
    assert output.is_contiguous()
    assert_rounded(output, xielu(x.double(), 0.7, 1.3), dtype)


def test_xielu_of_extreme_values(kernel):
    x = torch.tensor([[-1e30, -120.0, -18.5, -1e-30, -0.0, 1e-30, 1e15, torch.inf, torch.nan]])
    expected = xielu(x.double(), 0.7, 1.3).float()
    torch.testing.assert_close(kernel.xielu(x, 0.7, 1.3), expected, equal_nan=True)


@DTYPES
@SIZES
def test_clamped_swiglu(kernel, size, dtype):
    x = (5 * rows(40, 2 * size, torch.float32)).to(dtype)
    gate, up = x[:, :size].double().clamp(max=7), x[:, size:].double().clamp(-7, 7)
    output = kernel.gate(x, Activation.CLAMPED_SWIGLU)
    assert_rounded(output, (up + 1) * gate * torch.sigmoid(1.702 * gate), dtype)


def test_clamped_swiglu_of_extreme_values(kernel):
    values = torch.tensor([-torch.inf, -3e38, -87.5, -7.0, 0.0, 7.0, 87.5, torch.inf, torch.nan])
    gates, ups = values[1:].repeat_interleave(9), values.repeat(8)
    x = torch.cat((gates, ups)).unsqueeze(0)
    torch.testing.assert_close(
        kernel.gate(x, Activation.CLAMPED_SWIGLU),
        REFERENCE.gate(x, Activation.CLAMPED_SWIGLU),
        equal_nan=True,
    )


def test_clamped_swiglu_is_only_a_gate(kernel):
    with pytest.raises(InternalError, match=naming("loraplex_activate")):
        kernel.activate(torch.ones(1, 4), Activation.CLAMPED_SWIGLU)


def test_silu_of_extreme_values(kernel):
    gates = torch.tensor([-torch.inf, -3e38, -120.0, -87.5, 0.0, 87.5, 3e38, torch.inf, torch.nan])
    output = kernel.gate(torch.cat((gates, torch.ones(9))).unsqueeze(0), Activation.SILU)[0]
    torch.testing.assert_close(
        output, torch.nn.functional.silu(gates.double()).float(), equal_nan=True
    )


@DTYPES
@in_turn("size", [33, 2048])
def test_bits_do_not_depend_on_company_or_threads(library, size, dtype):
    x, residual, weight = rows(65, size, dtype), rows(65, size, dtype), torch.randn(size).to(dtype)
    two, one = kernel_of(library, 2), kernel_of(library, 1)
    gate_up = rows(65, 2 * size, dtype)
    cos, sin = torch.randn(2, 65, size // 2)

    wide_weight = torch.randn(size)

    def rotated(kernel, part, is_interleaved):
        heads = x[part, : size // 2 * 2].clone().unsqueeze(1)
        kernel.rotary(heads, heads.clone(), cos[part], sin[part], is_interleaved=is_interleaved)
        return heads

    def gated(kernel, part, activation):
        return kernel.gate(gate_up[part], activation)

    def activated(kernel, part, activation):
        return kernel.activate(x[part], activation)

    def scaled(kernel, part):
        capped = x[part].clone()
        kernel.scale(capped, 0.7, 2.0)
        return capped

    for op in (
        lambda kernel, part: kernel.rms_norm(x[part], weight, 1e-6),
        lambda kernel, part: kernel.add_rms_norm(x[part], residual[part], weight, 1e-6)[0],
        lambda kernel, part: kernel.layer_norm(x[part], weight, weight, 1e-6),
        lambda kernel, part: kernel.add_layer_norm(x[part], residual[part], weight, weight, 1e-6)[
            0
        ],
        lambda kernel, part: kernel.rms_norm(x[part], wide_weight, 1e-6),
        lambda kernel, part: kernel.add(x[part], residual[part], 0.22),
        *(functools.partial(gated, activation=activation) for activation in Activation),
        *(functools.partial(activated, activation=activation) for activation in ACTIVATIONS),
        lambda kernel, part: kernel.xielu(x[part], 0.7, 1.3),
        functools.partial(rotated, is_interleaved=False),
        functools.partial(rotated, is_interleaved=True),
        scaled,
    ):
        together = op(two, slice(None))
        for part in (slice(0, 65), slice(0, 1), slice(13, 14), slice(60, 65)):
            assert torch.equal(op(one, part), together[part])
    at_another_alignment = one.rms_norm(x.clone(), weight, 1e-6)
    assert torch.equal(at_another_alignment, one.rms_norm(x, weight, 1e-6))
