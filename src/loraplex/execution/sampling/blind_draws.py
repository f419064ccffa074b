"""Draws that depend on nothing that the host knows only later: they are enqueued at once."""

import math
from collections.abc import Sequence

import numpy as np
import torch

from loraplex.core.plan import LogitsNeeded, RowStep
from loraplex.execution.sampling.philox import Purpose, uniforms
from loraplex.execution.sampling.rows import Draw, SampledRow
from loraplex.execution.sampling.token_feed import NO_TOKEN, TokenFeed
from loraplex.kernels.ops import Kernels
from loraplex.kernels.sampling import DrawOptions


def is_drawn_blindly(step: RowStep, row: SampledRow) -> bool:
    """Whether all that the step wants of its row is a token that does not depend on those before.

    Or nothing at all.
    """
    if step.logits is not LogitsNeeded.LAST:
        return step.logits is LogitsNeeded.NONE
    return (
        row.draws_blindly
        and step.num_logprobs is None
        and not step.draft_token_ids
        and not step.num_candidates
    )


def draw_blindly(
    kernels: Kernels, logits: torch.Tensor, rows: Sequence[SampledRow], feed: TokenFeed
) -> torch.Tensor:
    """The next token of each row [n] int64 on the device; NO_TOKEN where logits are not finite.

    logits [n, vocab], which may change.
    """
    best, maxima = kernels.argmax(logits, np.arange(len(rows)))
    is_finite = maxima.abs() < math.inf
    random = [index for index, row in enumerate(rows) if not row.is_greedy]
    if random:
        where = feed.rows(random)
        wide = (logits if len(random) == len(rows) else logits.index_select(0, where)).float()
        # What is drawn there does not matter, but there must be something to draw.
        wide.masked_fill_(~is_finite.index_select(0, where).unsqueeze(1), 0.0)
        draws = [Draw(index, rows[row]) for index, row in enumerate(random)]
        drawn = kernels.draw_tokens(wide, np.arange(len(draws)), draw_options(draws))
        best.index_copy_(0, where, drawn)
    return torch.where(is_finite, best, NO_TOKEN)


def draw_options(draws: Sequence[Draw]) -> DrawOptions:
    """How each of them is drawn."""
    params = [draw.row.sampling for draw in draws]
    return DrawOptions(
        temperature=np.array([p.temperature for p in params], dtype=np.float32),
        top_k=np.array([max(p.top_k, 0) for p in params], dtype=np.int64),
        top_p=np.array([d.row.top_p_after(d.accepted) for d in draws], dtype=np.float64),
        min_p=np.array([p.min_p for p in params], dtype=np.float64),
        uniforms=uniforms(
            [(d.row.added.seed, d.row.added.sequence_index, d.output_index) for d in draws],
            Purpose.TOKEN,
        ),
    )
