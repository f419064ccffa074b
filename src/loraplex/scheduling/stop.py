"""Does a sequence end with the token that was just appended?"""

from typing import NamedTuple

from loraplex.core.output import FinishReason
from loraplex.core.request import EngineRequest
from loraplex.core.sequence import Sequence


class Stop(NamedTuple):
    reason: FinishReason
    stop_token_id: int | None = None


class StopRules:
    """End tokens, stop tokens and lengths of one request. Stop strings are found in serving."""

    def __init__(self, request: EngineRequest, max_model_len: int) -> None:
        sampling = request.sampling
        ends = () if sampling.ignore_eos else request.eos_token_ids
        self._stop_token_ids = frozenset((*ends, *sampling.stop_token_ids))
        self._min_tokens = sampling.min_tokens
        num_prompt_tokens = len(request.prompt_token_ids)
        room = max_model_len - num_prompt_tokens
        self._max_tokens = room if sampling.max_tokens is None else min(sampling.max_tokens, room)

    @property
    def max_tokens(self) -> int:
        """New tokens at most, as the request and the model's length allow."""
        return self._max_tokens

    @property
    def suppressed_token_ids(self) -> tuple[int, ...]:
        """What must not be sampled while fewer than min_tokens tokens are there."""
        return tuple(sorted(self._stop_token_ids)) if self._min_tokens else ()

    def after(self, sequence: Sequence) -> Stop | None:
        """Why the sequence ends with its last token; None: it goes on.

        A stop token counts as an output token, but it is one that may come only after min_tokens
        others.
        """
        token_id = sequence.token_ids[-1]
        num_output_tokens = sequence.num_output_tokens
        if token_id in self._stop_token_ids and num_output_tokens > self._min_tokens:
            return Stop(FinishReason.STOP, token_id)
        if num_output_tokens >= self._max_tokens:
            return Stop(FinishReason.LENGTH)
        return None
