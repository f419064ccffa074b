"""Choice of experts: which experts compute a token, and with which weights.

Owns the layout that the ops of experts read (`Routes`) and the torch references of `route` and
of what experts compute in addition to their linear layers."""

import dataclasses

import torch
from torch.nn import functional

from loraplex.kernels.lora import LoraBatch, LoraGroup, LoraPlace, Reduce, lora_delta
from loraplex.kernels.routing_rules import RoutingMode, RoutingRules


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Routes:
    """Chosen experts of a step of T tokens, k for each. Pair p = t * k + j is token t's j-th."""

    experts: torch.Tensor  # [T, k] int32, the best first
    weights: torch.Tensor  # [T, k] float32
    pairs: torch.Tensor  # [T * k] int32: the pairs sorted by expert, those of one expert ascending
    starts: torch.Tensor  # [E + 1] int32: expert e has pairs[starts[e] : starts[e + 1]]

    @property
    def num_chosen(self) -> int:
        return self.experts.shape[1]

    @property
    def num_experts(self) -> int:
        return self.starts.shape[0] - 1


def route(
    logits: torch.Tensor,
    rules: RoutingRules,
    selection_bias: torch.Tensor | None = None,
    expert_factors: torch.Tensor | None = None,
) -> Routes:
    """Choose experts by logits [T, E]. selection_bias [E] float32, of SIGMOID or SOFTMAX.

    expert_factors [E] float32: of the weights.
    """
    # float64: on a CPU the bits of a float32 exp differ with its place in a chunk.
    wide = logits.double()
    if rules.mode is RoutingMode.SPARSE_MIXER:
        experts, weights = _mix_sparsely(wide, rules)
    else:
        scores = _scores(wide, rules.mode)
        ranked = scores if selection_bias is None else scores + selection_bias.double()
        experts = _largest(_within_groups(ranked, rules), rules.num_chosen)
        weights = scores.gather(1, experts)
    if rules.mode is RoutingMode.CHOSEN_SOFTMAX:
        weights = weights.softmax(1)
    if rules.normalizes:
        weights = weights / (weights.sum(1, keepdim=True) + rules.sum_floor)
    weights = weights * rules.factor
    if expert_factors is not None:
        weights = weights * expert_factors.double()[experts]
    return sort_routes(experts.int(), weights.float(), rules.num_experts)


def sort_routes(experts: torch.Tensor, weights: torch.Tensor, num_experts: int) -> Routes:
    """Return the routes of chosen experts [T, k] int32 with weights [T, k] float32."""
    flat = experts.flatten().long()
    pairs = torch.argsort(flat, stable=True).int()
    counts = torch.bincount(flat, minlength=num_experts)
    starts = functional.pad(counts.cumsum(0), (1, 0)).int()
    return Routes(experts, weights, pairs, starts)


def _scores(logits: torch.Tensor, mode: RoutingMode) -> torch.Tensor:
    if mode is RoutingMode.SOFTMAX:
        return logits.softmax(1)
    return logits.sigmoid() if mode is RoutingMode.SIGMOID else logits


def _largest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return the indices [T, count] of the largest scores, NaN before all, of equals the lowest."""
    return torch.argsort(scores, dim=1, descending=True, stable=True)[:, :count]


def _within_groups(scores: torch.Tensor, rules: RoutingRules) -> torch.Tensor:
    """Return the scores, those of groups that are not chosen replaced by -inf."""
    if rules.num_groups == 1:
        return scores
    group_size = rules.num_experts // rules.num_groups
    groups = scores.view(-1, rules.num_groups, group_size)
    num_best = 2 if rules.mode is RoutingMode.SIGMOID else 1
    best = groups.sort(2, descending=True).values[:, :, :num_best].sum(2)
    chosen = _largest(best, rules.num_chosen_groups)
    is_out = torch.ones_like(best, dtype=torch.bool).scatter(1, chosen, False)
    return groups.masked_fill(is_out.unsqueeze(2), -torch.inf).flatten(1)


def _mix_sparsely(logits: torch.Tensor, rules: RoutingRules) -> tuple[torch.Tensor, torch.Tensor]:
    """Return experts and weights [T, k], one round after another."""
    left, experts, weights = logits, [], []
    for _ in range(rules.num_chosen):
        expert = _largest(left, 1)
        largest = left.gather(1, expert)
        distance = (largest - logits) / torch.maximum(logits.abs(), largest)
        within = left.masked_fill(distance > 2 * rules.jitter, -torch.inf)
        experts.append(expert)
        weights.append(within.softmax(1).gather(1, expert))
        left = left.scatter(1, expert, -torch.inf)
    return torch.cat(experts, 1), torch.cat(weights, 1)


def add_expert_lora(
    y: torch.Tensor,
    x: torch.Tensor,
    batch: LoraBatch,
    routes: Routes,
    place: LoraPlace,
    reduce: Reduce | None = None,
) -> None:
    """Add what the adapters of the batch give for the experts of each pair; see Kernels.

    As kernels.lora.add_lora, with the cells of one expert after another. Adapters have no other
    changes of experts.
    """
    table, num_pairs = batch.table, len(y)
    for group in batch.groups():
        chosen = routes.experts[group.token_indices]
        for expert in sorted(set(chosen.flatten().tolist())):
            cells = [table.cells.by_place[place.layer, module, expert] for module in place.modules]
            adapted = [
                (cell, first)
                for cell, first in zip(cells, place.out_offsets, strict=True)
                if table.ranks[group.entry, cell] > 0
            ]
            if not adapted:
                continue
            members, choices = (chosen == expert).nonzero(as_tuple=True)
            pairs = group.token_indices[members] * routes.num_chosen + choices
            of_expert = LoraGroup(group.entry, pairs, group.token_scales[members])
            inputs = x[pairs * len(x) // num_pairs].float()
            for cell, first in adapted:
                delta = lora_delta(inputs, batch, of_expert, cell, reduce)
                columns = y[:, first : first + delta.shape[1]]
                columns[pairs] = (columns[pairs].float() + delta).to(y.dtype)


def combine_experts(
    y: torch.Tensor,
    routes: Routes,
    shared: torch.Tensor | None = None,
    shared_gate: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the weighted sum of each token's experts; see Kernels."""
    num_tokens, num_chosen = routes.weights.shape
    rows = y.view(num_tokens, num_chosen, y.shape[1]).float()
    total = routes.weights[:, 0, None] * rows[:, 0]
    for choice in range(1, num_chosen):
        total = total + routes.weights[:, choice, None] * rows[:, choice]
    if shared is not None:
        # float64, as for activations.
        factor = 1.0 if shared_gate is None else torch.sigmoid(shared_gate.double()).float()
        total = total + factor * shared.float()
    return total.to(y.dtype)
