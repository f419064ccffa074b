"""The GPU's linear layers, interpreted: against float64, and a row alone against a row in company.

The interpreter computes bfloat16 wrongly; tests/gpu/test_linear.py has it.
"""

import pytest
import torch

from loraplex.core.weight_precision import WeightPrecision
from loraplex.kernels.cuda import linear_products
from loraplex.kernels.cuda.linear import CudaLinear
from loraplex.kernels.cuda.linear_packing import empty_weight
from loraplex.kernels.cuda.linear_products import ScaledLinear
from loraplex.kernels.quantization import fp8_linear, quantize

CPU = torch.device("cpu")
NATIVE, INT8, INT4, FP8 = WeightPrecision
DTYPES = [torch.float32, torch.float16]
TOLERANCE = {torch.float32: 3e-7, torch.float16: 4e-4}

# (precision, in, out): multiples of every tile, and none; every group size of int4.
SIZES = [
    (NATIVE, 64, 32),
    (NATIVE, 70, 33),
    (INT8, 128, 32),
    (INT8, 7, 5),
    (INT8, 520, 17),
    (INT4, 32, 5),
    (INT4, 64, 32),
    (INT4, 160, 33),
    (INT4, 128, 17),
]


def gaussian(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes))).to(dtype)


def exact(weight: torch.Tensor, precision: WeightPrecision) -> torch.Tensor:
    """float64: what the packed weight stands for."""
    if precision is NATIVE:
        return weight.double()
    return quantize(weight, precision).dequantized().double()


def error_of(y: torch.Tensor, expected: torch.Tensor) -> float:
    return float((y.double() - expected).norm() / expected.norm())


@pytest.mark.covering(2)
@pytest.mark.some(10)
@pytest.mark.parametrize("batch_invariant", [False, True], ids=["free", "fixed"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("precision", "in_features", "out_features"), SIZES, ids=str)
def test_it_is_the_product(precision, in_features, out_features, dtype, batch_invariant):
    kernel = CudaLinear(CPU, batch_invariant=batch_invariant)
    weight = gaussian(out_features, in_features, dtype=dtype)
    bias = 10 * gaussian(out_features, dtype=dtype)
    counts = (1, 17) if dtype == torch.float32 else (1, 17, 70)  # of every tile
    for num_rows, given in zip(counts, (None, bias, bias), strict=False):
        x = gaussian(num_rows, in_features, dtype=dtype)
        y = kernel.apply(x, kernel.pack(weight, given, precision))
        expected = x.double() @ exact(weight, precision).t()
        if given is not None:
            expected += given.double()
        assert y.dtype == dtype
        assert y.shape == expected.shape
        assert error_of(y, expected) < TOLERANCE[dtype]


@pytest.mark.some(3)
@pytest.mark.parametrize("precision", [INT8, INT4])
@pytest.mark.parametrize("num_rows", [1, 20, 70])
def test_a_long_sum_is_split_and_added(monkeypatch, precision, num_rows):
    counted = []
    split = linear_products._splits
    monkeypatch.setattr(
        linear_products, "_splits", lambda *args: counted.append(split(*args)) or counted[-1]
    )
    weight, bias = gaussian(20, 1920, dtype=torch.float16), gaussian(20, dtype=torch.float16)
    x = gaussian(num_rows, 1920, dtype=torch.float16)
    kernel = CudaLinear(CPU, batch_invariant=False)
    y = kernel.apply(x, kernel.pack(weight, bias, precision))
    assert counted == [(2, 8)], "the second split is the shorter one"
    expected = x.double() @ exact(weight, precision).t() + bias.double()
    assert error_of(y, expected) < TOLERANCE[torch.float16]


@pytest.mark.parametrize(
    ("blocks", "most", "expected"),
    [
        (1, 16, (1, 1)),
        (7, 16, (1, 7)),
        (8, 16, (2, 4)),
        (32, 16, (8, 4)),
        (32, 3, (2, 16)),
        (32, 0, (1, 32)),
        (112, 16, (16, 7)),
        (113, 8, (8, 15)),
    ],
)
def test_no_split_is_empty_or_short(blocks, most, expected):
    num_splits, blocks_per_split = linear_products._split_blocks(blocks, most)
    assert (num_splits, blocks_per_split) == expected
    assert (num_splits - 1) * blocks_per_split < blocks <= num_splits * blocks_per_split


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16], ids=str)
@pytest.mark.parametrize("precision", [INT8, INT4])
def test_a_fixed_product_has_one_tile_and_no_splits(precision, dtype):
    """Other tiles may on a GPU mean other instructions, which add in another order."""
    kernel = ScaledLinear(CPU, batch_invariant=True)
    packed = empty_weight(torch.empty(1024, 14336, device="meta"), None, precision)
    tiles = {kernel._tile(num_rows, dtype, packed) for num_rows in (1, 16, 17, 64, 65, 4096)}
    assert len(tiles) == 1
    for num_rows in (1, 65, 4096):
        assert linear_products._splits(*tiles, num_rows, packed) == (1, 112)


