"""Multi-LoRA of experts on a GPU, interpreted: against float64 over ranks, popularity and tiles."""

import pytest
import torch

from loraplex.kernels.accelerator import HostAccelerator
from loraplex.kernels.cuda import lora
from loraplex.kernels.cuda.graphs import StepGraphs
from loraplex.kernels.cuda.lora import CudaLora
from loraplex.kernels.lora import LoraPlace, LoraUse
from loraplex.kernels.routing import Routes, sort_routes
from support.pooled_adapters import BASE, PooledAdapters, token_uses, users
from support.routed_pairs import chosen_experts, routes_by

HOST = torch.device("cpu")
NUM_EXPERTS = 5
FUSED = ("experts.gate_proj", "experts.up_proj")
SHAPES = {"q_proj": (8, 8), FUSED[0]: (48, 32), FUSED[1]: (48, 48)}
OFFSETS, WIDTH = (0, 32), 80
ODD = {"q_proj": (3, 2), FUSED[0]: (37, 50), FUSED[1]: (37, 19)}
ODD_OFFSETS, ODD_WIDTH = (0, 50), 69
MIXED = (1, 40, 3, 0, 16, 8, 17)
# Relative to the largest output: a few roundings of the output dtype.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1.5e-3}

# Pieces of few tokens, and matrices.
VARIANTS = pytest.mark.parametrize(
    ("dtype", "longest"),
    [
        pytest.param(torch.float32, 4, id="fp32-few"),
        pytest.param(torch.float16, 4, id="fp16-few", marks=pytest.mark.slow),
        pytest.param(torch.float16, 16, id="fp16-many", marks=pytest.mark.slow),
    ],
)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.default_generator.manual_seed(0)


def pooled(num_adapters, ranks, dtype, shapes=SHAPES, num_experts=NUM_EXPERTS) -> PooledAdapters:
    experts = dict.fromkeys(FUSED, num_experts)
    return PooledAdapters(num_adapters, ranks, shapes, dtype, num_experts=experts)


def inputs(routes: Routes, dtype, in_features=48, width=WIDTH, *, is_by_pair=False):
    """(y, x)"""
    num_pairs = len(routes.pairs)
    y = torch.randn(num_pairs, width)
    x = torch.randn(num_pairs if is_by_pair else len(routes.experts), in_features)
    return y.to(dtype), x.to(dtype)


def added(y, x, batch, routes, *, offsets=OFFSETS, modules=FUSED, batch_invariant=False):
    kernel = CudaLora(HOST, batch_invariant=batch_invariant)
    result = y.clone()
    kernel.add_experts(result, x, batch, routes, LoraPlace(1, modules, offsets))
    return result


def error(result, expected) -> float:
    assert not result.isnan().any()
    return float((result.double() - expected).abs().max() / expected.abs().max())


def check(adapters, uses, routes, longest, *, is_by_pair=False) -> None:
    dtype = adapters.pool.dtype
    y, x = inputs(routes, dtype, is_by_pair=is_by_pair)
    expected = adapters.expected_of_experts(y, x, uses, routes, 1, FUSED, OFFSETS)
    result = added(y, x, adapters.batch(uses, len(routes.experts), longest), routes)
    assert error(result, expected) < TOLERANCE[dtype]
    for token in set(range(len(routes.experts))) - {use.first_token for use in uses}:
        pairs = slice(token * routes.num_chosen, (token + 1) * routes.num_chosen)
        assert torch.equal(result[pairs], y[pairs])


@pytest.mark.some(3)
@VARIANTS
@pytest.mark.parametrize(
    ("popularity", "routing"),
    [("identical", "identical"), ("distinct", "even"), ("skewed", "skewed")],
)
def test_equals_float64(popularity, routing, dtype, longest):
    adapters = pooled(6, MIXED, dtype)
    routes = routes_by(routing, 6, 2, NUM_EXPERTS)
    check(adapters, token_uses(users(popularity, 6)), routes, longest)


@VARIANTS
def test_inputs_by_pair(dtype, longest):
    routes = routes_by("skewed", 5, 3, NUM_EXPERTS)
    check(pooled(5, MIXED, dtype), token_uses([3, 1, BASE, 3, 0]), routes, longest, is_by_pair=True)


@VARIANTS
def test_groups_of_several_pieces_and_tiles(dtype, longest):
    """An expert has several tiles, in which adapters change."""
    uses = [LoraUse(0, 1, 2, 21, 0.5), LoraUse(0, 0, 23, 3, 2.0), LoraUse(0, 1, 27, 3, 1.0)]
    adapters, routes = pooled(2, (5, 33), dtype), routes_by("identical", 30, 1, NUM_EXPERTS)
    y, x = inputs(routes, dtype)
    expected = adapters.expected_of_experts(y, x, uses, routes, 1, FUSED, OFFSETS)
    result = added(y, x, adapters.batch(uses, 30, longest), routes)
    assert error(result, expected) < TOLERANCE[dtype]
    assert torch.equal(result[[0, 1, 26]], y[[0, 1, 26]])


@VARIANTS
def test_sizes_that_no_tile_divides(dtype, longest):
    adapters = pooled(3, (2, 7), dtype, ODD)
    uses, routes = token_uses([2, BASE, 0, 1, 1, 1]), routes_by("skewed", 6, 2, NUM_EXPERTS)
    y, x = inputs(routes, dtype, 37, ODD_WIDTH)
    expected = adapters.expected_of_experts(y, x, uses, routes, 1, FUSED, ODD_OFFSETS)
    result = added(y, x, adapters.batch(uses, 6, longest), routes, offsets=ODD_OFFSETS)
    assert error(result, expected) < TOLERANCE[dtype]


