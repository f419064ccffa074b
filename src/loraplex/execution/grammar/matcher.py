"""One row's place in its grammar: which tokens may come next, and what certainly comes."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from loraplex.core.errors import ErrorInfo, InvalidParameterError
from loraplex.core.plan import RowAdded

if TYPE_CHECKING:
    from llguidance import LLMatcher

BitmaskArray = npt.NDArray[np.int32]

WORD_BITS: Final = 32
_MAX_FORCED: Final = 64
_START_SECONDS: Final = 1.0
"""Processor time that a row's grammar may take at any moment."""
_TOKEN_SECONDS: Final = 0.02
"""Further time per output token: the step's other rows wait for it."""
_SLOW_SECONDS: Final = 0.005
"""Processor time of masks after which the next token may take long, too."""
_MOST_SECONDS: Final = 0.4
"""That one call counts for: a machine that stood still meanwhile shows that as processor time."""


def bitmask_words(vocab_size: int) -> int:
    return -(-vocab_size // WORD_BITS)


class RowMatcher:
    """Follows the output of one sequence.

    Where the grammar may end, the row's end tokens are allowed, and nowhere else. Before
    min_tokens, and with ignore_eos, they are allowed only where nothing else may follow: so a
    complete output always ends. What may come depends only on the grammar and the tokens so far.
    """

    def __init__(self, row: RowAdded, matcher: "LLMatcher", vocab_size: int) -> None:
        """matcher: at the start of the row's grammar; its end-of-text id is `vocab_size`."""
        self.problem: ErrorInfo | None = None
        """Why the row cannot go on."""
        self.is_slow = False
        """Whether the newest masks took long: the next tokens may, too."""
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._end_ids = row.generation.end_token_ids
        self._sampling = row.sampling
        self._num_outputs = 0
        self._is_over = False
        self._seconds = 0.0
        self._note_error()
        self.accept(row.token_ids[row.num_prompt_tokens :])

    def accept(self, token_ids: Sequence[int]) -> None:
        """The sequence goes on with these tokens. What comes after an end token counts no more."""
        if self.is_slow and token_ids and self.problem is None:
            self._rehearse(token_ids)
        start = time.thread_time()
        self._num_outputs += len(token_ids)
        self._accept(token_ids)
        self._pay(start)

    def _accept(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if self._is_over or self.problem is not None:
                return
            if token_id in self._end_ids:
                self._is_over = True
            elif not (token_id < self._vocab_size and self._matcher.consume_token(token_id)):
                reason = first_line(self._matcher.get_error()) or f"token {token_id} is not allowed"
                self.problem = _problem(
                    f"after {self._num_outputs} tokens the model's vocabulary cannot spell what "
                    f"follows ({reason})"
                )

    def _rehearse(self, token_ids: Sequence[int]) -> None:
        """Make these tokens quick to accept, without the interpreter.

        llguidance holds it while it consumes a token, for up to 30 ms after slow masks. Its masks
        after drafts are computed without it, and what they have parsed is not parsed again.
        """
        from llguidance import LLExecutor  # noqa: PLC0415 - see GrammarRows._made_compiler

        num_masks = 1 + len(token_ids)
        unused = np.empty((num_masks, bitmask_words(self._vocab_size + 1)), dtype=np.int32)
        LLExecutor(num_threads=1).unsafe_compute_mask_ptr_with_draft_token(
            [(self._matcher, 0, list(token_ids))], unused.ctypes.data, unused[0].nbytes, num_masks
        )

    def forced(self) -> tuple[int, ...]:
        """Draft tokens: those that llguidance expects next, if only one text is possible."""
        if self._is_over or self.problem is not None:
            return ()
        if self._matcher.is_stopped():
            return self._end_ids[:1]
        token_ids = self._matcher.compute_ff_tokens()[:_MAX_FORCED]
        return tuple(token_ids) if self._vocab_size not in token_ids else ()

    def fill(self, drafts: Sequence[int], masks: BitmaskArray) -> None:
        """Write what may come next, and after each draft if those up to it are accepted.

        masks: [1 + len(drafts), bitmask_words(vocab_size + 1)], zeros. After a draft that is
        itself not allowed they stay zeros: they are not read.
        """
        start = time.thread_time()
        num_consumed = 0
        for index, mask in enumerate(masks):
            self._fill_one(mask, self._num_outputs + index)
            if index == len(drafts) or not self._consume_draft(drafts[index], mask):
                break
            num_consumed += 1
        if num_consumed and not self._matcher.rollback(num_consumed):
            self._note_error()
        self.is_slow = self._pay(start) > _SLOW_SECONDS

    def _pay(self, start: float) -> float:
        """Charge the time since then, and return it. Too much ends the row with its next mask."""
        seconds = time.thread_time() - start
        self._seconds += min(seconds, _MOST_SECONDS)
        allowed = _START_SECONDS + _TOKEN_SECONDS * self._num_outputs
        if self._seconds > allowed and self.problem is None:
            self.problem = _problem(
                f"after {self._num_outputs} tokens that has taken more than {allowed:.1f} s"
            )
        return seconds

    def _fill_one(self, mask: BitmaskArray, num_outputs: int) -> None:
        if self._is_over:
            self._allow_ends(mask)
        if self._is_over or self.problem is not None:
            return
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._matcher.is_error():  # its mask would end the output
            self._note_error()
            mask[:] = 0
            return
        may_end = _bit(mask, self._vocab_size)
        for token_id in (self._vocab_size, *self._end_ids):
            _clear(mask, token_id)
        may_go_on = bool(mask.any())
        holds_back = self._sampling.ignore_eos or num_outputs < self._sampling.min_tokens
        if may_end and not (holds_back and may_go_on):
            self._allow_ends(mask)
        elif not may_go_on:
            self.problem = _problem(
                f"after {num_outputs} tokens no token of the model's vocabulary can follow"
            )

    def _allow_ends(self, mask: BitmaskArray) -> None:
        for token_id in self._end_ids:
            mask[token_id // WORD_BITS] |= _word(token_id)

    def _consume_draft(self, token_id: int, mask: BitmaskArray) -> bool:
        """False where the sequence cannot go on with it, or ends."""
        if token_id in self._end_ids or not 0 <= token_id < self._vocab_size:
            return False
        if not _bit(mask, token_id):
            return False
        return self._matcher.try_consume_tokens([token_id]) == 1

    def _note_error(self) -> None:
        if self.problem is None and self._matcher.is_error():
            self.problem = _problem(first_line(self._matcher.get_error()))


def first_line(message: str) -> str:
    """llguidance's messages have the parser's state after the first line."""
    return message.partition("\n")[0]


def _problem(reason: str) -> ErrorInfo:
    return InvalidParameterError(
        f"the output cannot be kept to its grammar: {reason}", param="grammar"
    ).to_info()


def _word(token_id: int) -> np.int32:
    return np.uint32(1 << token_id % WORD_BITS).view(np.int32)


def _bit(mask: BitmaskArray, token_id: int) -> bool:
    return bool(mask[token_id // WORD_BITS] & _word(token_id))


def _clear(mask: BitmaskArray, token_id: int) -> None:
    mask[token_id // WORD_BITS] &= ~_word(token_id)
