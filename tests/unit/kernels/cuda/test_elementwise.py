"""What lies between products by Triton's programs, interpreted, as the reference."""

import pytest
import torch

from loraplex.kernels.activations import Activation
from loraplex.kernels.cuda import elementwise
from loraplex.kernels.reference import ReferenceKernels

REFERENCE = ReferenceKernels(torch.device("cpu"))
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
ACTIVATIONS = pytest.mark.parametrize("activation", list(Activation))
PLAIN_ACTIVATIONS = pytest.mark.parametrize(
    "activation", [one for one in Activation if one is not Activation.CLAMPED_SWIGLU]
)
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


@pytest.mark.some(6)
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


@pytest.mark.parametrize("size", [1, 250, 2100])
def test_float32_weight_of_rms_norm_is_rounded_with_the_product(size):
    x, weight = rows(5, size, torch.float16), rows(1, size, torch.float32)[0]
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    output = elementwise.rms_norm(x, weight, 1e-6)
    # Another sum of the squares makes another float16 now and then.
    assert (output == (normed * weight).half()).float().mean() > 0.99
    assert_close(output, REFERENCE.rms_norm(x, weight, 1e-6))
    if size > 1:
        assert not torch.equal(output, elementwise.rms_norm(x, weight.half(), 1e-6))


@pytest.mark.some(6)
@DTYPES
@SIZES
def test_add_rms_norm(size, dtype):
    x, residual = rows(5, size, dtype), rows(5, size, dtype).flip(0)
    weight = rows(1, size, dtype)[0]
    output, total = elementwise.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    assert torch.equal(output, elementwise.rms_norm(total, weight, 1e-6))


@DTYPES
@pytest.mark.parametrize("size", [7, 2100])
def test_sums_of_a_factor(size, dtype):
    x, residual = rows(5, size, dtype), rows(5, size, dtype).flip(0)
    weight, bias = rows(2, size, torch.float32)
    total = elementwise.add(x, residual, 0.22)
    assert total.is_contiguous()
    assert_close(total, REFERENCE.add(x, residual, 0.22))
    assert torch.equal(elementwise.add(x, residual), x + residual)
    output, also_total = elementwise.add_rms_norm(x, residual, weight, 1e-6, 0.22)
    assert torch.equal(also_total, total)
    assert torch.equal(output, elementwise.rms_norm(total, weight, 1e-6))
    output, also_total = elementwise.add_layer_norm(x, residual, weight, bias, 1e-6, 0.22)
    assert torch.equal(also_total, total)
    assert torch.equal(output, elementwise.layer_norm(total, weight, bias, 1e-6))


def test_a_factor_is_rounded_once():
    """0.1 x alone has no float16: the sum is of what it is."""
    x, residual = rows(5, 2048, torch.float16), rows(5, 2048, torch.float16).flip(0)
    once = (residual.double() + x.double() * 0.1).half()
    assert (elementwise.add(x, residual, 0.1) == once).float().mean() > 0.999
    assert not torch.equal(once, residual + x * 0.1)


@pytest.mark.covering(2)
@pytest.mark.some(10)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@DTYPES
@SIZES
@pytest.mark.parametrize("soft_cap", [None, 5.0])
def test_scale(size, soft_cap, dtype):
    x = 20 * rows(5, size, dtype)
    before, expected = x.clone(), x.clone()
    elementwise.scale(x[1:4], 0.25, soft_cap)
    REFERENCE.scale(expected[1:4], 0.25, soft_cap)
    assert_close(x, expected)
    assert torch.equal(x[[0, 4]], before[[0, 4]])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_soft_caps_of_small_and_extreme_values():
    magnitudes = torch.tensor([0.0, 1e-30, 1e-6, 0.01, 0.199, 0.201, 1, 9, 60, 3e38, torch.inf])
    x = torch.cat((magnitudes, -magnitudes, torch.tensor([torch.nan]))).unsqueeze(0)
    expected = torch.tanh(x.double()).float()
    elementwise.scale(x, 1.0, 1.0)
    torch.testing.assert_close(x, expected, rtol=5e-7, atol=0, equal_nan=True)


@pytest.mark.some(6)
@DTYPES
@SIZES
def test_layer_norm(size, dtype):
    x = rows(5, size, dtype) + 2
    weight, bias = rows(2, size, dtype)
    output = elementwise.layer_norm(x, weight, bias, 1e-3)
    assert output.is_contiguous()
    assert_close(output, REFERENCE.layer_norm(x, weight, bias, 1e-3), atol=4e-6)


@pytest.mark.covering(2)
@pytest.mark.some(6)
@DTYPES
@pytest.mark.parametrize("head_dim", [16, 80])
@pytest.mark.parametrize("has_own_weights", [False, True])
@pytest.mark.parametrize("is_wide", [False, True])
def test_layer_norm_of_heads_inside_a_fused_view(head_dim, has_own_weights, is_wide, dtype):
    heads = rows(5, 7 * head_dim, dtype)[:, head_dim : 4 * head_dim].view(5, 3, head_dim)
    sizes = (2, 3, head_dim) if has_own_weights else (2, head_dim)
    weight, bias = torch.randn(sizes).to(torch.float32 if is_wide else dtype)
    output = elementwise.layer_norm(heads, weight, bias, 1e-6)
    assert output.is_contiguous()
    assert_close(output, REFERENCE.layer_norm(heads, weight, bias, 1e-6), atol=4e-6)


