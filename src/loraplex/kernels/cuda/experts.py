"""Routes and sums of experts on a GPU. Nothing waits for the host: grids follow from shapes.

A route is two launches: one program per token chooses, one program per expert collects its pairs.
"""

import torch
import triton

from loraplex.kernels.cuda.programs import experts as programs
from loraplex.kernels.routing import Routes
from loraplex.kernels.routing_rules import RoutingRules

_PAIRS_AT_ONCE = 2048
_COLUMNS_AT_ONCE = 1024


def route(
    logits: torch.Tensor,
    rules: RoutingRules,
    selection_bias: torch.Tensor | None = None,
    expert_factors: torch.Tensor | None = None,
) -> Routes:
    """Same as kernels.routing.route, in float32. The tensors [E]: float32, contiguous."""
    assert logits.stride(1) == 1, "rows are contiguous"
    num_tokens, num_experts = logits.shape
    shape, device = (num_tokens, rules.num_chosen), logits.device
    experts = torch.empty(shape, dtype=torch.int32, device=device)
    weights = torch.empty(shape, dtype=torch.float32, device=device)
    programs.choose_experts[(num_tokens,)](
        *(experts, weights, logits, selection_bias, expert_factors, logits.stride(0)),
        *(rules.factor, rules.jitter, rules.sum_floor),
        MODE=rules.mode.value,
        NORMALIZES=rules.normalizes,
        NUM_EXPERTS=num_experts,
        NUM_CHOSEN=rules.num_chosen,
        NUM_GROUPS=rules.num_groups,
        NUM_CHOSEN_GROUPS=rules.num_chosen_groups,
        BLOCK_E=triton.next_power_of_2(num_experts),
        BLOCK_K=triton.next_power_of_2(rules.num_chosen),
        BLOCK_G=triton.next_power_of_2(rules.num_groups),
        # A row is short: within one warp no maximum waits for another.
        num_warps=1,
    )
    return _sorted_routes(experts, weights, num_experts)


def _sorted_routes(experts: torch.Tensor, weights: torch.Tensor, num_experts: int) -> Routes:
    num_pairs = experts.numel()
    pairs = torch.empty(num_pairs, dtype=torch.int32, device=experts.device)
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=experts.device)
    programs.sort_pairs[(num_experts + 1,)](
        *(pairs, starts, experts, num_pairs),
        BLOCK=min(triton.next_power_of_2(num_pairs), _PAIRS_AT_ONCE),
    )
    return Routes(experts, weights, pairs, starts)


def combine_experts(
    y: torch.Tensor,
    routes: Routes,
    shared: torch.Tensor | None = None,
    shared_gate: torch.Tensor | None = None,
) -> torch.Tensor:
    """y [T * k, N], contiguous, and shared [T, N] -> [T, N] of y's type."""
    assert y.is_contiguous(), "an op's result"
    num_tokens, num_chosen = routes.weights.shape
    size = y.shape[1]
    output = torch.empty(num_tokens, size, dtype=y.dtype, device=y.device)
    block = min(triton.next_power_of_2(size), _COLUMNS_AT_ONCE)
    programs.combine_experts[num_tokens, triton.cdiv(size, block)](
        *(output, y, routes.weights, shared, shared_gate),
        0 if shared is None else shared.stride(0),
        0 if shared_gate is None else shared_gate.stride(0),
        NUM_CHOSEN=num_chosen,
        SIZE=size,
        BLOCK=block,
    )
    return output
