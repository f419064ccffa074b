"""The grammars of the rows: matchers, and masks that are filled while the model computes."""

import concurrent.futures
import dataclasses
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from loraplex.core.errors import ErrorInfo, InternalError, LoraplexError
from loraplex.core.grammar import GrammarKind
from loraplex.core.plan import LogitsNeeded, RowAdded, RowStep, Slot
from loraplex.execution.grammar.matcher import BitmaskArray, RowMatcher, bitmask_words
from loraplex.execution.grammar.vocabulary import VocabularySource

if TYPE_CHECKING:
    from loraplex.execution.grammar.compiler import GrammarCompiler

_LOGGER = logging.getLogger(__name__)


class GrammarRows:
    """Rows whose sampling has a grammar; it ignores all others.

    Used by one thread, and one of its own computes. `begin` starts the masks of a step, `bitmasks`
    waits for them. A grammar is compiled (and at the first row the tokenizer) while the row's
    prompt is computed; what is left of that when the row samples delays the step.
    """

    def __init__(
        self, vocab_size: int, source: VocabularySource | None, *, fast_forward: bool = True
    ) -> None:
        """source: None where the model has no tokenizer: its rows fail by name. fast_forward:
        make draft tokens, too."""
        self._vocab_size = vocab_size
        self._fast_forward = fast_forward
        self._source = source
        self._rows: dict[Slot, _Row] = {}
        self._thread: concurrent.futures.ThreadPoolExecutor | None = None
        self._masks: concurrent.futures.Future[dict[Slot, BitmaskArray]] | None = None
        self._compiler: GrammarCompiler | LoraplexError | None = None

    def add_row(self, row: RowAdded) -> None:
        """A row that joins again brings the output that it had."""
        if row.sampling.grammar is not None:
            joined = self._rows[row.slot] = _Row(row)
            # The steps of its prompt need not wait until its grammar is compiled.
            self._worker().submit(self._make_matcher, joined)

    def remove_row(self, slot: Slot) -> None:
        self._rows.pop(slot, None)

    def begin(self, steps: Sequence[RowStep]) -> None:
        """Fill the masks of the rows that sample in this step, while the caller works."""
        jobs = []
        for step in steps:
            row = self._rows.get(step.slot)
            if row is not None:
                row.learn(step)
                if row.samples(step):
                    jobs.append(_MaskJob(step.slot, row, step.draft_token_ids))
        self._masks = self._start(jobs) if jobs else None

    def bitmasks(self, positions: Sequence[tuple[Slot, tuple[int, ...]]]) -> BitmaskArray:
        """Bitmasks of the step that has begun; see RowGrammars.bitmasks."""
        assert self._masks is not None, "no step has begun that samples a row with a grammar"
        masks = self._masks.result()
        words = bitmask_words(self._vocab_size)
        return np.stack([masks[slot][len(drafts), :words] for slot, drafts in positions])

    def accept(self, slot: Slot, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Accept the row's new tokens. Return draft tokens that may follow them."""
        row = self._rows[slot]
        row.num_known += len(token_ids)
        assert row.matcher is not None, "its masks have been filled"
        row.matcher.accept(token_ids)
        return row.matcher.forced() if self._fast_forward else ()

    def problem(self, slot: Slot) -> ErrorInfo | None:
        """Why nothing may follow; None if that is not the grammar's doing."""
        row = self._rows[slot]
        return row.problem if row.matcher is None else row.matcher.problem

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()

    def _start(
        self, jobs: "Sequence[_MaskJob]"
    ) -> concurrent.futures.Future[dict[Slot, BitmaskArray]]:
        return self._worker().submit(self._fill, jobs)

    def _worker(self) -> concurrent.futures.ThreadPoolExecutor:
        if self._thread is None:
            self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="grammar")
        return self._thread

    def _fill(self, jobs: "Sequence[_MaskJob]") -> dict[Slot, BitmaskArray]:
        words = bitmask_words(self._vocab_size + 1)
        masks = {}
        for job in jobs:
            mask = masks[job.slot] = np.zeros((1 + len(job.drafts), words), dtype=np.int32)
            self._make_matcher(job.row)
            if job.row.matcher is not None:
                job.row.matcher.accept(job.row.take_learnt())
                job.row.matcher.fill(job.drafts, mask)
        return masks

    def _make_matcher(self, row: "_Row") -> None:
        if row.matcher is not None or row.problem is not None:
            return
        try:
            matcher = self._ready_compiler().matcher(row.grammar_text)
            row.matcher = RowMatcher(row.added, matcher, self._vocab_size)
        except LoraplexError as error:
            row.problem = error.to_info()

    def _ready_compiler(self) -> "GrammarCompiler":
        if self._compiler is None:
            # Not at the top: no start of an engine is to wait for llguidance.
            from loraplex.execution.grammar.compiler import GrammarCompiler  # noqa: PLC0415

            try:
                self._compiler = GrammarCompiler(self._vocab_size, self._source)
            except LoraplexError as error:
                self._compiler = error
            except Exception as error:  # whatever a foreign tokenizer raises: not the step's end
                _LOGGER.exception("grammars have no tokenizer")
                self._compiler = InternalError(f"the model's tokens cannot be read: {error}")
        if isinstance(self._compiler, LoraplexError):
            raise self._compiler
        return self._compiler


class _Row:
    def __init__(self, added: RowAdded) -> None:
        self.added = added
        self.matcher: RowMatcher | None = None  # made with the row's first mask
        self.problem: ErrorInfo | None = None  # why it could not be made
        self.num_known = len(added.token_ids)
        self._learnt: list[int] = []

    @property
    def grammar_text(self) -> str:
        grammar = self.added.sampling.grammar
        assert grammar is not None
        assert grammar.kind is GrammarKind.LLGUIDANCE, "admission compiles the others"
        return grammar.text

    def samples(self, step: RowStep) -> bool:
        """Positions with LogitsNeeded.ALL are sampled only after the newest known token."""
        if step.logits is not LogitsNeeded.ALL:
            return step.logits is LogitsNeeded.LAST
        num_known = self.num_known + len(step.draft_token_ids)
        return step.start + step.num_tokens >= num_known

    def learn(self, step: RowStep) -> None:
        """The plan may have chosen tokens for the row (a beam's): its output goes on with them."""
        if step.token_ids is not None:
            new_ids = step.token_ids[max(self.num_known - step.start, 0) :]
            self.num_known += len(new_ids)
            self._learnt.extend(new_ids)

    def take_learnt(self) -> list[int]:
        learnt, self._learnt = self._learnt, []
        return learnt


@dataclasses.dataclass(frozen=True, slots=True)
class _MaskJob:
    slot: Slot
    row: _Row
    drafts: tuple[int, ...]
