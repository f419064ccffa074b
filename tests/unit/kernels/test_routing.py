"""Choices of experts and their weights, against the routers of transformers."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Gemma4TextConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeTopKRouter
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.granitemoe.modeling_granitemoe import GraniteMoeTopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter
from transformers.models.phimoe.modeling_phimoe import PhimoeTopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from loraplex.kernels.routing import route
from loraplex.kernels.routing_rules import RoutingMode, RoutingRules
from support.kernel_cases.routers import (
    ROUTERS,
    WEIGHT_TOLERANCE,
    RouterCase,
    assert_routes_like_reference,
    assert_whole,
)

THEIRS: dict[str, Callable[[Any], torch.nn.Module]] = {
    "mixtral": MixtralTopKRouter,
    "mixtral-one": MixtralTopKRouter,
    "qwen2-moe": Qwen2MoeTopKRouter,
    "qwen3-moe": Qwen3MoeTopKRouter,
    "olmoe": OlmoeTopKRouter,
    "deepseek-v2-lite": DeepseekV2TopkRouter,
    "deepseek-v2": DeepseekV2TopkRouter,
    "ernie-moe": Ernie4_5_MoeTopKRouter,
    "deepseek-v3": DeepseekV3TopkRouter,
    "deepseek-v3-no-norm": DeepseekV3TopkRouter,
    "glm4-moe": Glm4MoeTopkRouter,
    "phimoe": PhimoeTopKRouter,
    "phimoe-wide": PhimoeTopKRouter,
    "gpt-oss": GptOssTopKRouter,
    "granite-moe": GraniteMoeTopKRouter,
}
CPU = torch.device("cpu")


@pytest.fixture(params=ROUTERS)
def case(request: pytest.FixtureRequest) -> RouterCase:
    return ROUTERS[request.param]


def chosen_by_transformers(name: str, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return experts and weights [T, k], of a router whose weight is the unit matrix."""
    case = ROUTERS[name]
    rules = case.rules
    config = SimpleNamespace(
        hidden_size=rules.num_experts,
        num_experts=rules.num_experts,
        num_local_experts=rules.num_experts,
        num_experts_per_tok=rules.num_chosen,
        norm_topk_prob=rules.normalizes,
        routed_scaling_factor=rules.factor,
        topk_method="greedy" if rules.num_groups == 1 else "group_limited_greedy",
        n_group=rules.num_groups,
        topk_group=rules.num_chosen_groups,
        router_jitter_noise=rules.jitter,
        input_jitter_noise=0.0,
        moe_norm_min=1e-12,
    )
    router = THEIRS[name](config).eval()
    with torch.no_grad():
        for parameter in router.parameters():
            parameter.zero_()
        router.get_parameter("weight").copy_(torch.eye(rules.num_experts))
        if case.has_selection_bias:
            tensors = {**dict(router.named_parameters()), **dict(router.named_buffers())}
            (name,) = (name for name in tensors if name.endswith("e_score_correction_bias"))
            tensors[name].copy_(case.selection_bias())
        _, weights, experts = router(logits)
    return experts, weights


@pytest.mark.parametrize("name", THEIRS)
def test_same_experts_and_weights_as_transformers(name: str) -> None:
    case = ROUTERS[name]
    logits = case.logits(400, seed=3)
    routes = route(logits, case.rules, case.selection_bias())
    experts, weights = chosen_by_transformers(name, logits)
    # Some of these routers leave the order of the chosen open; the order of a sum changes little.
    order, own_order = experts.argsort(1), routes.experts.argsort(1)
    assert torch.equal(routes.experts.gather(1, own_order), experts.gather(1, order).int())
    torch.testing.assert_close(
        routes.weights.gather(1, own_order),
        weights.gather(1, order),
        rtol=WEIGHT_TOLERANCE,
        atol=WEIGHT_TOLERANCE,
    )


