"""How tokens are drawn: random numbers, and draws that wait for nothing that the host knows later.

Random numbers are those of Philox4x32-10, a counter-based generator, vectorised over counters. A
draw is a pure function of (key, counter), so a token does not depend on what was drawn before it or
with it. Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

import dataclasses
import enum
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from loraplex.core.plan import RowStep, Slot, Wanted
from loraplex.execution.sampling.pending_samples import NO_TOKEN, NOTHING_LEFT, TokenFeed
from loraplex.execution.sampling.rows import Draw, SampledRow
from loraplex.kernels.ops import Kernels
from loraplex.kernels.sampling import DrawOptions

_ROUNDS = 10
_MULTIPLIER_0 = np.uint64(0xD2511F53)
_MULTIPLIER_1 = np.uint64(0xCD9E8D57)
_WEYL_0 = np.uint32(0x9E3779B9)
_WEYL_1 = np.uint32(0xBB67AE85)
_MASK_32 = 0xFFFFFFFF
_MASK_64 = 0xFFFFFFFFFFFFFFFF
_SHIFT_32 = np.uint64(32)
_LOW_32 = np.uint64(_MASK_32)

U32Array = npt.NDArray[np.uint32]


class Purpose(enum.IntEnum):
    """What a draw is for: the third word of the counter, so that no two uses share a number."""

    TOKEN = 0


def philox4x32(counters: U32Array, keys: U32Array) -> U32Array:
    """Ten rounds. counters: [n, 4], keys: [n, 2]; returns [n, 4]."""
    word_0, word_1, word_2, word_3 = counters.astype(np.uint64).T
    key_0, key_1 = keys.T.copy()
    for _ in range(_ROUNDS):
        product_0 = word_0 * _MULTIPLIER_0
        product_1 = word_2 * _MULTIPLIER_1
        word_0, word_1, word_2, word_3 = (
            (product_1 >> _SHIFT_32) ^ word_1 ^ key_0,
            product_1 & _LOW_32,
            (product_0 >> _SHIFT_32) ^ word_3 ^ key_1,
            product_0 & _LOW_32,
        )
        key_0 += _WEYL_0  # modulo 2^32
        key_1 += _WEYL_1
    return np.stack((word_0, word_1, word_2, word_3), axis=1).astype(np.uint32)


def uniforms(draws: Sequence[tuple[int, int, int]], purpose: Purpose) -> npt.NDArray[np.float64]:
    """One uniform number in [0, 1), of 53 bits, per (seed, sequence index, output index).

    A seed is any 64-bit integer, signed or not; -1 and 2**64 - 1 are the same seed.
    """
    seeds = np.array([seed & _MASK_64 for seed, _, _ in draws], dtype=np.uint64)
    counters = np.array(
        [(output_index, sequence_index, purpose, 0) for _, sequence_index, output_index in draws],
        dtype=np.uint32,
    ).reshape(-1, 4)
    keys = np.stack((seeds & _LOW_32, seeds >> _SHIFT_32), axis=1).astype(np.uint32)
    words = philox4x32(counters, keys).astype(np.uint64)
    bits = ((words[:, 0] << _SHIFT_32) | words[:, 1]) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


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
