"""Torch reference of what experts compute in addition to their linear layers."""

from collections.abc import Sequence

import torch

from loraplex.kernels.lora import LoraBatch, LoraGroup, Reduce, lora_delta
from loraplex.kernels.routing import Routes


def add_expert_lora(
    y: torch.Tensor,
    x: torch.Tensor,
    batch: LoraBatch,
    routes: Routes,
    layer: int,
    modules: Sequence[str],
    out_offsets: Sequence[int],
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
            cells = [table.cells.cell_of(layer, module, expert) for module in modules]
            adapted = [
                (cell, first)
                for cell, first in zip(cells, out_offsets, strict=True)
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
