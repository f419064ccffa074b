"""What may be drawn, and the draw: pure functions from logits to token ids, vectorised over rows.

Probabilities are fixed-point integers: the weight of a token is floor(exp(logit - max) * 2**40),
so a token rarer than 2**-40 of the likeliest is never drawn. Integer sums are exact in any order:
the kept set and the drawn token are the same on every device, for any number of threads, alone or
in company, as long as the logits are.
"""

from collections.abc import Callable, Sequence

import torch

from loraplex.core.sampling_params import SamplingParams

_WEIGHT_ONE = 2**40  # 2**40 * 2**22 tokens still fits into an int64
_NUCLEUS_GUESS = 512  # candidates that usually hold the nucleus: saves sorting the vocabulary
_NUCLEUS_GROWTH = 16


def penalize(
    logits: torch.Tensor,
    prompt_seen: torch.Tensor,
    output_counts: torch.Tensor,
    params: Sequence[SamplingParams],
) -> torch.Tensor:
    """Repetition penalty over prompt and output, presence and frequency penalty over output.

    logits [n, vocab]; prompt_seen [n, vocab] bool; output_counts [n, vocab] int32. Repetition as
    in CTRL (arXiv:1909.05858) and transformers, then the other two as OpenAI documents them.
    """
    repetition = _column(logits, [p.repetition_penalty for p in params])
    frequency = _column(logits, [p.frequency_penalty for p in params])
    presence = _column(logits, [p.presence_penalty for p in params])
    produced = output_counts > 0
    repeated = torch.where(logits < 0, logits * repetition, logits / repetition)
    penalized = torch.where(prompt_seen | produced, repeated, logits)
    return penalized - frequency * output_counts - presence * produced


def kept_weights(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Top-k, temperature, top-p, min-p: the weights of what may be drawn, 0 for the rest.

    logits [n, vocab] (not kept), params one per row, none greedy; int64 [n, vocab]. The kept set
    is that of transformers' processors in this order (temperature does not change a top-k).
    """
    vocab_size = logits.shape[1]
    top_k = torch.tensor([max(p.top_k, 1) for p in params], device=logits.device).unsqueeze(1)
    which = [i for i, p in enumerate(params) if 0 < p.top_k < vocab_size]
    logits = _on_rows(keep_top_k, logits, top_k, which)
    weights = token_weights(logits, _column(logits, [p.temperature for p in params]))
    top_p = _column(logits, [p.top_p for p in params], torch.float64)
    which = [i for i, p in enumerate(params) if p.top_p < 1.0]
    weights = _on_rows(keep_top_p, weights, top_p, which)
    min_p = _column(logits, [p.min_p for p in params], torch.float64)
    which = [i for i, p in enumerate(params) if p.min_p > 0.0]
    return _on_rows(keep_min_p, weights, min_p, which)


def keep_top_k(logits: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Set all but the k largest of each row to -inf; ties with the kth stay (as transformers).

    logits [n, vocab], k [n, 1] int64, 1 <= k <= vocab.
    """
    largest = torch.topk(logits, int(k.max()), dim=-1).values
    threshold = largest.gather(1, k - 1)
    return logits.masked_fill(logits < threshold, -torch.inf)


def token_weights(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """softmax(logits / temperature), not normalised, in fixed point: int64 [n, vocab].

    logits [n, vocab] with a finite maximum in each row, temperature [n, 1] > 0.
    """
    below_max = logits - logits.amax(-1, keepdim=True)
    return (torch.exp(below_max / temperature) * _WEIGHT_ONE).to(torch.int64)


def keep_top_p(
    weights: torch.Tensor, top_p: torch.Tensor, num_candidates: int = _NUCLEUS_GUESS
) -> torch.Tensor:
    """Keep the smallest set of most likely tokens that holds at least top_p of the weight.

    weights [n, vocab] int64, top_p [n, 1] float64. Of equally likely tokens the lower ids stay.
    num_candidates: how many tokens to sort first; rows with a wider nucleus try more of them.
    """
    num_candidates = min(num_candidates, weights.shape[1])
    wanted = top_p * weights.sum(-1, keepdim=True)
    largest = torch.topk(weights, num_candidates, dim=-1).values
    enough = (largest.sum(-1, keepdim=True) >= wanted).squeeze(1)
    if num_candidates == weights.shape[1] or bool(enough.all()):
        return _keep_nucleus(weights, largest, wanted)
    kept = torch.empty_like(weights)
    kept[enough] = _keep_nucleus(weights[enough], largest[enough], wanted[enough])
    wide = ~enough
    kept[wide] = keep_top_p(weights[wide], top_p[wide], _NUCLEUS_GROWTH * num_candidates)
    return kept


def _keep_nucleus(
    weights: torch.Tensor, largest: torch.Tensor, wanted: torch.Tensor
) -> torch.Tensor:
    """largest: as many of the weights, sorted, as hold the wanted sum [n, 1]."""
    inside = largest.cumsum(-1) - largest < wanted
    least = largest.gather(1, inside.sum(-1, keepdim=True) - 1)
    num_ties = (inside & (largest == least)).sum(-1, keepdim=True)
    ties = weights == least
    stays = (weights > least) | (ties & (ties.cumsum(-1) <= num_ties))
    return weights * stays


def keep_min_p(weights: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Drop tokens less likely than min_p times the most likely one (arXiv:2407.01082).

    weights [n, vocab] int64, min_p [n, 1] float64.
    """
    threshold = min_p * weights.amax(-1, keepdim=True)
    return weights * (weights >= threshold)


def draw(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Inverse of the cumulative distribution in token-id order: int64 [n].

    weights [n, vocab] int64, uniforms [n] float64 in [0, 1 - 2**-53]: then the rounded product is
    below the total even where that is no float64.
    """
    cumulative = weights.cumsum(-1)
    target = (uniforms * cumulative[:, -1]).to(torch.int64)
    return torch.searchsorted(cumulative, target.unsqueeze(1), right=True).squeeze(1)


def _column(
    like: torch.Tensor, values: Sequence[float], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=like.device).unsqueeze(1)


def _on_rows(
    keep: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    values: torch.Tensor,
    params: torch.Tensor,
    which: list[int],
) -> torch.Tensor:
    """values with keep(values, params) in the rows `which`, perhaps in place."""
    if len(which) == len(values):
        return keep(values, params)
    if which:
        values[which] = keep(values[which], params[which])
    return values