@pytest.mark.some(6)
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


@pytest.mark.covering(2)
@pytest.mark.some(20)
@DTYPES
@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize(("num_heads", "num_key_heads"), [(5, 2), (0, 3), (3, 0), (1, 6), (0, 0)])
@pytest.mark.parametrize("size", [2, 6, 32, 80])
def test_rotary_turns_the_first_numbers_of_heads(
    size, num_heads, num_key_heads, is_interleaved, dtype
):
    torch.default_generator.manual_seed(0)
    ours = torch.randn(4, num_heads + num_key_heads + 1, 80).to(dtype)
    before, expected = ours.clone(), ours.clone()
    angles = torch.rand(4, size // 2) * 6
    for kernels, fused in ((elementwise, ours), (REFERENCE, expected)):
        query, key, _ = fused.split([num_heads, num_key_heads, 1], 1)
        kernels.rotary(query, key, angles.cos(), angles.sin(), is_interleaved=is_interleaved)
    assert_close(ours, expected)
    assert torch.equal(ours[:, :, size:], before[:, :, size:])
    assert torch.equal(ours[:, -1], before[:, -1])


@pytest.mark.covering(2)
@pytest.mark.some(20)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@DTYPES
@SIZES
@ACTIVATIONS
def test_gate(size, activation, dtype):
    x = rows(5, 2 * size, dtype)
    assert_close(elementwise.gate(x, activation), REFERENCE.gate(x, activation))


@pytest.mark.covering(2)
@pytest.mark.some(20)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # e^x overflows, as it should
@DTYPES
@SIZES
@PLAIN_ACTIVATIONS
def test_activate(size, activation, dtype):
    x = 4 * rows(5, size, dtype)
    output = elementwise.activate(x, activation)
    assert output.is_contiguous()
    assert_close(output, REFERENCE.activate(x, activation))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@PLAIN_ACTIVATIONS
def test_activations_of_extreme_values(activation):
    x = torch.tensor([[-3e38, -120.0, -16.0, -0.0, 16.0, 3e38, torch.inf, torch.nan]])
    expected = REFERENCE.activate(x, activation)
    torch.testing.assert_close(elementwise.activate(x, activation), expected, equal_nan=True)


def test_silu_as_a_gate_is_rounded_before_the_product():
    """Then the bits are the reference's but where another exp makes another float16."""
    x = rows(5, 2048, torch.float16)
    is_equal = elementwise.gate(x, Activation.SILU) == REFERENCE.gate(x, Activation.SILU)
    assert is_equal.float().mean() > 0.99


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_silu_of_extreme_values():
    gates = torch.tensor([-torch.inf, -3e38, -120.0, -87.5, 0.0, 87.5, 3e38, torch.inf, torch.nan])
    gate_up = torch.cat((gates, torch.ones(9))).unsqueeze(0)
    output = elementwise.gate(gate_up, Activation.SILU)[0]
    expected = torch.nn.functional.silu(gates.double()).float()
    torch.testing.assert_close(output, expected, equal_nan=True)


def test_a_row_s_bits_do_not_depend_on_company():
    x, residual, weight = rows(9, 300, torch.float32), rows(9, 300, torch.float32), torch.randn(300)
    for op in (
        lambda part: elementwise.rms_norm(x[part], weight, 1e-6),
        lambda part: elementwise.add_rms_norm(x[part], residual[part], weight, 1e-6)[0],
        lambda part: elementwise.layer_norm(x[part], weight, weight, 1e-6),
        lambda part: elementwise.gate(x[part], Activation.GELU_TANH),
        lambda part: elementwise.activate(x[part], Activation.GELU),
        lambda part: elementwise.add(x[part], residual[part], 0.1),
    ):
        together = op(slice(None))
        for part in (slice(0, 1), slice(4, 6), slice(8, 9)):
            assert torch.equal(op(part), together[part])


def test_no_rows():
    nothing = torch.zeros(0, 64)
    assert elementwise.rms_norm(nothing, torch.ones(64), 1e-6).shape == (0, 64)
    assert elementwise.layer_norm(nothing, torch.ones(64), torch.ones(64), 1e-6).shape == (0, 64)
    assert elementwise.gate(nothing, Activation.SILU).shape == (0, 32)
    assert elementwise.add(nothing, nothing, 2.0).shape == (0, 64)
    elementwise.scale(nothing, 2.0, 3.0)
    assert elementwise.activate(nothing, Activation.RELU).shape == (0, 64)
    assert elementwise.take_rows(torch.ones(3, 64), torch.zeros(0, dtype=torch.int64)).numel() == 0