def test_factors_of_experts_as_transformers_has_them() -> None:
    """Compare with the router of Gemma 4, which norms what it reads."""
    case = ROUTERS["gemma4"]
    rules, factors = case.rules, case.expert_factors()
    config = Gemma4TextConfig(
        hidden_size=32, num_experts=rules.num_experts, top_k_experts=rules.num_chosen
    )
    router = Gemma4TextRouter(config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        router.proj.weight.copy_(torch.randn(router.proj.weight.shape, generator=generator))
        router.scale.copy_(torch.randn(32, generator=generator))
        router.per_expert_scale.copy_(factors)
        x = torch.randn(50, 32, generator=generator)
        _, weights, experts = router(x)
        logits = router.proj(router.norm(x) * router.scale * 32**-0.5)
    routes = route(logits, rules, expert_factors=factors)
    assert torch.equal(routes.experts, experts.int())
    torch.testing.assert_close(
        routes.weights, weights, rtol=WEIGHT_TOLERANCE, atol=WEIGHT_TOLERANCE
    )


def test_the_check_of_backends(case: RouterCase) -> None:
    """Let the reference pass what a backend has to."""
    assert_routes_like_reference(route, case, CPU)
    assert_routes_like_reference(route, case, CPU, torch.bfloat16)


def test_pairs_are_sorted_by_expert(case: RouterCase) -> None:
    for num_tokens in (0, 1, 33):
        logits = case.logits(num_tokens)
        routes = route(logits, case.rules, case.selection_bias())
        assert routes.experts.shape == (num_tokens, case.rules.num_chosen)
        assert routes.num_chosen == case.rules.num_chosen
        if num_tokens:
            assert_whole(routes, case.rules)


def test_a_token_routes_alone_as_in_company(case: RouterCase) -> None:
    logits, own = case.logits(40), (case.selection_bias(), case.expert_factors())
    together = route(logits, case.rules, *own)
    for token in range(40):
        alone = route(logits[token : token + 1], case.rules, *own)
        assert torch.equal(alone.experts[0], together.experts[token])
        assert torch.equal(alone.weights[0], together.weights[token])


@pytest.mark.parametrize("mode", RoutingMode)
def test_of_equal_scores_the_lowest_expert_is_chosen_best_first(mode: RoutingMode) -> None:
    rules = RoutingRules(num_experts=6, num_chosen=2, mode=mode)
    logits = torch.tensor([[1.0, 3.0, 1.0, 3.0, 3.0, 1.0], [2.0, 1.0, 2.0, 4.0, 2.0, 0.0]])
    assert route(logits, rules).experts.tolist() == [[1, 3], [3, 0]]


def test_of_equal_groups_the_lowest_is_chosen() -> None:
    rules = RoutingRules(
        num_experts=8,
        num_chosen=2,
        mode=RoutingMode.SIGMOID,
        num_groups=4,
        num_chosen_groups=2,
    )
    logits = torch.tensor([[0.0, 1.0, 1.0, 0.0, 3.0, 3.0, 0.0, 1.0]])
    assert route(logits, rules).experts.tolist() == [[4, 5]]
    # The third and the fourth group are as good as the second, whose expert 2 is chosen.
    logits = torch.tensor([[5.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]])
    assert route(logits, rules).experts.tolist() == [[0, 2]]


def test_a_group_counts_by_its_best_expert_or_its_best_two() -> None:
    sizes = {"num_experts": 8, "num_chosen": 2, "num_groups": 2, "num_chosen_groups": 1}
    logits = torch.tensor([[4.0, -9.0, -9.0, -9.0, 3.0, 3.0, 3.0, 3.0]])
    by_one = RoutingRules(mode=RoutingMode.SOFTMAX, **sizes)
    by_two = RoutingRules(mode=RoutingMode.SIGMOID, **sizes)
    assert route(logits, by_one).experts[0, 0] == 0
    assert route(logits, by_two).experts.tolist() == [[4, 5]]


def test_a_selection_bias_changes_choices_but_no_weight() -> None:
    rules = RoutingRules(num_experts=4, num_chosen=2, mode=RoutingMode.SIGMOID)
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    routes = route(logits, rules, torch.tensor([0.0, -1.0, 0.0, 1.0]))
    assert routes.experts.tolist() == [[3, 0]]
    torch.testing.assert_close(routes.weights, logits[:, [3, 0]].sigmoid())


def test_weights_are_normalized_only_where_the_rules_say_so() -> None:
    """Test norm_topk_prob: without it the weights of a token do not sum to 1."""
    logits = 0.1 * ROUTERS["olmoe"].logits(50)
    sizes = {"num_experts": 64, "num_chosen": 8, "mode": RoutingMode.SOFTMAX}
    plain = route(logits, RoutingRules(**sizes)).weights
    normalized = route(logits, RoutingRules(normalizes=True, **sizes)).weights
    assert plain.sum(1).max() < 0.9
    torch.testing.assert_close(normalized.sum(1), torch.ones(50))
    torch.testing.assert_close(plain / plain.sum(1, keepdim=True), normalized)
