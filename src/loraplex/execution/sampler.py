"""From logits to tokens. Owns what sampling needs to know of a row: its tokens and its counters.

Sampling is a pure function of (logits, parameters, tokens so far, seed, sequence index, output
index). It does not know the model, the KV storage, or which requests the rows belong to.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import torch

from loraplex.core.errors import RowFailedError
from loraplex.core.output import TokenLogprob
from loraplex.core.plan import LogitsNeeded, RowAdded, RowResult, RowStep, Slot
from loraplex.core.sampling_params import SamplingParams
from loraplex.execution import distribution
from loraplex.execution.logprobs import token_logprobs
from loraplex.execution.philox import Purpose, uniforms


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
    prompt_seen: torch.Tensor | None = None  # [vocab] bool; only of rows with penalties
    output_counts: torch.Tensor | None = None  # [vocab] int32

    @property
    def sampling(self) -> SamplingParams:
        return self.added.sampling

    @property
    def num_outputs(self) -> int:
        return len(self.token_ids) - self.added.num_prompt_tokens

    def append(self, token_ids: Sequence[int]) -> None:
        self.token_ids.extend(token_ids)
        if self.output_counts is not None:
            self.output_counts = _with_tokens(self.output_counts, token_ids)


@dataclasses.dataclass(frozen=True, slots=True)
class _StepRows:
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


@dataclasses.dataclass(frozen=True, slots=True)
class _Draw:
    """One position to sample, under the assumption that the drafts before it were accepted."""

    logits_row: int
    row: _Row
    accepted: tuple[int, ...]

    @property
    def output_index(self) -> int:
        return self.row.num_outputs + len(self.accepted)


class Sampler:
    """State per slot, and one vectorised sample() per step. Used by one thread."""

    def __init__(self, vocab_size: int, *, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._rows: dict[Slot, _Row] = {}

    def add_row(self, row: RowAdded) -> None:
        """A sequence takes a slot that is free."""
        assert row.slot not in self._rows, f"slot {row.slot} is taken"
        state = _Row(row, list(row.token_ids))
        if row.sampling.has_penalties:
            none = torch.zeros(self._vocab_size, dtype=torch.int32, device=self._device)
            state.prompt_seen = _with_tokens(none, row.token_ids[: row.num_prompt_tokens]) > 0
            state.output_counts = _with_tokens(none, row.token_ids[row.num_prompt_tokens :])
        self._rows[row.slot] = state

    def remove_row(self, slot: Slot) -> None:
        self._rows.pop(slot, None)

    def last_token(self, slot: Slot) -> int:
        """The newest token of the row: what RowStep.token_ids = None means."""
        return self._rows[slot].token_ids[-1]

    def sample(self, logits: torch.Tensor, steps: Sequence[RowStep]) -> list[RowResult]:
        """Sample the rows of a step; one result per step row, in their order.

        logits: [S, vocab_size] float32, S = sum of num_logits_rows(step), the rows' positions one
        after another. It is not changed. A row with LogitsNeeded.NONE gives an empty result. A row
        with ALL samples only if its last position is the newest known token; its prompt_logprobs
        are of the token after each computed position, where it is known. A row whose logits are
        not finite gets a RowFailedError of its own; the others are not touched by it.
        """
        sizes = [num_logits_rows(step) for step in steps]
        firsts = itertools.accumulate(sizes, initial=0)
        assert logits.shape == (sum(sizes), self._vocab_size), "one logits row per wanted position"
        rows = [
            _StepRows(step, self._rows[step.slot], first)
            for step, first in zip(steps, firsts, strict=False)
        ]
        if logits.shape[0] == 0:
            return [RowResult(step.slot) for step in steps]
        finite = torch.isfinite(logits.amax(-1)).tolist()
        usable = [
            all(finite[r.first : r.first + size]) for r, size in zip(rows, sizes, strict=True)
        ]
        sampled = self._sample(logits, [r for r, ok in zip(rows, usable, strict=True) if ok])
        return [
            sampled[row.step.slot]
            if ok
            else _failed(row, "the model gave logits that are NaN or inf")
            for row, ok in zip(rows, usable, strict=True)
        ]

    def _sample(self, logits: torch.Tensor, rows: Sequence[_StepRows]) -> dict[Slot, RowResult]:
        draws = [_draws(row) for row in rows]
        tokens = self._choose(logits, [draw for of_row in draws for draw in of_row])
        remaining = iter(tokens)
        chosen = [[next(remaining) for _ in of_row] for of_row in draws]
        accepted = [
            _accept(row.step.draft_token_ids, of_row)
            for row, of_row in zip(rows, chosen, strict=True)
        ]
        prompt_logprobs = _prompt_logprobs(logits, rows)
        logprobs = _chosen_logprobs(logits, rows, draws, accepted)
        results = {}
        for row, token_ids, top, prompt in zip(
            rows, accepted, logprobs, prompt_logprobs, strict=True
        ):
            if row.samples and not token_ids:
                results[row.step.slot] = _failed(row, "its parameters leave no token to choose")
                continue
            row.row.append(token_ids)
            results[row.step.slot] = RowResult(row.step.slot, tuple(token_ids), top, prompt)
        return results

    def _choose(self, logits: torch.Tensor, draws: Sequence[_Draw]) -> list[int | None]:
        """The token of each draw; None where nothing finite is left to choose."""
        if not draws:
            return []
        picked = logits[[draw.logits_row for draw in draws]]
        self._penalize(picked, draws)
        _suppress(picked, draws)
        possible = torch.isfinite(picked.amax(-1)).tolist()
        token_ids = picked.argmax(-1)
        random = [i for i, d in enumerate(draws) if possible[i] and not d.row.sampling.is_greedy]
        if random:
            token_ids[random] = self._draw(picked[random], [draws[i] for i in random])
        return [
            token_id if ok else None
            for token_id, ok in zip(token_ids.tolist(), possible, strict=True)
        ]

    def _penalize(self, logits: torch.Tensor, draws: Sequence[_Draw]) -> None:
        """In place, for the rows that ask for it."""
        which, seen, counts = [], [], []
        for index, item in enumerate(draws):
            if item.row.prompt_seen is None or item.row.output_counts is None:
                continue
            which.append(index)
            seen.append(item.row.prompt_seen)
            counts.append(_with_tokens(item.row.output_counts, item.accepted))
        if not which:
            return
        logits[which] = distribution.penalize(
            logits[which],
            torch.stack(seen),
            torch.stack(counts),
            [draws[i].row.sampling for i in which],
        )

    def _draw(self, logits: torch.Tensor, draws: Sequence[_Draw]) -> torch.Tensor:
        weights = distribution.kept_weights(logits, [draw.row.sampling for draw in draws])
        numbers = uniforms(
            [(d.row.added.seed, d.row.added.sequence_index, d.output_index) for d in draws],
            Purpose.TOKEN,
        )
        return distribution.draw(weights, torch.from_numpy(numbers).to(self._device))


def _with_tokens(counts: torch.Tensor, token_ids: Sequence[int]) -> torch.Tensor:
    """Counts [vocab] plus the tokens; the same tensor if there are none."""
    if not token_ids:
        return counts
    ids = torch.tensor(token_ids, dtype=torch.int64, device=counts.device)
    return counts.index_add(0, ids, torch.ones_like(ids, dtype=counts.dtype))


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


def _suppress(logits: torch.Tensor, draws: Sequence[_Draw]) -> None:
    """End and stop tokens cannot be chosen before min_tokens. In place."""
    pairs = [
        (index, token_id)
        for index, item in enumerate(draws)
        if item.output_index < item.row.sampling.min_tokens
        for token_id in item.row.added.suppressed_token_ids
    ]
    if pairs:
        rows, token_ids = zip(*pairs, strict=True)
        logits[list(rows), list(token_ids)] = -torch.inf


def _chosen_logprobs(
    logits: torch.Tensor,
    rows: Sequence[_StepRows],
    draws: Sequence[Sequence[_Draw]],
    accepted: Sequence[Sequence[int]],
) -> list[tuple[TokenLogprob, ...]]:
    """Per row, of its new tokens; empty where the step wants none."""
    wanted = []
    for index, (row, of_row, token_ids) in enumerate(zip(rows, draws, accepted, strict=True)):
        if row.step.num_logprobs is None:
            continue
        for item, token_id in zip(of_row, token_ids, strict=False):
            wanted.append((index, item.logits_row, token_id, row.step.num_logprobs))
    return _logprobs_by_row(logits, wanted, len(rows))


def _prompt_logprobs(
    logits: torch.Tensor, rows: Sequence[_StepRows]
) -> list[tuple[TokenLogprob, ...]]:
    """Per row with LogitsNeeded.ALL, of the known token after each computed position."""
    wanted = []
    for index, row in enumerate(rows):
        if row.step.logits is not LogitsNeeded.ALL:
            continue
        start, num_top = row.step.start, row.row.sampling.prompt_logprobs or 0
        following = row.row.token_ids[start + 1 : start + 1 + row.step.num_tokens]
        for offset, token_id in enumerate(following):
            wanted.append((index, row.first + offset, token_id, num_top))
    return _logprobs_by_row(logits, wanted, len(rows))


def _logprobs_by_row(
    logits: torch.Tensor, wanted: Sequence[tuple[int, int, int, int]], num_rows: int
) -> list[tuple[TokenLogprob, ...]]:
    """wanted: (index of the row, row of logits, token id, how many of the most likely)."""
    by_row: list[list[TokenLogprob]] = [[] for _ in range(num_rows)]
    if wanted:
        indices, logits_rows, token_ids, num_top = zip(*wanted, strict=True)
        found = token_logprobs(logits, logits_rows, token_ids, num_top)
        for index, logprob in zip(indices, found, strict=True):
            by_row[index].append(logprob)
    return [tuple(of_row) for of_row in by_row]


def _failed(rows: _StepRows, reason: str) -> RowResult:
    error = RowFailedError(f"no token could be sampled: {reason}")
    return RowResult(rows.step.slot, error=error.to_info())
