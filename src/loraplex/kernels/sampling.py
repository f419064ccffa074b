"""Sampling ops in torch, the reference of all backends, and their types.

Probabilities are fixed-point integers: the weight of a token is floor(exp(logit - max) * 2**40),
so a token rarer than 2**-40 of the likeliest is never drawn. Integer sums are exact in any order:
the kept set and the drawn token are the same for any number of threads, alone or in company, as
long as the logits are.
"""

import dataclasses
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

IntArray = npt.NDArray[np.int64]

_WEIGHT_ONE = 2**40  # 2**40 * 2**22 tokens still fits into an int64
_NUCLEUS_START = 512  # candidates that usually hold the nucleus: saves sorting the vocabulary
_NUCLEUS_GROWTH = 16
_CHUNK_ROWS = 64  # bounds the temporary [rows, vocab] copies for the logits of a long prompt
_WORD_BITS = 32


@dataclasses.dataclass(frozen=True, slots=True)
class DrawOptions:
    """How n rows are drawn. Arrays on the host."""

    temperature: npt.NDArray[np.float32]  # [n], > 0
    top_k: IntArray  # [n]; 0: all tokens
    top_p: npt.NDArray[np.float64]  # [n], in (0, 1]
    min_p: npt.NDArray[np.float64]  # [n], in [0, 1]
    uniforms: npt.NDArray[np.float64]  # [n], in [0, 1 - 2**-53]


@dataclasses.dataclass(frozen=True, slots=True)
class TopLogprobs:
    """Natural log probabilities of n rows."""

    logprobs: torch.Tensor  # [n] float32, of the requested tokens
    ranks: torch.Tensor  # [n] int64: how many tokens are likelier, plus 1
    top_ids: torch.Tensor  # [n, k] int64: the likeliest first, of equals the lowest id
    top_logprobs: torch.Tensor  # [n, k] float32


def argmax(logits: torch.Tensor, rows: IntArray) -> tuple[torch.Tensor, torch.Tensor]:
    """Implement Kernels.argmax."""
    maxima, token_ids = logits[torch.from_numpy(rows)].max(-1)
    return token_ids, maxima.float()


def draw_tokens(logits: torch.Tensor, rows: IntArray, options: DrawOptions) -> torch.Tensor:
    """Implement Kernels.draw_tokens."""
    weights = kept_weights(logits[torch.from_numpy(rows)], options)
    return draw(weights, torch.from_numpy(options.uniforms).to(logits.device))


def top_logprobs(
    logits: torch.Tensor, rows: IntArray, token_ids: IntArray, num_top: int
) -> TopLogprobs:
    """Implement Kernels.top_logprobs."""
    parts = [
        _top_logprobs(
            logits[torch.from_numpy(rows[first : first + _CHUNK_ROWS])],
            torch.from_numpy(token_ids[first : first + _CHUNK_ROWS]).to(logits.device),
            num_top,
        )
        for first in range(0, len(rows), _CHUNK_ROWS)
    ]
    return TopLogprobs(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


def _top_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    chosen = logits.gather(1, token_ids.unsqueeze(1))
    ranks = (logits > chosen).sum(-1) + 1
    logprobs = torch.log_softmax(logits, dim=-1)
    # topk leaves it open which of equals it takes: what is above its least, then ties by id.
    least = torch.topk(logits, max(num_top, 1), dim=-1).values[:, -1:]
    above, ties = logits > least, logits == least
    stays = above | (ties & (ties.cumsum(-1) <= num_top - above.sum(-1, keepdim=True)))
    top_ids = stays.nonzero()[:, 1].view(len(logits), num_top)
    order = logits.gather(1, top_ids).sort(dim=-1, descending=True, stable=True).indices
    top_ids = top_ids.gather(1, order)
    return (
        logprobs.gather(1, token_ids.unsqueeze(1)).squeeze(1),
        ranks,
        top_ids,
        logprobs.gather(1, top_ids),
    )


def apply_bitmask(logits: torch.Tensor, rows: IntArray, bitmask: torch.Tensor) -> None:
    """Implement Kernels.apply_bitmask."""
    where = torch.from_numpy(rows)
    vocab_size = logits.shape[1]
    bits = torch.arange(_WORD_BITS, dtype=torch.int32, device=bitmask.device)
    allowed = (bitmask.unsqueeze(-1) >> bits & 1).flatten(1)[:, :vocab_size].bool()
    logits[where] = logits[where].masked_fill(~allowed, -torch.inf)


def kept_weights(logits: torch.Tensor, options: DrawOptions) -> torch.Tensor:
    """Top-k, temperature, top-p, min-p: the weights of what may be drawn, 0 for the rest.

    logits [n, vocab] (not kept); int64 [n, vocab]. The kept set is that of transformers'
    processors in this order (temperature does not change a top-k).
    """
    device, vocab_size = logits.device, logits.shape[1]
    which = (options.top_k > 0) & (options.top_k < vocab_size)
    logits = _on_rows(keep_top_k, logits, _column(options.top_k, device), which)
    weights = token_weights(logits, _column(options.temperature, device))
    top_p, min_p = _column(options.top_p, device), _column(options.min_p, device)
    weights = _on_rows(keep_top_p, weights, top_p, options.top_p < 1.0)
    return _on_rows(keep_min_p, weights, min_p, options.min_p > 0.0)


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
    weights: torch.Tensor, top_p: torch.Tensor, num_candidates: int = _NUCLEUS_START
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


def _column(values: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(values).to(device).unsqueeze(1)


def _on_rows(
    keep: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    values: torch.Tensor,
    params: torch.Tensor,
    which: npt.NDArray[np.bool_],
) -> torch.Tensor:
    """values with keep(values, params) in the rows `which`, perhaps in place."""
    if which.all():
        return keep(values, params)
    if which.any():
        rows = torch.from_numpy(which.nonzero()[0]).to(values.device)
        values[rows] = keep(values[rows], params[rows])
    return values
