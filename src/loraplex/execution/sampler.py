"""From logits to tokens. Owns what sampling needs to know of a row: its tokens and its counters.

Sampling is a pure function of (logits, parameters, tokens so far, seed, sequence index, output
index). It does not know the model, the KV storage, or which requests the rows belong to.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from loraplex.core.errors import RowFailedError
from loraplex.core.output import TokenLogprob
from loraplex.core.plan import LogitsNeeded, RowAdded, RowResult, RowStep, Slot
from loraplex.core.sampling_params import SamplingParams
from loraplex.execution.logits_edits import LogitsEdits
from loraplex.execution.penalties import TokenCounts, penalized
from loraplex.execution.philox import Purpose, uniforms
from loraplex.kernels.ops import Kernels
from loraplex.kernels.reference import ReferenceKernels
from loraplex.kernels.sampling import DrawOptions

_NOT_FINITE = "the model gave logits that are NaN or inf"


def num_logits_rows(step: RowStep) -> int:
    """How many of a row's last computed positions need logits: the rows that sample() expects.

    NONE: 0. LAST: 1, and one more per draft token. ALL: every computed position.
    """
    if step.logits is LogitsNeeded.NONE:
        return 0
    if step.logits is LogitsNeeded.ALL:
        return step.num_tokens
    return 1 + len(step.draft_token_ids)


@dataclasses.dataclass(slots=True, eq=False)
class _Row:
    """What the sampler keeps of a sequence in a slot."""

    added: RowAdded
    token_ids: list[int]
    counts: TokenCounts | None = None  # only of rows with penalties
    takes_likeliest: bool = False
    """Whatever the step: its next token is the likeliest, and needs no edit of the logits."""

    @property
    def sampling(self) -> SamplingParams:
        return self.added.sampling

    @property
    def num_outputs(self) -> int:
        return len(self.token_ids) - self.added.num_prompt_tokens

    def append(self, token_ids: Sequence[int]) -> None:
        self.token_ids.extend(token_ids)
        if self.counts is not None:
            self.counts.add(token_ids)


class _StepRows(NamedTuple):
    """One row's step and where its logits begin."""

    step: RowStep
    row: _Row
    first: int

    @property
    def samples(self) -> bool:
        if self.step.logits is not LogitsNeeded.ALL:
            return self.step.logits is LogitsNeeded.LAST
        num_known = len(self.row.token_ids) + len(self.step.draft_token_ids)
        return self.step.start + self.step.num_tokens == num_known


class _Draw(NamedTuple):
    """One position to sample, under the assumption that the drafts before it were accepted."""

    logits_row: int
    row: _Row
    accepted: tuple[int, ...]

    @property
    def output_index(self) -> int:
        return self.row.num_outputs + len(self.accepted)


class _WantedLogprob(NamedTuple):
    step_row: int
    """Which row of the step it is for."""
    logits_row: int
    token_id: int
    num_top: int


