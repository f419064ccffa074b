"""Log probabilities of tokens, and the likeliest ones, on a GPU."""

import torch
import triton

from loraplex.kernels.cuda.logit_rows import (
    BLOCK,
    MAX_SPLITS,
    Splits,
    extremes,
    sent_together,
)
from loraplex.kernels.cuda.programs import logprobs as programs
from loraplex.kernels.sampling import IntArray, TopLogprobs

_CHUNK_ROWS = 64
"""Bounds the keys [rows, vocab] int64, of which the largest are found."""
_TOP_BLOCK = 32


def top_logprobs(
    logits: torch.Tensor, rows: IntArray, token_ids: IntArray, num_top: int
) -> TopLogprobs:
    """logits [any, vocab] float32; as Kernels.top_logprobs. Nothing waits for the device."""
    device, num_rows = logits.device, len(rows)
    splits = Splits(logits.shape[1])
    indices, chosen = sent_together([rows, token_ids], device)
    maxima, _ = extremes(logits, indices, num_rows)
    sums = torch.empty_like(maxima)
    ranks = torch.empty(maxima.shape, dtype=torch.int64, device=device)
    programs.sum_splits[num_rows, splits.number](
        *(sums, ranks, logits, indices, chosen, maxima, logits.stride(0)),
        VOCAB=splits.vocab_size,
        SPLIT=splits.size,
        NUM_SPLITS=splits.number,
        MAX_SPLITS=MAX_SPLITS,
        BLOCK=BLOCK,
    )
    result = TopLogprobs(
        torch.empty(num_rows, device=device),
        torch.empty(num_rows, dtype=torch.int64, device=device),
        torch.empty((num_rows, num_top), dtype=torch.int64, device=device),
        torch.empty((num_rows, num_top), device=device),
    )
    programs.finish[(num_rows,)](
        *(result.logprobs, result.ranks, result.top_ids, result.top_logprobs),
        *(_top_keys(logits, indices, num_rows, num_top), sums, ranks),
        *(logits, indices, chosen, maxima, num_top, logits.stride(0)),
        NUM_SPLITS=splits.number,
        MAX_SPLITS=MAX_SPLITS,
        BLOCK=_TOP_BLOCK,
        num_warps=1,
    )
    return result


def _top_keys(
    logits: torch.Tensor, indices: torch.Tensor, num_rows: int, num_top: int
) -> torch.Tensor:
    """[n, num_top] int64 that encode logits and ids, the largest first."""
    if num_top == 0:
        return indices.new_empty((num_rows, 0))
    vocab_size = logits.shape[1]
    parts = []
    for first in range(0, num_rows, _CHUNK_ROWS):
        keys = indices.new_empty((min(_CHUNK_ROWS, num_rows - first), vocab_size))
        programs.order_tokens[len(keys), triton.cdiv(vocab_size, BLOCK)](
            *(keys, logits, indices, first, logits.stride(0)), VOCAB=vocab_size, BLOCK=BLOCK
        )
        parts.append(torch.topk(keys, num_top, dim=-1).values)
    return torch.cat(parts)
