"""Experts at the sizes of Qwen3-30B-A3B and Mixtral: against float64, by CUDA graphs, by bits."""

import functools

import pytest
import torch

from loraplex.core.weight_precision import WeightPrecision
from loraplex.kernels import quantization
from loraplex.kernels.accelerator import CudaAccelerator
from loraplex.kernels.activations import Activation
from loraplex.kernels.cuda import elementwise, experts
from loraplex.kernels.cuda.graphs import StepGraphs
from loraplex.kernels.cuda.grouped_linear import GroupedLinear
from loraplex.kernels.cuda.linear import CudaLinear
from loraplex.kernels.cuda.lora import CudaLora
from loraplex.kernels.lora import LoraPlace, LoraUse
from loraplex.kernels.reference import ReferenceKernels
from loraplex.kernels.routing import Routes, combine_experts, route, sort_routes
from loraplex.kernels.routing_rules import RoutingMode, RoutingRules
from support.kernel_cases.routers import ROUTERS, assert_whole, on_host
from support.pooled_adapters import BASE, PooledAdapters, token_uses, users
from support.routed_pairs import POPULARITIES, routes_by

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
NATIVE, INT8, INT4, FP8 = WeightPrecision
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
TOLERANCE = {torch.bfloat16: 3e-3, torch.float16: 5e-4, torch.float32: 2e-6}
# Relative to the largest output: a few roundings of the output dtype.
LORA_TOLERANCE = {torch.float32: 2e-6, torch.float16: 1.5e-3, torch.bfloat16: 1e-2}
MODELS = {"a3b": (128, 8, 2048, 768), "mixtral": (8, 2, 1024, 3584), "odd": (6, 3, 1003, 250)}
"""Experts, chosen ones, inputs and outputs; Mixtral's at a quarter, for the memory."""
UP = ("experts.gate_proj", "experts.up_proj")
MIXED = (1, 64, 3, 0, 16, 8, 17)