class Sampler:
    """State per slot, and one vectorised sample() per step. Used by one thread."""

    def __init__(
        self, vocab_size: int, *, device: torch.device, kernels: Kernels | None = None
    ) -> None:
        """kernels: None is the torch reference on the device."""
        self._vocab_size = vocab_size
        self._kernels = kernels or ReferenceKernels(device)
        self._rows: dict[Slot, _Row] = {}

    def add_row(self, row: RowAdded) -> None:
        """A sequence takes a slot that is free."""
        assert row.slot not in self._rows, f"slot {row.slot} is taken"
        state = _Row(row, list(row.token_ids))
        if row.sampling.has_penalties:
            prompt = row.token_ids[: row.num_prompt_tokens]
            state.counts = TokenCounts(prompt, row.token_ids[row.num_prompt_tokens :])
        elif row.sampling.is_greedy and not row.sampling.min_tokens:
            state.takes_likeliest = True
        self._rows[row.slot] = state

    def remove_row(self, slot: Slot) -> None:
        self._rows.pop(slot, None)

    def last_token(self, slot: Slot) -> int:
        """The newest token of the row: what RowStep.token_ids = None means."""
        return self._rows[slot].token_ids[-1]

    def sample(self, logits: torch.Tensor, steps: Sequence[RowStep]) -> list[RowResult]:
        """Sample the rows of a step; one result per step row, in their order.

        logits: [S, vocab_size], S = sum of num_logits_rows(step), the rows' positions one after
        another; changed on the way, but in the end as before. A row with LogitsNeeded.NONE
        gives an empty result. A row with ALL samples only if its last position is the newest known
        token; its prompt_logprobs are of the token after each computed position, where it is known.
        A row whose logits are not finite gets a RowFailedError of its own; the others are not
        touched by it.
        """
        if all(map(self._is_plain, steps)):
            return self._sample_plain(logits, steps)
        sizes = [num_logits_rows(step) for step in steps]
        firsts = itertools.accumulate(sizes, initial=0)
        assert logits.shape == (sum(sizes), self._vocab_size), "one logits row per wanted position"
        rows = [
            _StepRows(step, self._rows[step.slot], first)
            for step, first in zip(steps, firsts, strict=False)
        ]
        if logits.shape[0] == 0:
            return [RowResult(step.slot) for step in steps]
        logits = logits.float()
        best_ids, maxima = self._kernels.argmax(logits, np.arange(len(logits)))
        finite = torch.isfinite(maxima).tolist()
        usable = [
            all(finite[r.first : r.first + size]) for r, size in zip(rows, sizes, strict=True)
        ]
        good_rows = [r for r, ok in zip(rows, usable, strict=True) if ok]
        sampled = self._sample(logits, best_ids.tolist(), good_rows)
        return [
            sampled[row.step.slot] if ok else _failed(row.step.slot, _NOT_FINITE)
            for row, ok in zip(rows, usable, strict=True)
        ]

    def _is_plain(self, step: RowStep) -> bool:
        """Whether all that the step wants of its row is the likeliest token."""
        return (
            step.logits is LogitsNeeded.LAST
            and step.num_logprobs is None
            and not step.draft_token_ids
            and self._rows[step.slot].takes_likeliest
        )

    def _sample_plain(self, logits: torch.Tensor, steps: Sequence[RowStep]) -> list[RowResult]:
        """As sample(); of most steps of greedy requests, so it does nothing that is not needed."""
        assert logits.shape == (len(steps), self._vocab_size), "one logits row per step"
        best_ids, maxima = self._kernels.argmax(logits, np.arange(len(steps)))
        results = []
        for step, token_id, maximum in zip(steps, best_ids.tolist(), maxima.tolist(), strict=True):
            if math.isfinite(maximum):
                self._rows[step.slot].token_ids.append(token_id)
                results.append(RowResult(step.slot, (token_id,)))
            else:
                results.append(_failed(step.slot, _NOT_FINITE))
        return results

    def _sample(
        self, logits: torch.Tensor, best_ids: Sequence[int], rows: Sequence[_StepRows]
    ) -> dict[Slot, RowResult]:
        draws = [_draws(row) for row in rows]
        tokens = self._choose(logits, best_ids, [draw for of_row in draws for draw in of_row])
        remaining = iter(tokens)
        chosen = [[next(remaining) for _ in of_row] for of_row in draws]
        accepted = [
            _accept(row.step.draft_token_ids, of_row)
            for row, of_row in zip(rows, chosen, strict=True)
        ]
        prompt_logprobs = self._logprobs(logits, _wanted_of_prompts(rows), len(rows))
        logprobs = self._logprobs(logits, _wanted_of_tokens(rows, draws, accepted), len(rows))
        results = {}
        for row, token_ids, top, prompt in zip(
            rows, accepted, logprobs, prompt_logprobs, strict=True
        ):
            if row.samples and not token_ids:
                results[row.step.slot] = _failed(
                    row.step.slot, "its parameters leave no token to choose"
                )
                continue
            row.row.append(token_ids)
            results[row.step.slot] = RowResult(row.step.slot, tuple(token_ids), top, prompt)
        return results

    def _choose(
        self, logits: torch.Tensor, best_ids: Sequence[int], draws: Sequence[_Draw]
    ) -> list[int | None]:
        """The token of each draw; None where nothing finite is left to choose.

        best_ids: the likeliest token of each row of the logits.
        """
        token_ids: list[int | None] = [best_ids[draw.logits_row] for draw in draws]
        with LogitsEdits(logits) as edits:
            changed = sorted({*_penalize(edits, draws), *_suppress(edits, draws)})
            if changed:
                rows = np.array([draws[i].logits_row for i in changed])
                best, maxima = self._kernels.argmax(logits, rows)
                finite = torch.isfinite(maxima).tolist()
                for i, token_id, ok in zip(changed, best.tolist(), finite, strict=True):
                    token_ids[i] = token_id if ok else None
            random = [
                i
                for i, draw in enumerate(draws)
                if token_ids[i] is not None and not draw.row.sampling.is_greedy
            ]
            if random:
                drawn = self._draw(logits, [draws[i] for i in random])
                for i, token_id in zip(random, drawn, strict=True):
                    token_ids[i] = token_id
        return token_ids

    def _draw(self, logits: torch.Tensor, draws: Sequence[_Draw]) -> list[int]:
        params = [draw.row.sampling for draw in draws]
        options = DrawOptions(
            temperature=np.array([p.temperature for p in params], dtype=np.float32),
            top_k=np.array([max(p.top_k, 0) for p in params], dtype=np.int64),
            top_p=np.array([p.top_p for p in params], dtype=np.float64),
            min_p=np.array([p.min_p for p in params], dtype=np.float64),
            uniforms=uniforms(
                [(d.row.added.seed, d.row.added.sequence_index, d.output_index) for d in draws],
                Purpose.TOKEN,
            ),
        )
        rows = np.array([draw.logits_row for draw in draws])
        token_ids: list[int] = self._kernels.draw_tokens(logits, rows, options).tolist()
        return token_ids

    def _logprobs(
        self, logits: torch.Tensor, wanted: Sequence[_WantedLogprob], num_rows: int
    ) -> list[tuple[TokenLogprob, ...]]:
        """What is wanted, by the index of the step's row."""
        if not wanted:
            return [()] * num_rows
        found = self._kernels.top_logprobs(
            logits,
            np.array([w.logits_row for w in wanted]),
            np.array([w.token_id for w in wanted]),
            min(max(w.num_top for w in wanted), self._vocab_size),
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


def _draws(rows: _StepRows) -> list[_Draw]:
    """The last position, and with drafts one more per draft token before it."""
    if not rows.samples:
        return []
    drafts = rows.step.draft_token_ids
    first = rows.first + num_logits_rows(rows.step) - 1 - len(drafts)
    return [_Draw(first + i, rows.row, drafts[:i]) for i in range(len(drafts) + 1)]


def _accept(drafts: Sequence[int], sampled: Sequence[int | None]) -> list[int]:
    """The sampled tokens up to the first that differs from its draft."""
    accepted: list[int] = []
    for index, token_id in enumerate(sampled):
        if token_id is None:
            break
        accepted.append(token_id)
        if index < len(drafts) and token_id != drafts[index]:
            break
    return accepted


def _penalize(edits: LogitsEdits, draws: Sequence[_Draw]) -> list[int]:
    """Which draws ask for it."""
    which, seen = [], []
    for index, draw in enumerate(draws):
        if draw.row.counts is not None:
            which.append(index)
            seen.append(draw.row.counts.seen(draw.accepted))
    if which:
        sizes = [len(row.token_ids) for row in seen]
        rows = np.repeat(np.array([draws[i].logits_row for i in which]), sizes)
        opened = edits.open(rows, np.concatenate([row.token_ids for row in seen]))
        params = [draws[i].row.sampling for i in which]
        opened.set(penalized(opened.values, seen, params))
    return which


def _suppress(edits: LogitsEdits, draws: Sequence[_Draw]) -> list[int]:
    """End and stop tokens cannot be chosen before min_tokens. Which draws that changes."""
    which = [i for i, d in enumerate(draws) if d.output_index < d.row.sampling.min_tokens]
    pairs = [
        (draws[i].logits_row, token_id)
        for i in which
        for token_id in draws[i].row.added.suppressed_token_ids
    ]
    if pairs:
        rows, token_ids = np.array(pairs).T.copy()
        edits.open(rows, token_ids).set(-torch.inf)
    return which


def _wanted_of_tokens(
    rows: Sequence[_StepRows],
    draws: Sequence[Sequence[_Draw]],
    accepted: Sequence[Sequence[int]],
) -> list[_WantedLogprob]:
    """Of the new tokens, in the rows whose step wants that."""
    return [
        _WantedLogprob(index, draw.logits_row, token_id, row.step.num_logprobs)
        for index, (row, of_row, ids) in enumerate(zip(rows, draws, accepted, strict=True))
        if row.step.num_logprobs is not None
        for draw, token_id in zip(of_row, ids, strict=False)
    ]


def _wanted_of_prompts(rows: Sequence[_StepRows]) -> list[_WantedLogprob]:
    """In rows with LogitsNeeded.ALL, of the known token after each computed position."""
    wanted = []
    for index, row in enumerate(rows):
        if row.step.logits is not LogitsNeeded.ALL:
            continue
        start, num_top = row.step.start, row.row.sampling.prompt_logprobs or 0
        following = row.row.token_ids[start + 1 : start + 1 + row.step.num_tokens]
        for offset, token_id in enumerate(following):
            wanted.append(_WantedLogprob(index, row.first + offset, token_id, num_top))
    return wanted


def _failed(slot: Slot, reason: str) -> RowResult:
    return RowResult(slot, error=RowFailedError(f"no token could be sampled: {reason}").to_info())
