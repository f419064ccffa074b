"""Log probabilities as a client sees them: of the model's own, unprocessed distribution."""

from collections.abc import Sequence

import torch

from loraplex.core.output import TokenLogprob

_CHUNK_ROWS = 64  # bounds the temporary [rows, vocab] copies for the logits of a long prompt


def token_logprobs(
    logits: torch.Tensor, rows: Sequence[int], token_ids: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprob]:
    """For each named row of the logits: its token's natural log probability, rank and rivals.

    logits: [any, vocab] float32; rows, token_ids and num_top (how many of the most likely) have
    one length. Equally likely tokens share the better rank; among the most likely ones the lower
    id comes first.
    """
    found: list[TokenLogprob] = []
    for first in range(0, len(token_ids), _CHUNK_ROWS):
        chunk = slice(first, first + _CHUNK_ROWS)
        found += _chunk(logits[list(rows[chunk])], token_ids[chunk], num_top[chunk])
    return found


def _chunk(
    logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprob]:
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen_ids = torch.tensor(token_ids, device=logits.device).unsqueeze(1)
    ranks = (logits > logits.gather(1, chosen_ids)).sum(-1) + 1
    top = torch.topk(logprobs, min(max(num_top), logits.shape[1]), dim=-1)
    return [
        TokenLogprob(token_id, logprob, rank, _most_likely(ids[:count], values[:count]))
        for token_id, logprob, rank, count, ids, values in zip(
            token_ids,
            logprobs.gather(1, chosen_ids).squeeze(1).tolist(),
            ranks.tolist(),
            num_top,
            top.indices.tolist(),
            top.values.tolist(),
            strict=True,
        )
    ]


def _most_likely(ids: list[int], logprobs: list[float]) -> tuple[tuple[int, float], ...]:
    return tuple(sorted(zip(ids, logprobs, strict=True), key=lambda pair: (-pair[1], pair[0])))
