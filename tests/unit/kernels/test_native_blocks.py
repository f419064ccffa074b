"""Row layers: sums of blocks of inputs, added as a tree, on one rank.

The measure is the plain product: a row layer has the bits of its blocks' products, each computed by
itself in float32, added as (b0 + b1) + (b2 + b3), with the bias, and rounded once.
"""

import pytest
import torch
from tests.support.bfloat16_sums import sums_of
from tests.support.pooled_adapters import PooledAdapters, token_uses
from tests.support.routed_pairs import routes_by

from loraplex.core.errors import ConfigError
from loraplex.core.weight_precision import WeightPrecision
from loraplex.kernels.lora import LoraPlace
from loraplex.kernels.native.backend import NativeKernels
from loraplex.kernels.native.library import (
    CPU_BFLOAT16_ORDERS,
    NativeLibrary,
    NativeLibraryError,
    available_instruction_sets,
    load_library,
)
from loraplex.kernels.routing import Routes
from support.naming import naming

try:
    INSTRUCTION_SETS = available_instruction_sets()
except NativeLibraryError as error:
    pytest.skip(f"the native kernels are not built: {error}", allow_module_level=True)

NATIVE, INT8, INT4, _ = WeightPrecision
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
KINDS = pytest.mark.parametrize(
    ("dtype", "precision"),
    [
        (torch.float32, NATIVE),
        (torch.bfloat16, NATIVE),
        (torch.float16, NATIVE),
        (torch.bfloat16, INT8),
        (torch.float32, INT8),
        (torch.bfloat16, INT4),
    ],
    ids=str,
)
# Relative error in the 2-norm: float32 sums, then one rounding to the output's type.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}

# (inputs of a block, outputs): one of each, odd, one more than a kernel takes at once, many panels.
SIZES = [(1, 1), (3, 5), (129, 33), (257, 130), (515, 40)]
INT4_SIZES = [(32, 5), (96, 33), (544, 130)]
ROWS = (1, 2, 3, 5, 6, 7, 13, 40)
RANKS = (1, 3, 8, 64)


@pytest.fixture(params=INSTRUCTION_SETS)
def library(request) -> NativeLibrary:
    return load_library([request.param])


@pytest.fixture
def kernels(library) -> NativeKernels:
    torch.default_generator.manual_seed(0)
    return NativeKernels(library, 2)


def sizes_of(precision: WeightPrecision) -> list[tuple[int, int]]:
    return INT4_SIZES if precision is INT4 else SIZES


def tree(tensors: list[torch.Tensor]) -> torch.Tensor:
    match tensors:
        case [one]:
            return one
        case [left, right]:
            return left + right
        case [a, b, c, d]:
            return (a + b) + (c + d)
        case _:
            return tree(tensors[:4]) + tree(tensors[4:])


def by_blocks(
    kernels: NativeKernels,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    precision: WeightPrecision,
    num_blocks: int,
) -> torch.Tensor:
    """The definition of a row layer, by plain layers."""
    pairs = zip(x.float().chunk(num_blocks, 1), weight.chunk(num_blocks, 1), strict=True)
    sums = [kernels.linear(i, kernels.pack_linear(w, None, precision)) for i, w in pairs]
    return of_sums(sums, bias, x.dtype)


