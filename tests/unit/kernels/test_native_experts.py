"""Native experts against the reference; the bits of a pair alone, in company, on two threads."""

import dataclasses
import functools
from collections.abc import Callable

import pytest
import torch

from loraplex.core.errors import InternalError
from loraplex.core.weight_precision import WeightPrecision
from loraplex.kernels.native.backend import NativeKernels
from loraplex.kernels.native.library import (
    NativeLibraryError,
    available_instruction_sets,
    load_library,
)
from loraplex.kernels.quantization import SuperBlockWeight
from loraplex.kernels.reference import ReferenceKernels
from loraplex.kernels.routing import Routes, sort_routes
from loraplex.kernels.routing_rules import RoutingMode, RoutingRules
from support.cases_in_turn import in_turn
from support.kernel_cases.routers import ROUTERS, assert_routes_like_reference, assert_whole
from support.naming import naming
from support.stored_weights import SUPER_BLOCK_FORMS, super_block_weight

try:
    INSTRUCTION_SETS = available_instruction_sets()
except NativeLibraryError as error:
    pytest.skip(f"the native kernels are not built: {error}", allow_module_level=True)

REFERENCE = ReferenceKernels(torch.device("cpu"))
DTYPES = in_turn("dtype", [torch.float32, torch.bfloat16, torch.float16])
# Relative to the largest output: a few roundings of the output dtype.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 1.5e-3}
COUNTS = [(1, 1), (3, 2), (8, 8), (64, 2)]
"""Numbers of experts, and of those that compute a token."""
NUM_TOKENS = (0, 1, 5, 70)
SIZES = [(1, 130), (17, 1), (130, 17)]
"""in_features, out_features"""


@functools.cache
def kernels_of(instruction_set: str, num_threads: int) -> NativeKernels:
    return NativeKernels(load_library([instruction_set]), num_threads)


@pytest.fixture(params=INSTRUCTION_SETS)
def instruction_set(request: pytest.FixtureRequest) -> str:
    torch.default_generator.manual_seed(0)
    return str(request.param)


@pytest.fixture
def kernels(instruction_set: str) -> NativeKernels:
    return kernels_of(instruction_set, 2)


def random_routes(num_tokens: int, num_experts: int, num_chosen: int) -> Routes:
    experts = torch.rand(num_tokens, num_experts).argsort(1)[:, :num_chosen]
    return routes_to(experts, num_experts)


def routes_to(experts: torch.Tensor, num_experts: int) -> Routes:
    """Return routes to these experts [T, k] with random weights."""
    return sort_routes(experts.int(), torch.rand(experts.shape), num_experts)


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    if len(actual):
        error = (actual.double() - expected.double()).abs().max()
        assert error <= TOLERANCE[actual.dtype] * expected.double().abs().max()


