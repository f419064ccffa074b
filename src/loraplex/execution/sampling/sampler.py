"""Sampling of tokens from logits. Owns the sampling state of a row: tokens and counters.

Sampling is a pure function of (logits, parameters, tokens so far, seed, sequence index, output
index). It does not know the model, the KV storage, or which requests the rows belong to.
"""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch

from loraplex.core.errors import ErrorInfo, InvalidParameterError, RowFailedError
from loraplex.core.plan import RowAdded, RowResult, RowStep, Slot, Wanted
from loraplex.core.sampling_params import SamplingParams
from loraplex.execution.sampling.draws import (
    BlindDraws,
    draw_blindly,
    draw_options,
    is_drawn_blindly,
)
from loraplex.execution.sampling.logits_processors import LogitsEdits, LogitsProcessors, RowGrammars
from loraplex.execution.sampling.pending_samples import (
    NO_TOKEN,
    NOTHING_LEFT,
    EndedSample,
    LateSample,
    PendingSample,
    SentSample,
    TokenFeed,
    not_finite,
)
from loraplex.execution.sampling.rows import (
    Draw,
    SampledRow,
    StepRow,
    accept,
    draws_of,
    logits_rows_without,
    num_logits_rows,
)
from loraplex.execution.sampling.side_results import (
    LogitsFiles,
    find_candidates,
    find_logprobs,
    wanted_of_prompts,
    wanted_of_tokens,
)
from loraplex.kernels.ops import Kernels
from loraplex.kernels.reference import ReferenceKernels

_LIMITING = {
    "grammar": "grammar",
    "allowed_token_ids": "allowed_token_ids",
    "logit_bias": "logit_bias",
    "bad_token_ids": "bad_words",
    "no_repeat_ngram_size": "no_repeat_ngram_size",
    "min_tokens": "min_tokens",
}
"""Fields of SamplingParams that take tokens away: how clients call them."""


