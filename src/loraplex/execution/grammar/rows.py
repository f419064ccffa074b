"""The grammars of the rows: matchers, and masks that are filled while the model computes."""

import concurrent.futures
import contextlib
import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from loraplex.core.errors import ErrorInfo, InternalError, LoraplexError
from loraplex.core.fair_thread_pool import FairThreadPool
from loraplex.core.grammar import GrammarKind
from loraplex.core.plan import RowAdded, RowStep, Slot, Wanted
from loraplex.execution.grammar.compiler import VocabularySource
from loraplex.execution.grammar.matcher import BitmaskArray, RowMatcher, bitmask_words

if TYPE_CHECKING:
    from loraplex.execution.grammar.compiler import GrammarCompiler

_LOGGER = logging.getLogger(__name__)


_WAIT_SECONDS: Final = 0.005
"""Time that a step waits for new masks after its logits are there. Most masks take less than a
millisecond; a new grammar takes up to half a second, and its masks may, too."""


class GrammarRows:
    """Rows whose sampling has a grammar; it ignores all others.

    Used by one thread. `begin` starts the masks of a step, `unready` and `bitmasks` wait for them.
    Some threads compile grammars (and at the first row the tokenizer) and fill the first masks of
    their rows, others fill all other masks: a long compilation delays no mask of another row.
    Tenants take turns in both. One has a thread at most, in which its tasks run in order, and there
    is one more for the others.
    """

    def __init__(
        self,
        vocab_size: int,
        source: VocabularySource | None,
        *,
        fast_forward: bool = True,
        defers: bool = True,
    ) -> None:
        """source: None where the model has no tokenizer: its rows fail by name. fast_forward:
        make draft tokens, too. defers: False waits for every mask, so that all ranks sample the
        same rows in a step."""
        self._vocab_size = vocab_size
        self._fast_forward = fast_forward
        self._wait_seconds = _WAIT_SECONDS if defers else None
        self._source = source
        self._rows: dict[Slot, _GrammarRow] = {}
        self._compiling = FairThreadPool(2, 1, "grammar")
        self._filling = FairThreadPool(2, 1, "masks")
        self._making_compiler = threading.Lock()
        self._compiler: GrammarCompiler | LoraplexError | None = None

    def add_row(self, row: RowAdded) -> None:
        """A row that joins again brings the output that it had."""
        if row.sampling.grammar is not None:
            joined = self._rows[row.slot] = _GrammarRow(row)
            # The steps of its prompt need not wait until its grammar is compiled.
            self._compiling.submit_for(row.tenant, self._make_matcher, joined)

    def remove_row(self, slot: Slot) -> None:
        row = self._rows.pop(slot, None)
        if row is not None:
            row.is_removed = True

    def begin(self, steps: Sequence[RowStep]) -> None:
        """Fill the masks of the rows that sample in this step, while the caller works."""
        for step in steps:
            row = self._rows.get(step.slot)
            if row is not None:
                row.learn(step)
                if row.samples(step):
                    self._begin(row, step.draft_token_ids)

    def unready(self, slots: Iterable[Slot], *, has_others: bool) -> frozenset[Slot]:
        """Wait for the masks of these rows, not for long; see RowGrammars.unready.

        Only masks that no earlier step has waited for delay other rows.
        """
        masks = {slot: self._masks(slot) for slot in slots}
        new = [future for slot, future in masks.items() if not self._rows[slot].is_late]
        if self._wait_seconds is None:
            concurrent.futures.wait(masks.values())
        elif new:
            concurrent.futures.wait(new, self._wait_seconds)
        elif not has_others:
            first = concurrent.futures.FIRST_COMPLETED
            concurrent.futures.wait(masks.values(), self._wait_seconds, first)
        for slot, future in masks.items():
            self._rows[slot].is_late = not future.done()
        return frozenset(slot for slot in masks if self._rows[slot].is_late)

    def bitmasks(self, positions: Sequence[tuple[Slot, tuple[int, ...]]]) -> BitmaskArray:
        """Bitmasks of the step that has begun; see RowGrammars.bitmasks."""
        words = bitmask_words(self._vocab_size)
        return np.stack(
            [self._masks(slot).result()[len(drafts), :words] for slot, drafts in positions]
        )

    def accept(self, slot: Slot, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Accept the row's new tokens. Return draft tokens that may follow them."""
        row = self._rows[slot]
        row.num_known += len(token_ids)
        row.masks = None
        assert row.matcher is not None, "its masks have been filled"
        if row.matcher.is_slow:
            row.learnt.extend(token_ids)  # its thread accepts them ahead of the next masks
            return ()
        forced: tuple[int, ...] = ()
        with row.failing_alone():
            row.matcher.accept(token_ids)
            if self._fast_forward:
                forced = row.matcher.forced()
        return forced

    def problem(self, slot: Slot) -> ErrorInfo | None:
        """Why nothing may follow; None if that is not the grammar's doing."""
        row = self._rows[slot]
        return row.problem or (None if row.matcher is None else row.matcher.problem)

    def close(self) -> None:
        for row in self._rows.values():
            row.is_removed = True
        self._compiling.shutdown()
        self._filling.shutdown()

    def _begin(self, row: "_GrammarRow", drafts: tuple[int, ...]) -> None:
        learnt, row.learnt = row.learnt, []
        if row.masks is not None and row.drafts == drafts and not learnt:
            return  # those of an earlier step in which the row was not sampled
        has_compiled = row.matcher is not None or row.problem is not None
        thread = self._filling if has_compiled else self._compiling
        if row.masks is not None and not row.masks.done():
            thread = row.thread  # one thread at a time uses a matcher
        row.drafts, row.thread, row.is_late = drafts, thread, False
        row.masks = thread.submit_for(row.added.tenant, self._fill, row, drafts, learnt)

    def _masks(self, slot: Slot) -> concurrent.futures.Future[BitmaskArray]:
        masks = self._rows[slot].masks
        assert masks is not None, "no step has begun that samples this row"
        return masks

    def _fill(
        self, row: "_GrammarRow", drafts: Sequence[int], learnt: Sequence[int]
    ) -> BitmaskArray:
        masks = np.zeros((1 + len(drafts), bitmask_words(self._vocab_size + 1)), dtype=np.int32)
        self._make_matcher(row)
        if row.matcher is not None and row.problem is None and not row.is_removed:
            with row.failing_alone():
                row.matcher.accept(learnt)
                row.matcher.fill(drafts, masks)
        if row.problem is not None:
            masks[:] = 0
        return masks

    def _make_matcher(self, row: "_GrammarRow") -> None:
        if row.matcher is not None or row.problem is not None or row.is_removed:
            return
        with row.failing_alone():
            matcher = self._ready_compiler().matcher(row.grammar_text)
            row.matcher = RowMatcher(row.added, matcher, self._vocab_size)

    def _ready_compiler(self) -> "GrammarCompiler":
        with self._making_compiler:
            if self._compiler is None:
                self._compiler = self._made_compiler()
        if isinstance(self._compiler, LoraplexError):
            raise self._compiler
        return self._compiler

    def _made_compiler(self) -> "GrammarCompiler | LoraplexError":
        # Not at the top: no start of an engine is to wait for llguidance.
        from loraplex.execution.grammar.compiler import GrammarCompiler  # noqa: PLC0415

        try:
            return GrammarCompiler(self._vocab_size, self._source)
        except LoraplexError as error:
            return error
        except Exception as error:  # whatever a foreign tokenizer raises: not the step's end
            _LOGGER.exception("grammars have no tokenizer")
            return InternalError(f"the model's tokens cannot be read: {error}")


class _GrammarRow:
    def __init__(self, added: RowAdded) -> None:
        self.added = added
        self.matcher: RowMatcher | None = None  # made by the thread that compiles
        self.problem: ErrorInfo | None = None  # why it could not be made, or failed
        self.num_known = len(added.token_ids)
        self.masks: concurrent.futures.Future[BitmaskArray] | None = None
        """Masks of its next token and after each of `drafts`."""
        self.drafts: tuple[int, ...] = ()
        self.thread: FairThreadPool
        """Executor of `masks`."""
        self.is_late = False
        """Whether a step has waited for `masks` in vain."""
        self.is_removed = False
        self.learnt: list[int] = []
        """Tokens that the matcher has not accepted yet."""

    @contextlib.contextmanager
    def failing_alone(self) -> Iterator[None]:
        """Make of any error in the context a problem of this row: the step has others.

        A panic of llguidance's Rust is a BaseException.
        """
        try:
            yield
        except LoraplexError as error:
            self.problem = error.to_info()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:
            _LOGGER.exception("the grammar of a row failed")
            self.problem = InternalError(
                "the output's grammar failed in the engine; the server's log has the cause"
            ).to_info()

    @property
    def grammar_text(self) -> str:
        grammar = self.added.sampling.grammar
        assert grammar is not None
        assert grammar.kind is GrammarKind.LLGUIDANCE, "admission compiles the others"
        return grammar.text

    def samples(self, step: RowStep) -> bool:
        """Positions with Wanted.ALL are sampled only after the newest known token."""
        if step.wanted is not Wanted.ALL:
            return step.wanted is Wanted.LAST
        num_known = self.num_known + len(step.draft_token_ids)
        return step.start + step.num_tokens >= num_known

    def learn(self, step: RowStep) -> None:
        """The plan may have chosen tokens for the row (a beam's): its output goes on with them."""
        if step.token_ids is not None:
            new_ids = step.token_ids[max(self.num_known - step.start, 0) :]
            self.num_known += len(new_ids)
            self.learnt.extend(new_ids)
