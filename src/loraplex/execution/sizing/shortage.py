"""A step that is too large for what is left of the device's memory costs a row, not the server."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from loraplex.core.errors import ErrorInfo, RowFailedError
from loraplex.execution.sizing.advice import is_out_of_memory

_T = TypeVar("_T")


class RowsThatFit:
    """Those of one step. First they are tried again with all that can be freed, then the largest
    one gives way, and so on.
    """

    def __init__(
        self, num_tokens: Sequence[int], trim: Callable[[], None], *, is_alone: bool = True
    ) -> None:
        """num_tokens: that each row computes. trim: gives cached memory of the device back.

        is_alone: False for one rank of several, which cannot try again by itself.
        """
        self._num_tokens = num_tokens
        self._is_alone = is_alone
        self._trim = trim
        self._was_tried_again = False
        self.rows = list(range(len(num_tokens)))
        self.lost: dict[int, ErrorInfo] = {}
        """Errors of the other rows."""

    def attempt(self, compute: Callable[[Sequence[int]], _T]) -> _T | None:
        """compute(rows) with as many of the rows as there is memory for; None if there are none."""
        while self.rows:
            try:
                return compute(self.rows)
            except Exception as error:
                if not (self._is_alone and is_out_of_memory(error)):
                    raise
            # Not in the clause: the exception keeps what the step had allocated so far.
            self.give_way()
        return None

    def give_way(self) -> None:
        """There was not enough memory for them."""
        self._trim()
        if not self._was_tried_again:
            self._was_tried_again = True
            return
        largest = max(self.rows, key=self._num_tokens.__getitem__)
        self.rows.remove(largest)
        self.lost[largest] = _out_of_memory(self._num_tokens[largest])


def _out_of_memory(num_tokens: int) -> ErrorInfo:
    return RowFailedError(
        f"the device is out of memory for a step with {num_tokens} tokens of this request: the "
        "server needs a lower max_num_batched_tokens, max_prefill_chunk or kv_cache_fraction; the "
        "request needs less without prompt_logprobs and returned logits"
    ).to_info()
