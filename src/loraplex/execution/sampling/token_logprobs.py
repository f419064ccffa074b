"""The requested log probabilities of a step's rows, all by one op."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from loraplex.core.output import TokenLogprob
from loraplex.core.plan import Wanted
from loraplex.execution.sampling.rows import Draw, StepRow
from loraplex.kernels.ops import Kernels


class WantedLogprob(NamedTuple):
    step_row: int
    """Which row of the step it is for."""
    logits_row: int
    token_id: int
    num_top: int


def wanted_of_tokens(
    rows: Sequence[StepRow],
    draws: Sequence[Sequence[Draw]],
    accepted: Sequence[Sequence[int]],
) -> list[WantedLogprob]:
    """Log probabilities of the new tokens, in the rows whose step needs them."""
    return [
        WantedLogprob(index, draw.logits_row, token_id, row.step.num_logprobs)
        for index, (row, of_row, ids) in enumerate(zip(rows, draws, accepted, strict=True))
        if row.step.num_logprobs is not None
        for draw, token_id in zip(of_row, ids, strict=False)
    ]


def wanted_of_prompts(rows: Sequence[StepRow]) -> list[WantedLogprob]:
    """Log probability of the known token after each position, in rows with Wanted.ALL."""
    wanted = []
    for index, row in enumerate(rows):
        num_top = row.row.sampling.prompt_logprobs
        if row.step.wanted is not Wanted.ALL or num_top is None:
            continue
        start = row.step.start
        following = row.row.token_ids[start + 1 : start + 1 + row.step.num_tokens]
        for offset, token_id in enumerate(following):
            wanted.append(WantedLogprob(index, row.first + offset, token_id, num_top))
    return wanted


def find_logprobs(
    kernels: Kernels, logits: torch.Tensor, wanted: Sequence[WantedLogprob], num_rows: int
) -> list[tuple[TokenLogprob, ...]]:
    """What is wanted, by the index of the step's row."""
    if not wanted:
        return [()] * num_rows
    found = kernels.top_logprobs(
        logits,
        np.array([w.logits_row for w in wanted]),
        np.array([w.token_id for w in wanted]),
        min(max(w.num_top for w in wanted), logits.shape[1]),
    )
    by_row: list[list[TokenLogprob]] = [[] for _ in range(num_rows)]
    for want, logprob, rank, ids, logprobs in zip(
        wanted,
        found.logprobs.tolist(),
        found.ranks.tolist(),
        found.top_ids.tolist(),
        found.top_logprobs.tolist(),
        strict=True,
    ):
        top = tuple(zip(ids[: want.num_top], logprobs[: want.num_top], strict=True))
        by_row[want.step_row].append(TokenLogprob(want.token_id, logprob, rank, top))
    return [tuple(of_row) for of_row in by_row]