def of_sums(
    sums: list[torch.Tensor], bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    total = tree(sums)
    return (total if bias is None else total + bias.float()).to(dtype)


@pytest.mark.covering(2)
@pytest.mark.some(24)
@KINDS
@pytest.mark.parametrize("num_blocks", [1, 2, 4, 8])
def test_each_block_has_a_sum_of_its_own(library, kernels, dtype, precision, num_blocks):
    sums = sums_of(library) if dtype is torch.bfloat16 and precision is NATIVE else None
    for block_inputs, out_features in sizes_of(precision):
        weight = torch.randn(out_features, num_blocks * block_inputs).to(dtype)
        for bias in (torch.randn(out_features).to(dtype), None):
            packed = kernels.pack_linear(weight, bias, precision, num_blocks)
            x = torch.randn(40, weight.shape[1]).to(dtype)
            if sums is not None:
                pairs = zip(x.chunk(num_blocks, 1), weight.chunk(num_blocks, 1), strict=True)
                expected = of_sums([sums(*pair) for pair in pairs], bias, dtype)
            else:
                expected = by_blocks(kernels, x, weight, bias, precision, num_blocks)
            for num_rows in ROWS:
                assert torch.equal(kernels.linear(x[:num_rows], packed), expected[:num_rows])


@DTYPES
def test_against_float64(kernels, dtype):
    for block_inputs, out_features in SIZES:
        weight = torch.randn(out_features, 4 * block_inputs).to(dtype)
        bias = torch.randn(out_features).to(dtype)
        x = torch.randn(140, 4 * block_inputs).to(dtype)
        exact = x.double() @ weight.double().t() + bias.double()
        y = kernels.linear(x, kernels.pack_linear(weight, bias, num_blocks=4))
        assert (y.double() - exact).norm() <= TOLERANCE[dtype] * exact.norm()


@KINDS
def test_a_row_has_the_same_bits_in_any_company_and_on_any_number_of_threads(dtype, precision):
    for name in INSTRUCTION_SETS:
        one, three = (NativeKernels(load_library([name]), threads) for threads in (1, 3))
        weight, x = torch.randn(300, 4 * 544).to(dtype), torch.randn(150, 4 * 544).to(dtype)
        packed = one.pack_linear(weight, None, precision, 4)
        alone = torch.cat([one.linear(row.unsqueeze(0), packed) for row in x])
        for num_rows in (*range(1, 41), 129, 150):
            assert torch.equal(three.linear(x[:num_rows], packed), alone[:num_rows])


@KINDS
def test_instruction_sets_with_fused_multiply_add_agree_to_the_bit(dtype, precision):
    weight, x = torch.randn(130, 4 * 288).to(dtype), torch.randn(37, 4 * 288).to(dtype)
    results = []
    for name in INSTRUCTION_SETS:
        if name != "generic" or precision is not NATIVE:
            kernels = NativeKernels(load_library([name]), 2)
            kernels._pool.limit_cpu_features(~CPU_BFLOAT16_ORDERS & (1 << 64) - 1)
            results.append(kernels.linear(x, kernels.pack_linear(weight, None, precision, 4)))
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_a_block_that_is_not_finite_or_zero_in_a_quantised_layer(kernels):
    weight, x = torch.randn(20, 256), torch.randn(3, 256)
    x[0, 70] = torch.inf
    x[1, 64:128] = 0.0
    for precision in (INT8, INT4):
        y = kernels.linear(x, kernels.pack_linear(weight, None, precision, 4))
        assert y[0].isnan().all()
        assert torch.equal(y[1:], by_blocks(kernels, x[1:], weight, None, precision, 4))


@pytest.mark.covering(2)
@KINDS
def test_experts_have_the_bits_of_a_layer(kernels, dtype, precision):
    num_experts, block_inputs = 5, 96
    weight = torch.randn(num_experts, 33, 4 * block_inputs).to(dtype)
    bias = torch.randn(num_experts, 33).to(dtype)
    routes: Routes = routes_by("skewed", 20, 2, num_experts)
    x = torch.randn(40, 4 * block_inputs).to(dtype)
    y = kernels.grouped_linear(x, kernels.pack_linear(weight, bias, precision, 4), routes)
    alone = [
        kernels.pack_linear(matrix, b, precision, 4) for matrix, b in zip(weight, bias, strict=True)
    ]
    for pair, expert in enumerate(routes.experts.flatten().tolist()):
        assert torch.equal(y[pair], kernels.linear(x[pair : pair + 1], alone[expert])[0])


@pytest.mark.covering(2)
@KINDS
def test_row_norms_are_of_what_the_weight_stands_for(kernels, dtype, precision):
    for block_inputs, out_features in sizes_of(precision):
        weight = torch.randn(out_features, 4 * block_inputs).to(dtype)
        packed = kernels.pack_linear(weight, None, precision, 4)
        norms = [
            kernels.squared_row_norms(kernels.pack_linear(block, None, precision))
            for block in weight.chunk(4, 1)
        ]
        assert torch.equal(kernels.squared_row_norms(packed), tree(norms))


def test_a_layer_apart_has_the_same_bits_without_the_bias(kernels):
    weight, bias, x = torch.randn(33, 132), torch.randn(33), torch.randn(4, 132)
    apart, whole = (kernels.pack_linear(weight, given, num_blocks=4) for given in (bias, None))
    assert torch.equal(kernels.linear_apart(x, apart, torch.float32), kernels.linear(x, whole))


def test_parts_keep_the_blocks(kernels):
    packed = kernels.pack_linear(torch.randn(33, 132), None, num_blocks=4)
    joined = kernels.join_linear(kernels.linear_parts(packed))
    x = torch.randn(4, 132)
    assert torch.equal(kernels.linear(x, joined), kernels.linear(x, packed))


def test_blocks_that_cannot_be(kernels):
    weight = torch.randn(4, 96)
    with pytest.raises(ConfigError, match=naming(96, 3, 1, 2, 4, 8)):
        kernels.pack_linear(weight, None, num_blocks=3)
    with pytest.raises(ConfigError, match=naming(90, 4)):
        kernels.pack_linear(weight[:, :90], None, num_blocks=4)
    with pytest.raises(ConfigError, match=naming(24, "int4")):
        kernels.pack_linear(weight, None, INT4, num_blocks=4)


class Shrink:
    """Adapters of one module whose B is one: what they add is scale * (x A^T), by rank."""

    def __init__(self, rank: int, block_inputs: int, dtype: torch.dtype) -> None:
        self.shape = (4 * block_inputs, rank)
        self.adapters = PooledAdapters(3, (rank,), {"o_proj": self.shape}, dtype, num_layers=1)
        self.a = []
        for offset in self.adapters.table.offsets.flat:
            middle = int(offset) + rank * 4 * block_inputs
            self.a.append(self.adapters.pool[int(offset) : middle].view(rank, -1))
            self.adapters.pool[middle : middle + rank * rank] = torch.eye(rank).flatten()


@pytest.mark.covering(2)
@pytest.mark.some(12)
@pytest.mark.parametrize("rank", RANKS)
@DTYPES
def test_lora_shrinks_by_blocks(kernels, rank, dtype):
    for block_inputs in (1, 37, 160):
        shrink = Shrink(rank, block_inputs, dtype)
        users = [token % 3 for token in range(11)]
        uses = [*token_uses(users), *token_uses(users[1:], wave=1)]
        batch = shrink.adapters.batch(uses, len(users))
        x, y = torch.randn(11, 4 * block_inputs), torch.zeros(11, rank)
        kernels.add_lora(y, x, batch, LoraPlace(0, ("o_proj",), (0,), num_blocks=4))
        expected = torch.zeros(11, rank)
        for use in uses:
            share = products(kernels, x[use.first_token], shrink.a[use.entry])
            scale = torch.tensor(use.scale) * torch.tensor(
                float(shrink.adapters.table.scales[use.entry, 0])
            )
            expected[use.first_token] += share * scale
        assert torch.equal(y, expected)


def products(kernels: NativeKernels, row: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """x A^T [rank] by blocks: the tree of what unscaled adapters with one block's A give."""
    rank, in_features = a.shape
    shares = []
    for x, block in zip(row.chunk(4), a.chunk(4, 1), strict=True):
        adapter = PooledAdapters(1, (rank,), {"o_proj": (in_features // 4, rank)}, a.dtype)
        place = int(adapter.table.offsets[0, 0])
        matrices = torch.cat([block.flatten(), torch.eye(rank).to(a.dtype).flatten()])
        adapter.pool[place : place + len(matrices)] = matrices
        adapter.table.scales[:] = 1.0
        share = torch.zeros(1, rank)
        batch = adapter.batch([token_uses([0])[0]._replace(scale=1.0)], 1)
        kernels.add_lora(share, x.unsqueeze(0), batch, LoraPlace(0, ("o_proj",), (0,)))
        shares.append(share[0])
    return tree(shares)


@DTYPES
def test_lora_of_experts_shrinks_by_blocks(kernels, dtype):
    shapes = {"experts.down_proj": (4 * 24, 19)}
    adapters = PooledAdapters(3, RANKS, shapes, dtype, num_experts={"experts.down_proj": 5})
    routes = routes_by("skewed", 12, 2, 5)
    uses = token_uses([token % 3 for token in range(12)])
    batch = adapters.batch(uses, 12)
    x, y = torch.randn(24, 4 * 24).to(dtype), torch.randn(24, 19).to(dtype)
    result = y.clone()
    kernels.add_expert_lora(
        result, x, batch, routes, LoraPlace(1, tuple(shapes), (0,), num_blocks=4)
    )
    exact = adapters.expected_of_experts(y, x, uses, routes, 1, list(shapes), [0])
    assert (result.double() - exact).norm() <= TOLERANCE[dtype] * exact.norm()
    plain = y.clone()
    kernels.add_expert_lora(plain, x, batch, routes, LoraPlace(1, tuple(shapes), (0,)))
    if dtype is torch.float32:
        assert not torch.equal(result, plain)