@VARIANTS
def test_a_second_adapter_is_added_to_what_the_first_one_left(dtype, longest):
    uses = token_uses([0, 1, BASE, 3]) + token_uses([2, BASE, 0, 1], wave=1)
    check(pooled(4, MIXED, dtype), uses, routes_by("skewed", 4, 2, NUM_EXPERTS), longest)


@VARIANTS
def test_experts_that_are_not_adapted_are_left_alone(dtype, longest):
    adapters = pooled(1, (4,), dtype)
    cell = adapters.table.cells.by_place[1, FUSED[1], 3]
    ranks = adapters.table.ranks.copy()
    adapters.table.ranks[:] = 0
    adapters.table.ranks[0, cell] = ranks[0, cell]
    routes = sort_routes(torch.tensor([[3, 0], [1, 2]]).int(), torch.ones(2, 2), NUM_EXPERTS)
    y, x = inputs(routes, dtype)
    result = added(y, x, adapters.batch([LoraUse(0, 0, 0, 2, 1.0)], 2, longest), routes)
    assert torch.equal(result[1:], y[1:])
    assert torch.equal(result[0, :32], y[0, :32])
    assert not torch.equal(result[0, 32:], y[0, 32:])


@VARIANTS
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_an_adapter_that_is_not_finite_keeps_to_its_rows(dtype, longest):
    adapters = pooled(3, (4,), dtype)
    routes = routes_by("identical", 6, 1, NUM_EXPERTS)
    uses = token_uses([0, 1, 0, 2, BASE, 1])
    y, x = inputs(routes, dtype)
    expected = added(y, x, adapters.batch(uses, 6, longest), routes)
    cells = adapters.table.cells
    first = cells.by_place[1, FUSED[0], NUM_EXPERTS - 1]
    start = int(adapters.table.offsets[1, first])
    adapters.pool[start : start + 4] = torch.inf
    result = added(y, x, adapters.batch(uses, 6, longest), routes)
    assert torch.equal(result[[0, 2, 3, 4]], expected[[0, 2, 3, 4]])
    assert not result[[1, 5]].isfinite().all(1).any()


def test_choices_one_after_another(monkeypatch):
    monkeypatch.setattr(lora, "_PARTIAL_BYTES", 1)
    monkeypatch.setattr(lora, "_WIDTH_BYTES", 64)
    routes = routes_by("skewed", 3, 3, NUM_EXPERTS)
    check(pooled(3, (5, 20), torch.float32), token_uses([1, BASE, 0]), routes, 4)


def test_splits_and_tiles_for_matrices(monkeypatch):
    for name in ("MATRIX_INPUTS", "MATRIX_OUTPUTS"):
        monkeypatch.setattr(lora, name, 16)
    adapters = pooled(2, (5, 40), torch.float16, num_experts=2)
    check(adapters, token_uses([1, 0] * 4), routes_by("even", 9, 2, 2), 16)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_a_token_s_bits_do_not_depend_on_its_company(dtype):
    adapters = pooled(4, (3, 20), dtype)
    uses = [LoraUse(0, 1, 0, 6, 1.0), LoraUse(0, 2, 6, 1, 0.5), LoraUse(1, 3, 4, 2, 1.0)]
    experts = chosen_experts("skewed", 7, 2, NUM_EXPERTS)
    routes = sort_routes(experts, torch.ones(7, 2), NUM_EXPERTS)
    y, x = inputs(routes, dtype)
    together = added(y, x, adapters.batch(uses, 7, 16), routes, batch_invariant=True)
    for token in (0, 4, 6):
        own = [
            LoraUse(use.wave, use.entry, 0, 1, use.scale)
            for use in uses
            if use.first_token <= token < use.first_token + use.num_tokens
        ]
        mine = sort_routes(experts[token, None], torch.ones(1, 2), NUM_EXPERTS)
        pairs = slice(2 * token, 2 * token + 2)
        batch = adapters.batch(own, 1, 4)
        alone = added(y[pairs], x[token, None], batch, mine, batch_invariant=True)
        assert torch.equal(alone, together[pairs])


def test_a_recorded_step_computes_other_batches_and_routes_of_its_size():
    adapters, kernel = pooled(5, MIXED, torch.float32), CudaLora(HOST, batch_invariant=False)
    graphs, calls = StepGraphs(HostAccelerator()), []

    def step(batch, routes, y, x):
        def compute():
            calls.append(batch)
            result = y.clone()
            kernel.add_experts(result, x, batch, routes, LoraPlace(1, FUSED, OFFSETS))
            return result

        parts = (routes.experts, routes.pairs, routes.starts)
        return graphs.repeat("4 tokens", (y, x, *parts, *batch.segments.tensors), compute)

    graphs.is_recording = True
    routes = routes_by("identical", 4, 2, NUM_EXPERTS)
    step(adapters.batch(token_uses([1]), 4), routes, *inputs(routes, torch.float32))
    graphs.is_recording = False
    recorded = calls[0]
    for chosen, popularity in (
        ([4, 3, 2, 1], "skewed"),
        ([2], "even"),
        ([2, BASE, 4], "identical"),
    ):
        uses, routes = token_uses(chosen), routes_by(popularity, 4, 2, NUM_EXPERTS)
        y, x = inputs(routes, torch.float32)
        result = step(adapters.batch(uses, 4), routes, y, x)
        expected = adapters.expected_of_experts(y, x, uses, routes, 1, FUSED, OFFSETS)
        assert error(result, expected) < TOLERANCE[torch.float32]
    assert all(batch is recorded for batch in calls), "the recorded work alone was done"