def gaussian(*sizes: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator(CUDA).manual_seed(sum(sizes))
    return torch.randn(sizes, generator=generator, device=CUDA).to(dtype)


@DTYPES
@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("num_tokens", [1, 64, 2048])
def test_routes(name, num_tokens, dtype):
    """Nearly equal scores may change places in float32."""
    case = ROUTERS[name]
    logits = case.logits(num_tokens).to(dtype)
    own = case.selection_bias(), case.expert_factors()
    on_device = [None if each is None else each.to(CUDA) for each in own]
    found = on_host(experts.route(logits.to(CUDA), case.rules, *on_device))
    expected = route(logits, case.rules, *own)
    assert_whole(found, case.rules)
    same = (found.experts == expected.experts).all(1)
    assert same.float().mean() > 0.999
    torch.testing.assert_close(found.weights[same], expected.weights[same], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ROUTERS)
def test_of_equal_scores_the_lowest_expert_is_chosen(name):
    case = ROUTERS[name]
    logits = case.tied_logits(64)
    found = on_host(experts.route(logits.to(CUDA), case.rules))
    assert torch.equal(found.experts, route(logits, case.rules).experts)


def test_a_token_with_a_nan_keeps_to_itself():
    rules = RoutingRules(num_experts=128, num_chosen=8, mode=RoutingMode.SOFTMAX)
    logits = gaussian(5, 128, dtype=torch.float32)
    expected = experts.route(logits, rules)
    logits[2, 7] = torch.nan
    found = experts.route(logits, rules)
    assert_whole(on_host(found), rules)
    assert found.weights[2].isnan().all()
    others = [0, 1, 3, 4]
    assert torch.equal(found.experts[others], expected.experts[others])
    assert torch.equal(found.weights[others], expected.weights[others])


def test_a_large_step_is_sorted_the_same_way_each_time():
    routes = routes_by("skewed", 16384, 8, 128, CUDA)
    for _ in range(3):
        found = experts._sorted_routes(routes.experts, routes.weights, 128)
        assert torch.equal(found.pairs, routes.pairs)
        assert torch.equal(found.starts, routes.starts)


def routes_of(model: str, popularity: str, num_tokens: int) -> Routes:
    num_experts, num_chosen, _, _ = MODELS[model]
    return routes_by(popularity, num_tokens, num_chosen, num_experts, CUDA)


@functools.lru_cache(maxsize=2)
def packed(model: str, dtype: torch.dtype, precision: WeightPrecision):
    """(packed, what it stands for, bias)"""
    num_experts, _, in_features, out_features = MODELS[model]
    weight = gaussian(num_experts, out_features, in_features, dtype=dtype)
    bias = gaussian(num_experts, out_features, dtype=dtype)
    result = CudaLinear(CUDA, batch_invariant=False).pack(weight, bias, precision)
    rows = weight.flatten(0, 1)
    exact = rows if precision is NATIVE else quantization.quantize(rows, precision).dequantized()
    return result, exact.view(weight.shape), bias


def check_product(model, routes, dtype, precision, *, batch_invariant=False) -> None:
    in_features = MODELS[model][2]
    layer, weight, bias = packed(model, dtype, precision)
    kernel = GroupedLinear(CUDA, batch_invariant=batch_invariant)
    for num_rows in (len(routes.experts), len(routes.pairs)):
        x = gaussian(num_rows, in_features, dtype=dtype)
        wide = x.double()
        if precision is FP8:
            rows, scales = quantization.quantize_fp8_rows(x)
            wide = rows.double() * scales.double()
        y = kernel.apply(x, layer, routes).double()
        expected = torch.empty_like(y)
        for expert in range(routes.num_experts):
            pairs = routes.pairs[routes.starts[expert] : routes.starts[expert + 1]].long()
            own = wide[pairs * num_rows // len(routes.pairs)]
            expected[pairs] = own @ weight[expert].double().t() + bias[expert].double()
        assert (y - expected).norm() / expected.norm() < TOLERANCE[dtype]


@pytest.mark.parametrize("batch_invariant", [False, True], ids=["free", "fixed"])
@DTYPES
@pytest.mark.parametrize("precision", [NATIVE, INT8, INT4, FP8])
@pytest.mark.parametrize("num_tokens", [1, 32, 300])
def test_products_of_experts(num_tokens, precision, dtype, batch_invariant):
    if precision is FP8 and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no fp8")
    for popularity in POPULARITIES:
        routes = routes_of("a3b", popularity, num_tokens)
        check_product("a3b", routes, dtype, precision, batch_invariant=batch_invariant)


@DTYPES
@pytest.mark.parametrize("precision", [NATIVE, INT8])
@pytest.mark.parametrize("model", ["mixtral", "odd"])
def test_other_sizes(model, precision, dtype):
    for num_tokens in (1, 33, 1500):
        check_product(model, routes_of(model, "skewed", num_tokens), dtype, precision)


@DTYPES
@pytest.mark.parametrize("precision", [NATIVE, INT8, INT4])
def test_a_pair_has_the_same_bits_alone_and_in_company(precision, dtype):
    layer, _, _ = packed("a3b", dtype, precision)
    kernel = GroupedLinear(CUDA, batch_invariant=True)
    routes, x = routes_of("a3b", "skewed", 300), gaussian(300, 2048, dtype=dtype)
    together = kernel.apply(x, layer, routes).view(300, 8, -1)
    for token in (0, 3, 299):
        one = slice(token, token + 1)
        alone = sort_routes(routes.experts[one], routes.weights[one], 128)
        assert torch.equal(kernel.apply(x[one], layer, alone), together[token])


@DTYPES
def test_sums_and_the_clamped_gate(dtype):
    routes = routes_of("a3b", "skewed", 37)
    y, shared = gaussian(37 * 8, 2048, dtype=dtype), gaussian(37, 2048, dtype=dtype)
    gate = gaussian(37, 1, dtype=dtype)
    found = experts.combine_experts(y, routes, shared, gate)
    torch.testing.assert_close(found, combine_experts(y, routes, shared, gate))
    gate_up = 8 * gaussian(37, 2 * 768, dtype=dtype)
    reference = ReferenceKernels(CUDA).gate(gate_up, Activation.CLAMPED_SWIGLU)
    torch.testing.assert_close(elementwise.gate(gate_up, Activation.CLAMPED_SWIGLU), reference)


@functools.cache
def pooled(model: str, dtype: torch.dtype) -> PooledAdapters:
    torch.manual_seed(0)
    num_experts, _, in_features, out_features = MODELS[model]
    num_experts = min(num_experts, 16)  # the pool has every rank of every expert
    shapes = dict.fromkeys(UP, (in_features, out_features))
    counts = dict.fromkeys(UP, num_experts)
    alignment = 1 if model == "odd" else 1024
    return PooledAdapters(*(8, MIXED, shapes, dtype, CUDA), alignment=alignment, num_experts=counts)


def lora_inputs(model: str, popularity: str, num_tokens: int, dtype: torch.dtype):
    """(y, x, routes, offsets)"""
    num_experts, num_chosen, in_features, out_features = MODELS[model]
    routes = routes_by(popularity, num_tokens, num_chosen, min(num_experts, 16), CUDA)
    y = gaussian(num_tokens * num_chosen, 2 * out_features, dtype=dtype)
    return y, gaussian(num_tokens, in_features, dtype=dtype), routes, (0, out_features)


def added(y, x, batch, routes, offsets, *, batch_invariant=False):
    kernel, result = CudaLora(CUDA, batch_invariant=batch_invariant), y.clone()
    kernel.add_experts(result, x, batch, routes, LoraPlace(1, UP, offsets))
    return result


@DTYPES
@pytest.mark.parametrize("popularity", ["identical", "distinct", "skewed"])
@pytest.mark.parametrize("longest", [4, 64])
@pytest.mark.parametrize("model", ["a3b", "odd"])
def test_lora_of_experts(model, longest, popularity, dtype):
    adapters = pooled(model, dtype)
    for num_tokens, routing in ((1, "even"), (8, "skewed"), (40, "identical")):
        y, x, routes, offsets = lora_inputs(model, routing, num_tokens, dtype)
        chosen = [BASE if user == BASE else user % 8 for user in users(popularity, num_tokens)]
        uses = [*token_uses(chosen), LoraUse(1, 5, 0, 1, 0.5)]
        expected = adapters.expected_of_experts(y, x, uses, routes, 1, UP, offsets)
        result = added(y, x, adapters.batch(uses, num_tokens, longest), routes, offsets)
        error = (result.double() - expected).abs().max() / expected.abs().max()
        assert error < LORA_TOLERANCE[dtype]


@DTYPES
def test_a_token_s_bits_do_not_depend_on_its_company(dtype):
    adapters = pooled("a3b", dtype)
    y, x, routes, offsets = lora_inputs("a3b", "skewed", 301, dtype)
    batch = adapters.batch([LoraUse(0, 1, 0, 300, 1.0), LoraUse(0, 4, 300, 1, 0.5)], 301)
    together = added(y, x, batch, routes, offsets, batch_invariant=True)
    for token, entry, scale in ((0, 1, 1.0), (299, 1, 1.0), (300, 4, 0.5)):
        one, pairs = slice(token, token + 1), slice(8 * token, 8 * token + 8)
        mine = sort_routes(routes.experts[one], routes.weights[one], routes.num_experts)
        batch = adapters.batch([LoraUse(0, entry, 0, 1, scale)], 1)
        alone = added(y[pairs], x[one], batch, mine, offsets, batch_invariant=True)
        assert torch.equal(alone, together[pairs])


@DTYPES
def test_a_graph_computes_other_routes_and_batches_of_its_size(dtype):
    adapters, (layer, _, _) = pooled("a3b", dtype), packed("a3b", dtype, NATIVE)
    accelerator = CudaAccelerator(CUDA)
    graphs, kernel = StepGraphs(accelerator), CudaLora(CUDA, batch_invariant=False)
    grouped = GroupedLinear(CUDA, batch_invariant=False)
    rules = RoutingRules(num_experts=128, num_chosen=8, mode=RoutingMode.SOFTMAX)
    x = gaussian(32, 2048, dtype=dtype)
    accelerator.synchronize()

    def forward(logits, batch):
        routes = experts.route(logits, rules)
        y = grouped.apply(x, layer, routes)
        few = experts.route(logits[:, :16], few_rules)
        wide = torch.cat((y, y), 1)
        kernel.add_experts(wide, x, batch, few, LoraPlace(1, UP, (0, 768)))
        return experts.combine_experts(wide, routes)

    few_rules = RoutingRules(num_experts=16, num_chosen=8, mode=RoutingMode.SOFTMAX)

    def step(logits, batch):
        inputs = (logits, *batch.segments.tensors)
        return graphs.repeat(32, inputs, lambda: forward(logits, batch))

    with accelerator.compute():
        graphs.is_recording = True
        step(gaussian(32, 128, dtype=dtype), adapters.batch(token_uses([0]), 32))
        graphs.is_recording = False
        for seed, popularity in enumerate(("distinct", "identical", "skewed")):
            chosen = [BASE if user == BASE else user % 8 for user in users(popularity, 32)]
            logits = gaussian(33 + seed, 128, dtype=dtype)[:32]
            batch = adapters.batch(token_uses(chosen), 32)
            assert torch.equal(step(logits, batch).clone(), forward(logits, batch))
        accelerator.synchronize()
