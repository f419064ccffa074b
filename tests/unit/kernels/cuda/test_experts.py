"""Routes of a GPU and sums of experts, interpreted: against the reference, and row by row."""

import dataclasses

import pytest
import torch

from loraplex.kernels.activations import Activation
from loraplex.kernels.cuda import elementwise, experts
from loraplex.kernels.reference import ReferenceKernels
from loraplex.kernels.routing import Routes, combine_experts, route, sort_routes
from loraplex.kernels.routing_rules import RoutingMode, RoutingRules

SOFTMAX, CHOSEN, SIGMOID, SPARSE = RoutingMode
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)

# Those of the families, and sizes that no power of two is.
RULES = {
    "mixtral": RoutingRules(num_experts=8, num_chosen=2, mode=SOFTMAX, normalizes=True),
    "qwen3": RoutingRules(num_experts=32, num_chosen=8, mode=SOFTMAX, normalizes=True),
    "olmoe": RoutingRules(num_experts=30, num_chosen=4, mode=SOFTMAX),
    "granite": RoutingRules(num_experts=24, num_chosen=8, mode=CHOSEN),
    "deepseek-2": RoutingRules(
        num_experts=20,
        num_chosen=3,
        mode=SOFTMAX,
        factor=16.0,
        num_groups=4,
        num_chosen_groups=2,
    ),
    "deepseek-3": RoutingRules(
        num_experts=32,
        num_chosen=6,
        mode=SIGMOID,
        normalizes=True,
        factor=2.5,
        num_groups=8,
        num_chosen_groups=4,
    ),
    "groups of one": RoutingRules(
        num_experts=6, num_chosen=2, mode=SIGMOID, num_groups=6, num_chosen_groups=3
    ),
    "phimoe": RoutingRules(num_experts=16, num_chosen=2, mode=SPARSE, jitter=0.01),
    "one expert": RoutingRules(num_experts=1, num_chosen=1, mode=SOFTMAX, normalizes=True),
    "all experts": RoutingRules(num_experts=3, num_chosen=3, mode=CHOSEN),
}
MANY = RoutingRules(num_experts=512, num_chosen=10, mode=SOFTMAX, normalizes=True)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.default_generator.manual_seed(0)


def assert_same_routes(found: Routes, expected: Routes) -> None:
    assert found.experts.dtype == found.pairs.dtype == found.starts.dtype == torch.int32
    assert torch.equal(found.experts, expected.experts)
    torch.testing.assert_close(found.weights, expected.weights, rtol=2e-6, atol=1e-7)
    assert torch.equal(found.pairs, expected.pairs)
    assert torch.equal(found.starts, expected.starts)


@pytest.mark.some(8)
@pytest.mark.parametrize(("num_tokens", "dtype"), [(1, torch.float16), (7, torch.float32)], ids=str)
@pytest.mark.parametrize("name", RULES)
def test_routes_are_those_of_the_reference(name, num_tokens, dtype):
    rules = RULES[name]
    logits = (2 * torch.randn(num_tokens, rules.num_experts)).to(dtype)
    assert_same_routes(experts.route(logits, rules), route(logits, rules))


@pytest.mark.slow
def test_512_experts():
    logits = torch.randn(33, 512)
    assert_same_routes(experts.route(logits, MANY), route(logits, MANY))


@pytest.mark.parametrize("name", ["mixtral", "deepseek-3", "groups of one"])
def test_a_bias_selects_and_does_not_weigh(name):
    rules = RULES[name]
    logits, bias = torch.randn(9, rules.num_experts), torch.randn(rules.num_experts)
    found = experts.route(logits, rules, bias)
    assert_same_routes(found, route(logits, rules, bias))
    assert not torch.equal(found.experts, experts.route(logits, rules).experts)


@pytest.mark.parametrize("name", ["qwen3", "olmoe", "deepseek-3"])
def test_factors_of_experts_weigh_and_do_not_select(name):
    rules = RULES[name]
    logits, factors = torch.randn(9, rules.num_experts), torch.randn(rules.num_experts)
    logits[4, 1] = torch.nan
    found = experts.route(logits, rules, expert_factors=factors)
    expected = route(logits, rules, expert_factors=factors)
    assert found.weights[4].isnan().all()
    known = torch.arange(9) != 4
    assert torch.equal(found.experts[known], expected.experts[known])
    torch.testing.assert_close(found.weights[known], expected.weights[known], rtol=2e-6, atol=1e-7)


