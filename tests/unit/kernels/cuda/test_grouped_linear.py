"""Products with the weights of experts, interpreted: against float64 over popularity and sizes."""

import pytest
import torch

from loraplex.core.weight_precision import WeightPrecision
from loraplex.kernels.cuda import grouped_linear
from loraplex.kernels.cuda.grouped_linear import GroupedLinear, most_tiles
from loraplex.kernels.cuda.linear import CudaLinear
from loraplex.kernels.quantization import fp8_linear, quantize
from loraplex.kernels.routing import Routes, sort_routes
from support.routed_pairs import POPULARITIES, chosen_experts, routes_by

CPU = torch.device("cpu")
NATIVE, INT8, INT4, FP8 = WeightPrecision
TOLERANCE = {torch.float32: 3e-7, torch.float16: 4e-4}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
FIXED = pytest.mark.parametrize("batch_invariant", [False, True], ids=["free", "fixed"])

# (precision, in, out): multiples of every tile, and none; every group size of int4.
SIZES = [
    (NATIVE, 64, 64),
    (NATIVE, 70, 33),
    (INT8, 7, 5),
    (INT8, 520, 17),
    (INT4, 32, 5),
    (INT4, 160, 33),
    (FP8, 96, 48),
]


def gaussian(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes))).to(dtype)


