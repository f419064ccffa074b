"""Routers of the families with experts, and a check that a backend routes like the reference."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Final

import torch

from loraplex.kernels.routing import Routes, route
from loraplex.kernels.routing_rules import RoutingMode, RoutingRules

Route = Callable[[torch.Tensor, RoutingRules, torch.Tensor | None, torch.Tensor | None], Routes]
WEIGHT_TOLERANCE: Final = 1e-6
_NUM_TOKENS: Final = (1, 5, 64, 257)


@dataclasses.dataclass(frozen=True, slots=True)
class RouterCase:
    rules: RoutingRules
    has_selection_bias: bool = False
    has_expert_factors: bool = False

    def logits(self, num_tokens: int, seed: int = 0) -> torch.Tensor:
        """Return random logits [T, E]; near zero, as fresh routers have them, and far from it."""
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(num_tokens, self.rules.num_experts, generator=generator)
        scales = torch.tensor([0.05, 1.0, 6.0])
        return logits * scales[torch.arange(num_tokens) % len(scales)].unsqueeze(1)

    def tied_logits(self, num_tokens: int, seed: int = 0) -> torch.Tensor:
        """Return logits of few values: most tokens have equal ones at the border of the choice."""
        generator = torch.Generator().manual_seed(seed)
        shape = (num_tokens, self.rules.num_experts)
        return torch.randint(-2, 3, shape, generator=generator).float() * 0.5

    def selection_bias(self) -> torch.Tensor | None:
        if not self.has_selection_bias:
            return None
        generator = torch.Generator().manual_seed(7)
        return 0.3 * torch.randn(self.rules.num_experts, generator=generator)

    def expert_factors(self) -> torch.Tensor | None:
        if not self.has_expert_factors:
            return None
        generator = torch.Generator().manual_seed(8)
        return torch.randn(self.rules.num_experts, generator=generator)


def _case(
    num_experts: int,
    num_chosen: int,
    mode: RoutingMode,
    *,
    normalizes: bool = False,
    factor: float = 1.0,
    groups: tuple[int, int] = (1, 1),
    jitter: float = 0.0,
    has_selection_bias: bool = False,
    has_expert_factors: bool = False,
) -> RouterCase:
    """groups: their number, and of how many a token chooses."""
    rules = RoutingRules(
        num_experts=num_experts,
        num_chosen=num_chosen,
        mode=mode,
        normalizes=normalizes,
        factor=factor,
        num_groups=groups[0],
        num_chosen_groups=groups[1],
        jitter=jitter,
    )
    has_bias = has_selection_bias or mode is RoutingMode.SIGMOID
    return RouterCase(rules, has_bias, has_expert_factors)


ROUTERS: Final[Mapping[str, RouterCase]] = {
    "mixtral": _case(8, 2, RoutingMode.SOFTMAX, normalizes=True),
    "mixtral-one": _case(8, 1, RoutingMode.SOFTMAX, normalizes=True),
    "qwen2-moe": _case(60, 4, RoutingMode.SOFTMAX),
    "qwen3-moe": _case(128, 8, RoutingMode.SOFTMAX, normalizes=True),
    "olmoe": _case(64, 8, RoutingMode.SOFTMAX),
    "deepseek-v2-lite": _case(64, 6, RoutingMode.SOFTMAX),
    "deepseek-v2": _case(160, 6, RoutingMode.SOFTMAX, factor=16.0, groups=(8, 3)),
    "ernie-moe": _case(64, 6, RoutingMode.SOFTMAX, normalizes=True, has_selection_bias=True),
    "deepseek-v3": _case(256, 8, RoutingMode.SIGMOID, normalizes=True, factor=2.5, groups=(8, 4)),
    "deepseek-v3-no-norm": _case(32, 4, RoutingMode.SIGMOID, factor=1.5, groups=(4, 2)),
    "gemma4": _case(128, 8, RoutingMode.SOFTMAX, normalizes=True, has_expert_factors=True),
    "glm4-moe": _case(128, 8, RoutingMode.SIGMOID, normalizes=True),
    "phimoe": _case(16, 2, RoutingMode.SPARSE_MIXER, jitter=0.01),
    "phimoe-wide": _case(16, 2, RoutingMode.SPARSE_MIXER, jitter=0.3),
    "gpt-oss": _case(32, 4, RoutingMode.CHOSEN_SOFTMAX),
    "granite-moe": _case(40, 8, RoutingMode.CHOSEN_SOFTMAX),
    "all-chosen": _case(4, 4, RoutingMode.CHOSEN_SOFTMAX),
}


def assert_routes_like_reference(
    of_backend: Route, case: RouterCase, device: torch.device, dtype: torch.dtype = torch.float32
) -> None:
    """Compare random logits, ties and NaN; dtype: of the logits."""
    own = case.selection_bias(), case.expert_factors()
    on_device = [None if each is None else each.to(device) for each in own]
    for num_tokens in _NUM_TOKENS:
        for make in (case.logits, case.tied_logits):
            logits = make(num_tokens).to(dtype)
            found = of_backend(logits.to(device), case.rules, *on_device)
            assert_same_routes(found, route(logits, case.rules, *own))
    logits = case.logits(9).to(dtype)
    whole = route(logits, case.rules, *own)
    logits[4, 1] = torch.nan
    found = on_host(of_backend(logits.to(device), case.rules, *on_device))
    assert_whole(found, case.rules)
    assert found.weights[4].isnan().any()
    for token in (0, 3, 5, 8):
        assert torch.equal(found.experts[token], whole.experts[token])
        torch.testing.assert_close(
            found.weights[token], whole.weights[token], rtol=WEIGHT_TOLERANCE, atol=1e-30
        )


def assert_same_routes(found: Routes, expected: Routes) -> None:
    found = on_host(found)
    for name in ("experts", "pairs", "starts"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    torch.testing.assert_close(found.weights, expected.weights, rtol=WEIGHT_TOLERANCE, atol=1e-30)


def assert_whole(routes: Routes, rules: RoutingRules) -> None:
    """Check what the other ops rely on: each pair once, at an expert that exists."""
    num_pairs = routes.experts.numel()
    assert routes.experts.shape == routes.weights.shape
    assert routes.num_experts == rules.num_experts
    assert routes.experts.min() >= 0
    assert routes.experts.max() < rules.num_experts
    assert sorted(routes.pairs.tolist()) == list(range(num_pairs))
    flat = routes.experts.flatten()
    starts = routes.starts.tolist()
    assert (starts[0], starts[-1]) == (0, num_pairs)
    for expert in range(rules.num_experts):
        own = routes.pairs[starts[expert] : starts[expert + 1]]
        assert own.tolist() == (flat == expert).nonzero().flatten().tolist()


def on_host(routes: Routes) -> Routes:
    return Routes(
        routes.experts.cpu(), routes.weights.cpu(), routes.pairs.cpu(), routes.starts.cpu()
    )
