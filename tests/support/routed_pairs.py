"""Routes of experts by popularity, for tests of what is computed with them."""

import torch

from loraplex.kernels.routing import Routes, sort_routes

POPULARITIES = ("identical", "even", "skewed")


def chosen_experts(
    popularity: str, num_tokens: int, num_chosen: int, num_experts: int
) -> torch.Tensor:
    """Return experts [T, k] int32, those of one token distinct.

    "identical": all tokens have the last experts; "even": all experts take turns; "skewed": three
    of four tokens have the last experts, the others random ones.
    """
    last = torch.arange(num_experts - 1, num_experts - 1 - num_chosen, -1)
    match popularity:
        case "identical":
            chosen = last.repeat(num_tokens, 1)
        case "even":
            chosen = torch.arange(num_tokens * num_chosen).view(num_tokens, num_chosen)
            chosen = chosen % num_experts
        case "skewed":
            draws = torch.rand(
                num_tokens, num_experts, generator=torch.Generator().manual_seed(num_tokens)
            )
            chosen = draws.argsort(1)[:, :num_chosen]
            chosen = torch.where(torch.arange(num_tokens)[:, None] % 4 > 0, last, chosen)
        case _:
            raise ValueError(popularity)
    return chosen.int().contiguous()


def routes_by(
    popularity: str,
    num_tokens: int,
    num_chosen: int,
    num_experts: int,
    device: torch.device | None = None,
) -> Routes:
    """Return routes of these experts, with random weights."""
    experts = chosen_experts(popularity, num_tokens, num_chosen, num_experts).to(device)
    weights = torch.rand(experts.shape, device=device)
    return sort_routes(experts, weights, num_experts)