def assert_rows_are_alike(precision: WeightPrecision, dtype: torch.dtype, counts) -> None:
    kernel = CudaLinear(CPU, batch_invariant=True)
    in_features, out_features = (32, 16) if precision is FP8 else (160, 17)
    packed = kernel.pack(
        gaussian(out_features, in_features, dtype=dtype),
        gaussian(out_features, dtype=dtype),
        precision,
    )
    x = gaussian(66, in_features, dtype=dtype)
    expected = kernel.apply(x, packed)
    for num_rows in counts:
        assert torch.equal(kernel.apply(x[:num_rows], packed), expected[:num_rows])
    for row in (15, 16, 65):
        assert torch.equal(kernel.apply(x[row : row + 1], packed)[0], expected[row])


@pytest.mark.covering(1)
@pytest.mark.some(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("precision", list(WeightPrecision))
def test_a_row_has_the_same_bits_alone_and_in_company(precision, dtype):
    assert_rows_are_alike(precision, dtype, (1, 2, 16, 17, 40))


@pytest.mark.covering(1)
@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("precision", list(WeightPrecision))
def test_a_row_has_the_same_bits_in_any_company(precision, dtype):
    assert_rows_are_alike(precision, dtype, range(1, 41))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("precision", list(WeightPrecision))
@pytest.mark.parametrize("batch_invariant", [False, True], ids=["free", "fixed"])
def test_a_row_keeps_to_itself(precision, batch_invariant):
    """An outlier, zeros, an infinity and a NaN: the others have the bits that they had."""
    kernel = CudaLinear(CPU, batch_invariant=batch_invariant)
    packed = kernel.pack(gaussian(32, 96), None, precision)
    x = gaussian(8, 96)
    expected = kernel.apply(x, packed)
    x[1] *= 1000.0
    x[2] = 0.0
    x[5, 95], x[6, 0] = -torch.inf, torch.nan
    y = kernel.apply(x, packed)
    assert torch.equal(y[[0, 3, 4, 7]], expected[[0, 3, 4, 7]])
    assert y[1].isfinite().all()
    assert torch.equal(y[2], torch.zeros(32))
    assert not y[5:7].isfinite().any()


@pytest.mark.parametrize("precision", [NATIVE, INT8, INT4])
@pytest.mark.parametrize("batch_invariant", [False, True], ids=["free", "fixed"])
def test_rows_may_be_apart(precision, batch_invariant):
    """Views of a wider tensor, of any alignment, and one whose columns are apart."""
    kernel = CudaLinear(CPU, batch_invariant=batch_invariant)
    packed = kernel.pack(gaussian(20, 96), gaussian(20), precision)
    x = gaussian(9, 96)
    wide = torch.full((9, 256), torch.nan)
    wide[:, 33:129] = x
    expected = kernel.apply(x, packed)
    torch.testing.assert_close(kernel.apply(wide[:, 33:129], packed), expected)
    torch.testing.assert_close(kernel.apply(x.t().contiguous().t(), packed), expected)
    assert kernel.apply(x[:0], packed).shape == (0, 20)


def test_on_a_cpu_fp8_is_the_reference_itself():
    kernel = CudaLinear(CPU, batch_invariant=False)
    weight, bias, x = gaussian(48, 96), gaussian(48), gaussian(5, 96)
    packed = kernel.pack(weight, bias, FP8)
    assert torch.equal(kernel.apply(x, packed), fp8_linear(x, quantize(weight, FP8), bias))
