"""What lies between products by Triton's programs, interpreted, as the reference."""

import pytest
import torch

from loraplex.kernels.activations import UNGATED, Activation
from loraplex.kernels.cuda import elementwise
from loraplex.kernels.reference import ReferenceKernels

REFERENCE = ReferenceKernels(torch.device("cpu"))
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
SIZES = pytest.mark.parametrize("size", [1, 7, 33, 64, 250, 2048, 2100])


def rows(num_rows, size, dtype):
    """A view with a longer stride that starts at an odd element."""
    torch.default_generator.manual_seed(size)
    return torch.randn(num_rows, size + 3).to(dtype)[:, 1 : size + 1]


def assert_close(actual, expected, atol=1e-6):
    """float32 to the last bits; float16 to one step, where a float32 is near the middle of two."""
    assert actual.dtype == expected.dtype
    tolerance = 2**-10 if expected.dtype == torch.float16 else 2e-6
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=atol)


@DTYPES
@pytest.mark.parametrize("size", [1, 64, 250, 2100])
def test_take_rows(size, dtype):
    table = rows(9, size, dtype)
    indices = torch.randint(0, 9, (19,))
    assert torch.equal(elementwise.take_rows(table, indices), table[indices])


@DTYPES
@SIZES
def test_rms_norm(size, dtype):
    x, weight = rows(5, size, dtype), rows(1, size, dtype)[0]
    assert_close(elementwise.rms_norm(x, weight, 1e-3), REFERENCE.rms_norm(x, weight, 1e-3))


@DTYPES
@pytest.mark.parametrize("head_dim", [16, 80])
def test_rms_norm_of_heads_inside_a_fused_view(head_dim, dtype):
    fused, weight = rows(5, 7 * head_dim, dtype), torch.randn(head_dim).to(dtype)
    heads = fused[:, head_dim : 4 * head_dim].view(5, 3, head_dim)
    output = elementwise.rms_norm(heads, weight, 1e-6)
    assert output.is_contiguous()
    assert_close(output, REFERENCE.rms_norm(heads, weight, 1e-6))


def test_rms_norm_of_half_precision_sums_in_float32():
    x = torch.full((1, 4096), 300.0, dtype=torch.float16)  # its squares overflow float16
    weight = torch.ones(4096, dtype=torch.float16)
    assert torch.equal(elementwise.rms_norm(x, weight, 1e-6), torch.ones_like(x))


def test_rms_norm_is_rounded_before_the_weight():
    x, weight = rows(4, 64, torch.float16), rows(1, 64, torch.float16)[0]
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    output = elementwise.rms_norm(x, weight, 1e-6)
    assert torch.equal(output, normed.half() * weight)
    assert not torch.equal(output, (normed * weight.float()).half())


@DTYPES
@SIZES
def test_add_rms_norm(size, dtype):
    x, residual = rows(5, size, dtype), rows(5, size, dtype).flip(0)
    weight = rows(1, size, dtype)[0]
    output, total = elementwise.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    assert torch.equal(output, elementwise.rms_norm(total, weight, 1e-6))


@DTYPES
@SIZES
def test_layer_norm(size, dtype):
    x = rows(5, size, dtype) + 2
    weight, bias = rows(2, size, dtype)
    output = elementwise.layer_norm(x, weight, bias, 1e-3)
    assert output.is_contiguous()
    assert_close(output, REFERENCE.layer_norm(x, weight, bias, 1e-3), atol=4e-6)


@DTYPES
@SIZES
def test_add_layer_norm(size, dtype):
    x, residual = rows(5, size, dtype), rows(5, size, dtype).flip(0)
    weight, bias = rows(2, size, dtype)
    output, total = elementwise.add_layer_norm(x, residual, weight, bias, 1e-6)
    assert torch.equal(total, x + residual)
    assert torch.equal(output, elementwise.layer_norm(total, weight, bias, 1e-6))