def one_by_one(
    kernels: NativeKernels,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    routes: Routes,
) -> torch.Tensor:
    """Return what the plain linear of each pair's expert gives for its row alone."""
    packed = [kernels.pack_linear(*pair) for pair in zip(weight, bias, strict=True)]
    num_pairs = len(routes.pairs)
    chosen = routes.experts.flatten().tolist()
    rows = [
        kernels.linear(x[p * len(x) // num_pairs].unsqueeze(0), packed[expert])
        for p, expert in enumerate(chosen)
    ]
    return torch.cat(rows) if rows else x.new_empty(0, weight.shape[1])


@DTYPES
@pytest.mark.parametrize(("num_experts", "num_chosen"), COUNTS)
@in_turn("in_features, out_features", SIZES)
def test_grouped_linear_has_the_bits_of_each_experts_linear(
    instruction_set, in_features, out_features, num_experts, num_chosen, dtype
):
    one, two = (kernels_of(instruction_set, num_threads) for num_threads in (1, 2))
    weight = torch.randn(num_experts, out_features, in_features).to(dtype)
    bias = torch.randn(num_experts, out_features).to(dtype)
    packed = two.pack_linear(weight, bias)
    for num_tokens in NUM_TOKENS:
        routes = random_routes(num_tokens, num_experts, num_chosen)
        for num_rows in {num_tokens, num_tokens * num_chosen}:
            x = torch.randn(num_rows, in_features).to(dtype)
            result = two.grouped_linear(x, packed, routes)
            expected = REFERENCE.grouped_linear(
                x.float(), REFERENCE.pack_linear(weight.float(), bias.float()), routes
            )
            assert_near(result, expected.to(dtype))
            assert torch.equal(result, one_by_one(one, x, weight, bias, routes))
            assert torch.equal(result, one.grouped_linear(x, packed, routes))


@DTYPES
@in_turn("weights", [torch.float32, torch.bfloat16, torch.float16])
def test_types_of_weights_and_inputs_may_differ(kernels, weights, dtype):
    weight, bias = torch.randn(3, 40, 257).to(weights), torch.randn(3, 40).to(weights)
    routes = random_routes(9, 3, 2)
    x = torch.randn(9, 257).to(dtype)
    result = kernels.grouped_linear(x, kernels.pack_linear(weight, bias), routes)
    assert torch.equal(result, one_by_one(kernels, x, weight, bias, routes))


@pytest.mark.covering(2)
@DTYPES
@pytest.mark.parametrize("precision", [WeightPrecision.INT8, WeightPrecision.INT4])
@pytest.mark.parametrize("is_capped", [False, True], ids=["all of the CPU", "capped"])
def test_quantized_experts(instruction_set, precision, dtype, is_capped):
    kernels = NativeKernels(load_library([instruction_set]), 2)
    if is_capped:
        kernels._pool.limit_cpu_features(0)
    weight = torch.randn(5, 140, 640).to(dtype)
    packed = kernels.pack_linear(weight, None, precision)
    routes = random_routes(12, 5, 3)
    for num_rows in (12, 36):
        x = torch.randn(num_rows, 640).to(dtype)
        result = kernels.grouped_linear(x, packed, routes)
        alone = [kernels.pack_linear(matrix, None, precision) for matrix in weight]
        for pair, expert in enumerate(routes.experts.flatten().tolist()):
            row = x[pair * num_rows // 36].unsqueeze(0)
            assert torch.equal(result[pair], kernels.linear(row, alone[expert])[0])


@pytest.mark.parametrize("form", SUPER_BLOCK_FORMS)
def test_experts_in_super_blocks(kernels, form):
    whole = super_block_weight(form, 32, 512, 3 * 70, torch.Generator().manual_seed(0))

    def mapped(change: Callable[[torch.Tensor], torch.Tensor]) -> SuperBlockWeight:
        return dataclasses.replace(
            whole, values=change(whole.values), levels=whole.levels.mapped(change)
        )

    packed = kernels.pack_linear(mapped(lambda rows: rows.unflatten(0, (3, 70))), None)
    alone = [kernels.pack_linear(mapped(lambda t, i=i: t[70 * i :][:70]), None) for i in range(3)]
    routes, x = random_routes(30, 3, 2), torch.randn(30, 512)
    result = kernels.grouped_linear(x, packed, routes)
    for pair, expert in enumerate(routes.experts.flatten().tolist()):
        row = x[pair // 2].unsqueeze(0)
        assert torch.equal(result[pair], kernels.linear(row, alone[expert])[0])


@pytest.mark.parametrize("num_tokens", [1, 140, 1500])
def test_all_tokens_may_have_the_same_experts(kernels, num_tokens):
    weight, bias = torch.randn(6, 20, 33), torch.randn(6, 20)
    routes = routes_to(torch.tensor([[4, 1]]).expand(num_tokens, 2), 6)
    x = torch.randn(num_tokens, 33)
    result = kernels.grouped_linear(x, kernels.pack_linear(weight, bias), routes)
    for choice, expert in enumerate((4, 1)):
        alone = kernels.linear(x, kernels.pack_linear(weight[expert], bias[expert]))
        assert torch.equal(result[choice::2], alone)


def test_more_pairs_than_are_widened_at_a_time(kernels):
    weight, bias = torch.randn(7, 5, 9), torch.randn(7, 5)
    routes = random_routes(2500, 7, 2)
    x = torch.randn(2500, 9)
    result = kernels.grouped_linear(x, kernels.pack_linear(weight, bias), routes)
    assert torch.equal(result, one_by_one(kernels, x, weight, bias, routes))


def test_experts_without_rows_are_not_read(kernels):
    weight = torch.randn(4, 20, 33)
    weight[[0, 2, 3]] = torch.nan
    packed = kernels.pack_linear(weight, None)
    x = torch.randn(3, 33)
    result = kernels.grouped_linear(x, packed, routes_to(torch.ones(3, 1), 4))
    assert torch.equal(result, kernels.linear(x, kernels.pack_linear(weight[1], None)))


def test_packed_experts_are_kept_in_parts(kernels):
    weight, bias = torch.randn(3, 20, 33), torch.randn(3, 20)
    packed = kernels.pack_linear(weight, bias)
    joined = kernels.join_linear(kernels.linear_parts(packed))
    routes, x = random_routes(4, 3, 2), torch.randn(4, 33)
    result = kernels.grouped_linear(x, joined, routes)
    assert torch.equal(result, kernels.grouped_linear(x, packed, routes))


@DTYPES
@in_turn("num_chosen", [1, 2, 8])
@pytest.mark.parametrize("shared", ["none", "shared", "gated"])
def test_combine_experts(instruction_set, shared, num_chosen, dtype):
    for num_tokens in NUM_TOKENS:
        for size in (1, 17, 130, 600):
            routes = random_routes(num_tokens, 8, num_chosen)
            y = torch.randn(num_tokens * num_chosen, size).to(dtype)
            rows = (
                torch.randn(num_tokens, size).to(dtype),
                4 * torch.randn(num_tokens, 1).to(dtype),
            )
            added = rows[: ("none", "shared", "gated").index(shared)]
            results = [
                kernels_of(instruction_set, num_threads).combine_experts(y, routes, *added)
                for num_threads in (1, 2)
            ]
            assert_near(results[0], REFERENCE.combine_experts(y, routes, *added))
            assert torch.equal(*results)
            for token in range(min(num_tokens, 5)):
                alone = kernels_of(instruction_set, 1).combine_experts(
                    y[token * num_chosen : (token + 1) * num_chosen],
                    sort_routes(routes.experts[[token]], routes.weights[[token]], 8),
                    *(tensor[[token]] for tensor in added),
                )
                assert torch.equal(alone[0], results[0][token])


@pytest.mark.some(15)
@DTYPES
@pytest.mark.parametrize("router", ROUTERS)
def test_routes_are_those_of_the_reference(kernels, router, dtype):
    assert_routes_like_reference(kernels.route, ROUTERS[router], torch.device("cpu"), dtype)


@pytest.mark.some(15)
@pytest.mark.parametrize("router", ROUTERS)
def test_a_token_is_routed_alike_alone_and_on_any_number_of_threads(instruction_set, router):
    one, two = (kernels_of(instruction_set, num_threads) for num_threads in (1, 2))
    case = ROUTERS[router]
    logits, own = case.logits(300), (case.selection_bias(), case.expert_factors())
    together = two.route(logits, case.rules, *own)
    for first, end in ((0, 300), (0, 1), (7, 9), (299, 300)):
        alone = one.route(logits[first:end], case.rules, *own)
        assert torch.equal(alone.experts, together.experts[first:end])
        assert torch.equal(alone.weights, together.weights[first:end])


@pytest.mark.some(15)
@pytest.mark.parametrize("router", ROUTERS)
@in_turn("value", [torch.nan, torch.inf, -torch.inf, 0.0])
def test_equal_and_extreme_logits_have_experts(kernels, router, value):
    case = ROUTERS[router]
    logits = torch.full((3, case.rules.num_experts), value)
    routes = kernels.route(logits, case.rules, case.selection_bias())
    assert_whole(routes, case.rules)
    assert all(len(set(chosen)) == case.rules.num_chosen for chosen in routes.experts.tolist())
    if value != value:
        assert routes.weights.isnan().all()


def test_no_tokens_are_routed(kernels):
    rules = RoutingRules(num_experts=4, num_chosen=2, mode=RoutingMode.SOFTMAX)
    routes = kernels.route(torch.empty(0, 4), rules)
    assert routes.experts.shape == routes.weights.shape == (0, 2)
    assert routes.starts.tolist() == [0] * 5


@pytest.mark.parametrize(
    "changes", [{"num_chosen": 5}, {"num_chosen": 0}, {"num_groups": 3}, {"num_chosen_groups": 2}]
)
def test_rules_that_cannot_be_followed_are_refused(kernels, changes):
    rules = RoutingRules(
        **({"num_experts": 4, "num_chosen": 2, "mode": RoutingMode.SOFTMAX} | changes)
    )
    with pytest.raises(InternalError, match=naming("loraplex_route")):
        kernels.route(torch.zeros(1, 4), rules)