@pytest.mark.some(4)
@pytest.mark.parametrize("name", RULES)
def test_of_equal_scores_the_lowest_expert_is_chosen(name):
    rules = RULES[name]
    logits = torch.randint(-1, 2, (5, rules.num_experts)).float()
    assert_same_routes(experts.route(logits, rules), route(logits, rules))


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_logits_far_apart():
    """Powers that vanish in float32, and an expert that is never chosen."""
    logits = torch.tensor([[400.0, -500.0, 200.0, 1.0, -torch.inf, 0.0, 0.5, -9.0]] * 2)
    logits[1] *= -1
    logits[1, 4] = -torch.inf
    for mode in (SOFTMAX, CHOSEN):
        rules = dataclasses.replace(RULES["mixtral"], num_chosen=3, mode=mode)
        assert_same_routes(experts.route(logits, rules), route(logits, rules))
    rules = dataclasses.replace(RULES["mixtral"], mode=SIGMOID)
    assert experts.route(-logits.abs(), rules).weights.isfinite().all()


@pytest.mark.some(4)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")
@pytest.mark.parametrize("name", RULES)
def test_a_token_with_a_nan_keeps_to_itself(name):
    rules = RULES[name]
    logits = torch.randn(4, rules.num_experts)
    expected = route(logits[[0, 2, 3]], rules)
    logits[1, rules.num_experts // 2] = torch.nan
    found = experts.route(logits, rules)
    assert found.weights[1].isnan().all()
    chosen = found.experts[1].tolist()
    assert len(set(chosen)) == rules.num_chosen
    assert 0 <= min(chosen) <= max(chosen) < rules.num_experts
    assert torch.equal(found.experts[[0, 2, 3]], expected.experts)
    torch.testing.assert_close(found.weights[[0, 2, 3]], expected.weights)
    assert sorted(found.pairs.tolist()) == list(range(4 * rules.num_chosen))


def test_rows_of_logits_may_be_apart():
    rules = RULES["olmoe"]
    logits = torch.randn(5, 100)[:, 7:37]
    assert_same_routes(experts.route(logits, rules), route(logits, rules))


@pytest.mark.parametrize("popularity", ["one", "skewed", "even"])
def test_pairs_are_sorted_in_several_blocks(popularity, monkeypatch):
    monkeypatch.setattr(experts, "_PAIRS_AT_ONCE", 16)
    chosen = {
        "one": torch.full((35,), 4),
        "skewed": torch.randn(35).abs().mul(2).int().clamp(max=6),
        "even": torch.arange(35) % 7,
    }[popularity]
    chosen = chosen.int().view(-1, 1)
    weights = torch.rand(35, 1)
    expected = sort_routes(chosen, weights, 7)
    assert_same_routes(experts._sorted_routes(chosen, weights, 7), expected)


def routes_of(num_tokens: int, num_chosen: int, num_experts: int) -> Routes:
    rules = RoutingRules(num_experts=num_experts, num_chosen=num_chosen, mode=SOFTMAX)
    return route(torch.randn(num_tokens, num_experts), rules)


@pytest.mark.covering(2)
@pytest.mark.some(6)
@DTYPES
@pytest.mark.parametrize("shared", ["none", "shared", "gated"])
@pytest.mark.parametrize(
    ("num_tokens", "num_chosen", "size"), [(1, 1, 5), (3, 4, 2050), (9, 2, 64)]
)
def test_weighted_sums(num_tokens, num_chosen, size, shared, dtype):
    routes = routes_of(num_tokens, num_chosen, 6)
    y = torch.randn(num_tokens * num_chosen, size).to(dtype)
    added = (
        None if shared == "none" else torch.randn(num_tokens, size + 3).to(dtype)[:, 3:],
        torch.randn(num_tokens, 2).to(dtype)[:, 1:] if shared == "gated" else None,
    )
    found = experts.combine_experts(y, routes, *added)
    expected = combine_experts(y, routes, *added)
    assert found.dtype == dtype
    tolerance = 1e-6 if dtype == torch.float32 else 1e-3
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    for token in range(num_tokens):
        own = Routes(routes.experts[token, None], routes.weights[token, None], *routes_of_none())
        rows = y[token * num_chosen : (token + 1) * num_chosen]
        mine = (None if part is None else part[token, None] for part in added)
        assert torch.equal(experts.combine_experts(rows, own, *mine)[0], found[token])


def routes_of_none() -> tuple[torch.Tensor, torch.Tensor]:
    """Order of the pairs, which a sum does not read."""
    return torch.empty(0, dtype=torch.int32), torch.zeros(7, dtype=torch.int32)


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
@DTYPES
def test_the_clamped_gate(dtype):
    gate_up = (6 * torch.randn(5, 2 * 37)).to(dtype)
    gate_up[0, :3], gate_up[1, -3:] = torch.tensor([300.0, -300.0, 0.0]), 100.0
    gate_up[2, 5] = gate_up[3, 40] = torch.nan
    found = elementwise.gate(gate_up, Activation.CLAMPED_SWIGLU)
    reference = ReferenceKernels(torch.device("cpu")).gate(gate_up, Activation.CLAMPED_SWIGLU)
    tolerance = 2e-6 if dtype == torch.float32 else 1e-3
    torch.testing.assert_close(found, reference, rtol=tolerance, atol=1e-6, equal_nan=True)
    assert found.isnan().sum() == 2
