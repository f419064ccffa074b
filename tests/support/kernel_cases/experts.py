"""Launches of layers with experts."""

import functools

import torch

from loraplex.kernels.cuda import experts
from loraplex.kernels.routing import Routes, RoutingMode, RoutingRules
from support.kernel_cases import Cases
from support.kernel_cases.llamas import DTYPES, empty

HIDDEN, INNER = 2048, 768
RULES = RoutingRules(num_experts=128, num_chosen=8, mode=RoutingMode.SOFTMAX, normalizes=True)
"""Those of Qwen3-30B-A3B."""
_OTHER_RULES = (
    RoutingRules(num_experts=8, num_chosen=2, mode=RoutingMode.CHOSEN_SOFTMAX),
    RoutingRules(num_experts=16, num_chosen=2, mode=RoutingMode.SPARSE_MIXER, jitter=0.01),
    RoutingRules(
        num_experts=256,
        num_chosen=8,
        mode=RoutingMode.SIGMOID,
        normalizes=True,
        num_groups=8,
        num_chosen_groups=4,
    ),
)
_COUNTS = {"decode": 32, "prefill": 2048}
"""Token counts: each has its own tiles."""


def cases() -> Cases:
    made: Cases = {}
    for step, count in _COUNTS.items():
        for kind, dtype in DTYPES.items():
            name = f"{_shape(kind)} {kind} experts {step}"
            made[name] = functools.partial(_layer, dtype, count)
    made["other rules of experts"] = _other_rules
    return made


def _shape(kind: str) -> str:
    """The steps that every run of the tests compiles have the name of the others, "8b"."""
    return "8b" if kind == "bf16" else "a3b"


def _layer(dtype: torch.dtype, num_tokens: int) -> None:
    routes = experts.route(empty(num_tokens, RULES.num_experts, dtype=dtype), RULES)
    y = empty(num_tokens * RULES.num_chosen, HIDDEN, dtype=dtype)
    assert _combined(y, routes).shape == (num_tokens, HIDDEN)


def _combined(y: torch.Tensor, routes: Routes) -> torch.Tensor:
    num_tokens = len(routes.experts)
    shared, gate = empty(num_tokens, HIDDEN, dtype=y.dtype), empty(num_tokens, 1, dtype=y.dtype)
    experts.combine_experts(y, routes, shared, gate)
    return experts.combine_experts(y, routes)


def _other_rules() -> None:
    for rules in _OTHER_RULES:
        logits = empty(32, rules.num_experts, dtype=torch.bfloat16)
        bias = None
        if rules.mode is RoutingMode.SIGMOID:
            bias = empty(rules.num_experts, dtype=torch.float32)
        experts.route(logits, rules, bias)
