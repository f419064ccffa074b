"""The most likely next tokens of beams; which of them go on, the scheduler decides."""

import math
from collections.abc import Sequence

import numpy as np
import torch

from loraplex.execution.sampling.logits_edits import LogitsEdits
from loraplex.execution.sampling.logits_processors import LogitsProcessors
from loraplex.execution.sampling.rows import Draw, StepRow
from loraplex.kernels.ops import Kernels

Candidates = tuple[tuple[int, float], ...]


def find_candidates(
    kernels: Kernels, logits: torch.Tensor, rows: Sequence[StepRow], processors: LogitsProcessors
) -> list[Candidates]:
    """(token id, score) of each row's step.num_candidates best, of equals the lowest id first.

    The score is the log probability, to which the processors were applied as if it were a logit:
    so does transformers' beam search. Temperature, top-k, top-p and min-p do not matter. A token
    that may not come (-inf) is no candidate, so there may be fewer.
    """
    if not rows:
        return []
    where = torch.tensor([row.last for row in rows], device=logits.device)
    scores = torch.log_softmax(logits[where], dim=-1)
    with LogitsEdits(scores, kernels) as edits:
        processors.apply(edits, [Draw(index, row.row) for index, row in enumerate(rows)])
        numbers = np.arange(len(rows))
        num_top = min(max(row.step.num_candidates for row in rows), scores.shape[1])
        ids = kernels.top_logprobs(scores, numbers, np.zeros_like(numbers), num_top).top_ids
        best = scores.gather(1, ids)
    # Scores fall, so those of tokens that may not come are at the end.
    num_possible = (best > -math.inf).sum(1).tolist()
    return [
        tuple(zip(of_ids, of_scores, strict=True))[: min(num, row.step.num_candidates)]
        for row, of_ids, of_scores, num in zip(
            rows, ids.tolist(), best.tolist(), num_possible, strict=True
        )
    ]