class Sampler:
    """State per slot, and one vectorised sample() per step. Used by one thread."""

    def __init__(
        self,
        vocab_size: int,
        *,
        device: torch.device,
        kernels: Kernels | None = None,
        grammars: RowGrammars | None = None,
        logits_dir: Path | None = None,
    ) -> None:
        """kernels: None is the torch reference on the device. grammars: None, no row has one.

        logits_dir: where rows that return logits leave them; see LogitsFiles.
        """
        self._vocab_size = vocab_size
        self._kernels = kernels or ReferenceKernels(device)
        self._grammars = grammars
        self._processors = LogitsProcessors(grammars)
        self._logits_files = LogitsFiles(logits_dir)
        self._rows: dict[Slot, SampledRow] = {}

    def add_row(self, row: RowAdded) -> None:
        """A sequence takes a slot that is free."""
        assert row.slot not in self._rows, f"slot {row.slot} is taken"
        self._rows[row.slot] = SampledRow.of(row, self._vocab_size)
        if self._grammars is not None and row.sampling.grammar is not None:
            self._grammars.add_row(row)

    def remove_row(self, slot: Slot) -> None:
        self._rows.pop(slot, None)
        if self._grammars is not None:
            self._grammars.remove_row(slot)

    def last_token(self, slot: Slot) -> int | None:
        """The newest token of the row: what RowStep.token_ids = None means.

        None: it was launched, and not finished; TokenFeed.newest has it.
        """
        row = self._rows[slot]
        return None if row.num_pending else row.token_ids[-1]

    def begin(self, steps: Sequence[RowStep]) -> None:
        """Call it before the logits of a step are computed: what needs none is done meanwhile."""
        if self._grammars is not None:
            self._grammars.begin(steps)

    def close(self) -> None:
        if self._grammars is not None:
            self._grammars.close()

    def launch(
        self, logits: torch.Tensor, steps: Sequence[RowStep], feed: TokenFeed | None
    ) -> PendingSample:
        """Sample in two phases, which do not wait for the device where that is possible.

        Samples are finished in the order of their launch, and one that does not wait for tokens
        before the next step is computed. feed: of an accelerator; None, and all is done at once.
        If it raises, nothing has changed.
        """
        if feed is None:
            return EndedSample(self.sample(logits, steps))
        rows = [self._rows[step.slot] for step in steps]
        if not all(map(is_drawn_blindly, steps, rows)):
            return LateSample(lambda: self.sample(logits, steps), feed.event())
        for step in steps:
            self._learn(step)
        unready = self._unready(steps)
        if unready:
            logits = logits.index_select(0, feed.rows(logits_rows_without(steps, unready)))
        drawing = [
            (step, row)
            for step, row in zip(steps, rows, strict=True)
            if step.wanted is not Wanted.NONE and step.slot not in unready
        ]
        draws = BlindDraws.of(drawing)
        assert logits.shape == (len(draws.rows), self._vocab_size), "one logits row per draw"
        bitmasks = None
        if draws.constrained and self._grammars is not None:
            bitmasks = self._grammars.bitmasks(draws.positions)
        tokens = draw_blindly(self._kernels, logits, draws, bitmasks, feed)
        places = draws.of_rows_without_drafts if draws.accepted else None
        slots = [step.slot for step, _ in drawing if not step.draft_token_ids]
        sent = feed.put(slots, tokens, places)
        kept = [None if row.added.slot in unready else row for row in rows]
        return SentSample(steps, kept, sent, self._take)

    def sample(self, logits: torch.Tensor, steps: Sequence[RowStep]) -> list[RowResult]:
        """Sample the rows of a step; one result per step row, in their order.

        logits: [S, vocab_size], S = sum of num_logits_rows(step), the rows' positions one after
        another; changed on the way, but in the end as before. A row with Wanted.NONE
        gives an empty result. A row with ALL samples only if its last position is the newest known
        token; its prompt_logprobs are of the token after each computed position, where it is known.
        A row with num_candidates gives these instead of a token. Tokens of a step that are beyond
        what is known of its row become known. A row whose logits are not finite gets a
        RowFailedError of its own; the others are not touched by it. A row whose masks are not ready
        is deferred.
        """
        for step in steps:
            self._learn(step)
        unready = self._unready(steps)
        if unready:
            return self._sample_without(unready, logits, steps)
        is_plain = [self._is_plain(step) for step in steps]
        if all(is_plain):
            likeliest = self._kernels.argmax(logits, np.arange(logits.shape[0]))
            return self._take_likeliest(steps, *likeliest)
        sizes = [num_logits_rows(step) for step in steps]
        assert logits.shape == (sum(sizes), self._vocab_size), "one logits row per wanted position"
        if not any(is_plain):
            return self._sample_any(logits, steps, sizes)
        # Rows with options must not slow down those that need only the likeliest token.
        of_plain = np.repeat(is_plain, sizes)
        # What may find no memory comes before any row gets its token: the step may come again.
        likeliest = self._kernels.argmax(logits, np.flatnonzero(of_plain))
        others = [not plain for plain in is_plain]
        kept = torch.from_numpy(np.flatnonzero(~of_plain)).to(logits.device)
        rest = self._sample_any(
            logits[kept],
            list(itertools.compress(steps, others)),
            list(itertools.compress(sizes, others)),
        )
        plain = self._take_likeliest(list(itertools.compress(steps, is_plain)), *likeliest)
        results = {result.slot: result for result in (*plain, *rest)}
        return [results[step.slot] for step in steps]

    def _unready(self, steps: Sequence[RowStep]) -> frozenset[Slot]:
        """Rows that are not sampled in this step. A step of a beam is that of all its beams."""
        if self._grammars is None:
            return frozenset()
        slots = [
            step.slot
            for step in steps
            if self._rows[step.slot].sampling.grammar is not None
            and step.wanted is Wanted.LAST
            and not step.num_candidates
        ]
        if not slots:
            return frozenset()
        return self._grammars.unready(slots, has_others=len(slots) < len(steps))

    def _sample_without(
        self, unready: frozenset[Slot], logits: torch.Tensor, steps: Sequence[RowStep]
    ) -> list[RowResult]:
        kept = torch.tensor(
            logits_rows_without(steps, unready), dtype=torch.int64, device=logits.device
        )
        rest = [step for step in steps if step.slot not in unready]
        results = iter(self.sample(logits[kept], rest) if rest else ())
        return [
            RowResult(step.slot, is_deferred=True) if step.slot in unready else next(results)
            for step in steps
        ]

    def _sample_any(
        self, logits: torch.Tensor, steps: Sequence[RowStep], sizes: Sequence[int]
    ) -> list[RowResult]:
        """Sample rows with any options; step i has sizes[i] rows of the logits."""
        if not len(logits):
            return [RowResult(step.slot) for step in steps]
        rows = [
            StepRow(step, self._rows[step.slot], first)
            for step, first in zip(steps, itertools.accumulate(sizes, initial=0), strict=False)
        ]
        logits = logits.float()
        best_ids, maxima = self._kernels.argmax(logits, np.arange(len(logits)))
        finite = torch.isfinite(maxima).tolist()
        usable = [
            all(finite[r.first : r.first + size]) for r, size in zip(rows, sizes, strict=True)
        ]
        good_rows = [r for r, ok in zip(rows, usable, strict=True) if ok]
        sampled = self._sample(logits, best_ids.tolist(), good_rows)
        return [
            sampled[row.step.slot] if ok else not_finite(row.step.slot)
            for row, ok in zip(rows, usable, strict=True)
        ]

    def _learn(self, step: RowStep) -> None:
        """A beam's token was chosen elsewhere."""
        if step.token_ids is None:
            return
        row = self._rows[step.slot]
        beyond = step.token_ids[max(0, len(row.token_ids) + row.num_pending - step.start) :]
        if beyond:
            row.append([i if 0 <= i < self._vocab_size else 0 for i in beyond])

    def _is_plain(self, step: RowStep) -> bool:
        """Whether all that the step wants of its row are the likeliest tokens."""
        return (
            step.wanted is Wanted.LAST
            and step.num_logprobs is None
            and not step.num_candidates
            and self._rows[step.slot].takes_likeliest
        )

    def _take_likeliest(
        self, steps: Sequence[RowStep], token_ids: torch.Tensor, maxima: torch.Tensor
    ) -> list[RowResult]:
        """Sample steps that need only these tokens; most steps of greedy requests are such, so it
        does nothing that is not needed.
        """
        likeliest, maximum_of = token_ids.tolist(), maxima.tolist()
        results, first = [], 0
        for step in steps:
            end = first + 1 + len(step.draft_token_ids)
            accepted = tuple(likeliest[first:end])
            if step.draft_token_ids:
                accepted = tuple(accept(step.draft_token_ids, accepted))
            if all(map(math.isfinite, maximum_of[first:end])):
                self._rows[step.slot].token_ids.extend(accepted)
                results.append(RowResult(step.slot, accepted))
            else:
                results.append(not_finite(step.slot))
            first = end
        assert first == len(likeliest), "one logits row per wanted position"
        return results

    def _sample(
        self, logits: torch.Tensor, best_ids: Sequence[int], rows: Sequence[StepRow]
    ) -> dict[Slot, RowResult]:
        beams = [row for row in rows if row.wants_candidates]
        candidates = find_candidates(self._kernels, logits, beams, self._processors)
        of_beams = {row.step.slot: best for row, best in zip(beams, candidates, strict=True)}
        draws = [draws_of(row) for row in rows]
        tokens = iter(self._choose(logits, best_ids, [draw for of_row in draws for draw in of_row]))
        chosen = [list(itertools.islice(tokens, len(of_row))) for of_row in draws]
        accepted = [
            accept(row.step.draft_token_ids, of_row)
            for row, of_row in zip(rows, chosen, strict=True)
        ]
        prompts = find_logprobs(self._kernels, logits, wanted_of_prompts(rows), len(rows))
        wanted = wanted_of_tokens(rows, draws, accepted)
        logprobs = find_logprobs(self._kernels, logits, wanted, len(rows))
        return {
            row.step.slot: self._result(
                logits, row, RowResult(row.step.slot, tuple(ids), top, prompt, candidates=best)
            )
            for row, ids, top, prompt in zip(rows, accepted, logprobs, prompts, strict=True)
            for best in (of_beams.get(row.step.slot, ()),)
        }

    def _result(self, logits: torch.Tensor, row: StepRow, result: RowResult) -> RowResult:
        """The row gets its tokens; what follows from that is added to the result."""
        if row.reaches_end and not (result.token_ids or result.candidates):
            return self._nothing_left(row.row)
        try:
            output_logits = self._logits_files.of_output(logits, row, len(result.token_ids))
            prompt_logits = self._logits_files.of_prompt(logits, row)
        except RowFailedError as error:
            return RowResult(result.slot, error=error.to_info())
        forced_token_ids = self._append(row.row, result.token_ids)
        if output_logits is None and prompt_logits is None and not forced_token_ids:
            return result
        return msgspec.structs.replace(
            result,
            forced_token_ids=forced_token_ids,
            logits=output_logits,
            prompt_logits=prompt_logits,
        )

    def _take(self, step: RowStep, row: SampledRow, token_ids: Sequence[int]) -> RowResult:
        """The row gets the tokens that were drawn for its step, as far as drafts are right."""
        if NO_TOKEN in token_ids:
            return not_finite(step.slot)
        drawn = [None if token_id == NOTHING_LEFT else token_id for token_id in token_ids]
        accepted = tuple(accept(step.draft_token_ids, drawn))
        if not accepted:
            return self._nothing_left(row)
        return RowResult(step.slot, accepted, forced_token_ids=self._append(row, accepted))

    def _nothing_left(self, row: SampledRow) -> RowResult:
        slot, problem = row.added.slot, None
        if self._grammars is not None and row.sampling.grammar is not None:
            problem = self._grammars.problem(slot)
        if problem is None:
            problem = _nothing_left(row.sampling)
        return RowResult(slot, error=problem)

    def _append(self, row: SampledRow, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Returns what the row's grammar makes likely to follow."""
        row.append(token_ids)
        if self._grammars is None or row.sampling.grammar is None or not token_ids:
            return ()
        return self._grammars.accept(row.added.slot, token_ids)

    def _choose(
        self, logits: torch.Tensor, best_ids: Sequence[int], draws: Sequence[Draw]
    ) -> list[int | None]:
        """The token of each draw; None where nothing finite is left to choose.

        best_ids: the likeliest token of each row of the logits.
        """
        token_ids: list[int | None] = [best_ids[draw.logits_row] for draw in draws]
        with LogitsEdits(logits, self._kernels) as edits:
            changed = self._processors.apply(edits, draws)
            if changed:
                rows = np.array([draws[i].logits_row for i in changed])
                best, maxima = self._kernels.argmax(logits, rows)
                finite = torch.isfinite(maxima).tolist()
                for i, token_id, ok in zip(changed, best.tolist(), finite, strict=True):
                    token_ids[i] = token_id if ok else None
            random = [
                i
                for i, draw in enumerate(draws)
                if token_ids[i] is not None and not draw.row.is_greedy
            ]
            if random:
                drawn = self._draw(logits, [draws[i] for i in random])
                for i, token_id in zip(random, drawn, strict=True):
                    token_ids[i] = token_id
        return token_ids

    def _draw(self, logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
        rows = np.array([draw.logits_row for draw in draws])
        drawn = self._kernels.draw_tokens(logits, rows, draw_options(draws))
        token_ids: list[int] = drawn.tolist()
        return token_ids


def _nothing_left(sampling: SamplingParams) -> ErrorInfo:
    """Error of contradictory parameters, or of a penalty beyond float32."""
    limits = [name for field, name in _LIMITING.items() if getattr(sampling, field)]
    limits = limits or ["repetition_penalty"]
    return InvalidParameterError(
        f"no token is left to choose with the request's {', '.join(limits)}",
        param=limits[0] if len(limits) == 1 else None,
    ).to_info()