@DTYPES
@pytest.mark.parametrize(("num_heads", "head_dim"), [(1, 2), (3, 6), (20, 96), (9, 128)])
def test_rotary_turns_a_fused_view_and_nothing_else(num_heads, head_dim, dtype):
    torch.default_generator.manual_seed(0)
    width = num_heads * head_dim
    ours = torch.randn(4, width + 3 * head_dim).to(dtype)
    expected = ours.clone()
    angles = torch.rand(4, head_dim // 2) * 6
    for kernels, fused in ((elementwise, ours), (REFERENCE, expected)):
        query = fused[:, :width].view(4, num_heads, head_dim)
        key = fused[:, width : width + 2 * head_dim].view(4, 2, head_dim)
        kernels.rotary(query, key, angles.cos(), angles.sin())
    assert_close(ours, expected)
    assert torch.equal(ours[:, width + 2 * head_dim :], expected[:, width + 2 * head_dim :])


@DTYPES
@SIZES
def test_silu_mul(size, dtype):
    x = rows(5, 2 * size, dtype)
    assert_close(elementwise.silu_mul(x), REFERENCE.gate(x, Activation.SILU))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # e^x overflows, as it should
@DTYPES
@SIZES
@pytest.mark.parametrize("activation", UNGATED)
def test_activate(size, activation, dtype):
    x = 4 * rows(5, size, dtype)
    output = elementwise.activate(x, activation)
    assert output.is_contiguous()
    assert_close(output, REFERENCE.activate(x, activation))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("activation", UNGATED)
def test_activations_of_extreme_values(activation):
    x = torch.tensor([[-3e38, -120.0, -16.0, -0.0, 16.0, 3e38, torch.inf, torch.nan]])
    expected = REFERENCE.activate(x, activation)
    torch.testing.assert_close(elementwise.activate(x, activation), expected, equal_nan=True)


def test_silu_is_rounded_before_the_product():
    """Then the bits are the reference's but where another exp makes another float16."""
    x = rows(5, 2048, torch.float16)
    is_equal = elementwise.silu_mul(x) == REFERENCE.gate(x, Activation.SILU)
    assert is_equal.float().mean() > 0.99


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_silu_of_extreme_values():
    gates = torch.tensor([-torch.inf, -3e38, -120.0, -87.5, 0.0, 87.5, 3e38, torch.inf, torch.nan])
    output = elementwise.silu_mul(torch.cat((gates, torch.ones(9))).unsqueeze(0))[0]
    expected = torch.nn.functional.silu(gates.double()).float()
    torch.testing.assert_close(output, expected, equal_nan=True)


def test_a_row_s_bits_do_not_depend_on_company():
    x, residual, weight = rows(9, 300, torch.float32), rows(9, 300, torch.float32), torch.randn(300)
    for op in (
        lambda part: elementwise.rms_norm(x[part], weight, 1e-6),
        lambda part: elementwise.add_rms_norm(x[part], residual[part], weight, 1e-6)[0],
        lambda part: elementwise.layer_norm(x[part], weight, weight, 1e-6),
        lambda part: elementwise.silu_mul(x[part]),
        lambda part: elementwise.activate(x[part], Activation.GELU),
    ):
        together = op(slice(None))
        for part in (slice(0, 1), slice(4, 6), slice(8, 9)):
            assert torch.equal(op(part), together[part])


def test_no_rows():
    nothing = torch.zeros(0, 64)
    assert elementwise.rms_norm(nothing, torch.ones(64), 1e-6).shape == (0, 64)
    assert elementwise.layer_norm(nothing, torch.ones(64), torch.ones(64), 1e-6).shape == (0, 64)
    assert elementwise.silu_mul(nothing).shape == (0, 32)
    assert elementwise.activate(nothing, Activation.RELU).shape == (0, 64)
    assert elementwise.take_rows(torch.ones(3, 64), torch.zeros(0, dtype=torch.int64)).numel() == 0
