"""Draws that depend on nothing that the host knows only later: they are enqueued at once."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from loraplex.core.plan import RowStep, Slot, Wanted
from loraplex.execution.sampling.philox import Purpose, uniforms
from loraplex.execution.sampling.rows import Draw, SampledRow
from loraplex.execution.sampling.token_feed import NO_TOKEN, NOTHING_LEFT, TokenFeed
from loraplex.kernels.ops import Kernels
from loraplex.kernels.sampling import DrawOptions


@dataclasses.dataclass(frozen=True, slots=True)
class BlindDraws:
    """What is drawn from each row of the logits."""

    rows: Sequence[SampledRow]
    """Row of each draw: several times in a row for a row with draft tokens."""
    accepted: Mapping[int, tuple[int, ...]]
    """Draft tokens that a draw assumes to be accepted, by the index of the draw; none elsewhere."""
    constrained: Sequence[int]
    """Draws of rows with a grammar."""

    @classmethod
    def of(cls, drawing: Iterable[tuple[RowStep, SampledRow]]) -> "BlindDraws":
        """Return the draws of rows that draw a token and of their draft tokens."""
        rows: list[SampledRow] = []
        accepted: dict[int, tuple[int, ...]] = {}
        constrained: list[int] = []
        for step, row in drawing:
            first, drafts = len(rows), step.draft_token_ids
            rows.append(row)
            for size in range(1, len(drafts) + 1):
                accepted[len(rows)] = drafts[:size]
                rows.append(row)
            if row.sampling.grammar is not None:
                constrained.extend(range(first, len(rows)))
        return cls(rows, accepted, constrained)

    @property
    def of_rows_without_drafts(self) -> list[int]:
        """Indices of the draws of rows without draft tokens."""
        return [
            index
            for index in range(len(self.rows))
            if index not in self.accepted and index + 1 not in self.accepted
        ]

    @property
    def positions(self) -> list[tuple[Slot, tuple[int, ...]]]:
        """Positions of the constrained draws, see RowGrammars.bitmasks."""
        return [(self.rows[i].added.slot, self.accepted.get(i, ())) for i in self.constrained]


def is_drawn_blindly(step: RowStep, row: SampledRow) -> bool:
    """Whether all that the step wants of its row are tokens that need no look at the logits.

    Or nothing at all.
    """
    if step.wanted is not Wanted.LAST:
        return step.wanted is Wanted.NONE
    return row.draws_blindly and step.num_logprobs is None and not step.num_candidates


def draw_blindly(
    kernels: Kernels,
    logits: torch.Tensor,
    draws: BlindDraws,
    bitmasks: npt.NDArray[np.int32] | None,
    feed: TokenFeed,
) -> torch.Tensor:
    """The token of each draw [n] int64 on the device.

    NO_TOKEN where logits are not finite, NOTHING_LEFT where a grammar allows no token. bitmasks: of
    the constrained draws, if there are any. logits [n, vocab], which may change.
    """
    rows = draws.rows
    best, maxima = kernels.argmax(logits, np.arange(len(rows)))
    is_finite = maxima.abs() < math.inf
    if bitmasks is not None:
        where = feed.rows(list(draws.constrained))
        left = logits.index_select(0, where).float()
        everything = np.arange(len(draws.constrained))
        kernels.apply_bitmask(left, everything, feed.bitmasks(bitmasks))
        best_left, most = kernels.argmax(left, everything)
        best.index_copy_(0, where, torch.where(most.abs() < math.inf, best_left, NOTHING_LEFT))
        logits.index_copy_(0, where, left.to(logits.dtype))
    best = torch.where(is_finite, best, NO_TOKEN)
    random = [index for index, row in enumerate(rows) if not row.is_greedy]
    if random:
        where = feed.rows(random)
        wide = (logits if len(random) == len(rows) else logits.index_select(0, where)).float()
        likeliest = best.index_select(0, where)
        # What is drawn there does not matter, but there must be something to draw.
        wide.masked_fill_((likeliest < 0).unsqueeze(1), 0.0)
        options = [
            Draw(index, rows[row], draws.accepted.get(row, ())) for index, row in enumerate(random)
        ]
        drawn = kernels.draw_tokens(wide, np.arange(len(options)), draw_options(options))
        best.index_copy_(0, where, torch.where(likeliest < 0, likeliest, drawn))
    return best


def draw_options(draws: Sequence[Draw]) -> DrawOptions:
    """How each of them is drawn."""
    params = [draw.row.sampling for draw in draws]
    return DrawOptions(
        temperature=np.array([p.temperature for p in params], dtype=np.float32),
        top_k=np.array([max(p.top_k, 0) for p in params], dtype=np.int64),
        top_p=np.array([d.row.top_p_after(d.accepted) for d in draws], dtype=np.float64),
        min_p=np.array([p.min_p for p in params], dtype=np.float64),
        uniforms=uniforms(
            [(d.row.seed, d.row.added.sequence_index, d.output_index) for d in draws],
            Purpose.TOKEN,
        ),
    )