def product(x, weight, bias, precision, routes: Routes) -> torch.Tensor:
    """float64 [T * k, out]"""
    rows = []
    num_pairs = len(routes.pairs)
    for pair, expert in enumerate(routes.experts.flatten().tolist()):
        row = x[pair * len(x) // num_pairs, None]
        if precision is FP8:
            rows.append(fp8_linear(row.float(), quantize(weight[expert], FP8), bias[expert])[0])
            continue
        exact = weight[expert].double()
        if precision is not NATIVE:
            exact = quantize(weight[expert], precision).dequantized().double()
        rows.append((row.double() @ exact.t())[0] + bias[expert].double())
    return torch.stack(rows).double()


def packed_of(num_experts, out_features, in_features, dtype, precision):
    """(packed, weight, bias)"""
    weight = gaussian(num_experts, out_features, in_features, dtype=dtype)
    bias = 10 * gaussian(num_experts, out_features, dtype=dtype)
    packed = CudaLinear(CPU, batch_invariant=False).pack(weight, bias, precision)
    return packed, weight, bias


def error_of(y: torch.Tensor, expected: torch.Tensor) -> float:
    assert y.shape == expected.shape
    return float((y.double() - expected).norm() / expected.norm())


@pytest.mark.covering(2)
@pytest.mark.some(8)
@FIXED
@DTYPES
@pytest.mark.parametrize(("precision", "in_features", "out_features"), SIZES, ids=str)
def test_it_is_the_product_of_each_pair(
    precision, in_features, out_features, dtype, batch_invariant
):
    kernel = GroupedLinear(CPU, batch_invariant=batch_invariant)
    packed, weight, bias = packed_of(3, out_features, in_features, dtype, precision)
    routes = routes_by("skewed", 5, 2, 3)
    for num_rows in (5, 10):
        x = gaussian(num_rows, in_features, dtype=dtype)
        y = kernel.apply(x, packed, routes)
        assert y.dtype == dtype
        assert error_of(y, product(x, weight, bias, precision, routes)) < TOLERANCE[dtype]


@pytest.mark.covering(2)
@pytest.mark.some(8)
@pytest.mark.parametrize("popularity", POPULARITIES)
@pytest.mark.parametrize(
    ("num_tokens", "num_chosen", "num_experts"), [(1, 1, 1), (1, 8, 9), (9, 1, 4), (20, 3, 5)]
)
@pytest.mark.parametrize("precision", [NATIVE, INT8])
def test_popularity(precision, num_tokens, num_chosen, num_experts, popularity):
    packed, weight, bias = packed_of(num_experts, 20, 32, torch.float16, precision)
    routes = routes_by(popularity, num_tokens, num_chosen, num_experts)
    x = gaussian(num_tokens, 32, dtype=torch.float16)
    y = GroupedLinear(CPU, batch_invariant=False).apply(x, packed, routes)
    expected = product(x, weight, bias, precision, routes)
    assert error_of(y, expected) < TOLERANCE[torch.float16]


@pytest.mark.parametrize("precision", [NATIVE, INT4])
@pytest.mark.parametrize("rows_per_expert", [4, 40, 130])
def test_every_tile(precision, rows_per_expert):
    packed, weight, bias = packed_of(2, 70, 96, torch.float16, precision)
    routes = routes_by("skewed", 2 * rows_per_expert, 1, 2)
    x = gaussian(2 * rows_per_expert, 96, dtype=torch.float16)
    y = GroupedLinear(CPU, batch_invariant=False).apply(x, packed, routes)
    expected = product(x, weight, bias, precision, routes)
    assert error_of(y, expected) < TOLERANCE[torch.float16]


@pytest.mark.parametrize("num_experts", [1, 2, 7, 128])
@pytest.mark.parametrize("rows", [1, 16, 64])
def test_no_routes_need_more_tiles(rows, num_experts):
    """The worst case: all experts but one have one pair more than whole tiles."""
    for num_pairs in (1, 2, 16, 17, 100, 130, 1000):
        most = most_tiles(num_pairs, num_experts, rows)
        for used in range(1, min(num_pairs, num_experts) + 1):
            counts = [1] * (used - 1)
            left = num_pairs - len(counts)
            needed = len(counts) + -(-left // rows)
            spread = [left // used + 1] * used
            needed = max(needed, sum(-(-count // rows) for count in spread if sum(spread) <= left))
            assert needed <= most <= num_pairs


@pytest.mark.some(3)
@DTYPES
@pytest.mark.parametrize("precision", list(WeightPrecision))
def test_a_pair_has_the_same_bits_alone_and_in_company(precision, dtype):
    kernel = GroupedLinear(CPU, batch_invariant=True)
    packed, _, _ = packed_of(3, 48, 160, dtype, precision)
    experts = chosen_experts("skewed", 40, 2, 3)
    x = gaussian(40, 160, dtype=dtype)
    routes = sort_routes(experts, torch.ones(experts.shape), 3)
    expected = kernel.apply(x, packed, routes).view(40, 2, -1)
    for tokens in (slice(0, 1), slice(3, 20), slice(39, 40)):
        part = sort_routes(experts[tokens], torch.ones(experts[tokens].shape), 3)
        y = kernel.apply(x[tokens], packed, part)
        assert torch.equal(y.view(-1, 2, 48), expected[tokens])


@pytest.mark.parametrize("dtype", [*TOLERANCE, torch.bfloat16], ids=str)
@pytest.mark.parametrize("precision", list(WeightPrecision))
def test_a_fixed_product_has_one_tile(precision, dtype):
    """Other tiles may on a GPU mean other instructions, which add in another order."""
    kernel = GroupedLinear(CPU, batch_invariant=True)
    packed, _, _ = packed_of(2, 16, 32, dtype, precision)
    assert len({kernel._tile(num_pairs, packed, dtype) for num_pairs in (1, 100, 10_000)}) == 1


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("precision", [NATIVE, INT8])
def test_a_row_keeps_to_itself(precision):
    kernel = GroupedLinear(CPU, batch_invariant=False)
    packed, _, _ = packed_of(2, 20, 96, torch.float32, precision)
    routes = routes_by("identical", 6, 1, 2)
    x = gaussian(6, 96)
    expected = kernel.apply(x, packed, routes)
    x[2, 0], x[3, 95] = torch.nan, -torch.inf
    y = kernel.apply(x, packed, routes)
    assert torch.equal(y[[0, 1, 4, 5]], expected[[0, 1, 4, 5]])
    assert not y[2:4].isfinite().any()


def test_rows_may_be_apart():
    packed, _, _ = packed_of(2, 20, 96, torch.float32, NATIVE)
    routes, kernel = routes_by("skewed", 5, 2, 2), GroupedLinear(CPU, batch_invariant=False)
    x = gaussian(5, 96)
    wide = torch.full((5, 256), torch.nan)
    wide[:, 33:129] = x
    expected = kernel.apply(x, packed, routes)
    assert torch.equal(kernel.apply(wide[:, 33:129], packed, routes), expected)
    assert torch.equal(kernel.apply(x.t().contiguous().t(), packed, routes), expected)


@pytest.mark.parametrize("precision", list(WeightPrecision))
def test_packed_experts_can_be_taken_apart_and_joined(precision):
    kernel = CudaLinear(CPU, batch_invariant=False)
    packed, _, _ = packed_of(3, 32, 64, torch.float16, precision)
    joined = kernel.join(kernel.parts(packed))
    assert (joined.num_experts, joined.out_features, joined.in_features) == (3, 32, 64)
    routes, x = routes_by("skewed", 4, 2, 3), gaussian(4, 64, dtype=torch.float16)
    apply = GroupedLinear(CPU, batch_invariant=False).apply
    assert torch.equal(apply(x, joined, routes), apply(x, packed, routes))


def test_grouped_tiles_hold_what_matrix_units_need():
    for tiles in (grouped_linear._NARROW, grouped_linear._WIDE, grouped_linear._QUANTIZED):
        for tile in (tiles.few, tiles.some, tiles.many):
            assert min(tile.rows, tile.outputs) >= 16
