"""Does a sequence end with the token that was just appended?"""

from collections.abc import Sequence as AbstractSequence
from typing import NamedTuple

from loraplex.core.output import FinishReason
from loraplex.core.request import EngineRequest
from loraplex.core.sequence import Sequence


class Stop(NamedTuple):
    reason: FinishReason
    stop_token_id: int | None = None
    """None where a run of tokens or a length ended it."""


class StopRules:
    """End tokens, stop tokens, stop runs and lengths of one request.

    Stop strings are found in serving.
    """

    def __init__(self, request: EngineRequest, max_model_len: int) -> None:
        sampling = request.sampling
        ends = () if sampling.ignore_eos else request.eos_token_ids
        self._stop_token_ids = frozenset((*ends, *sampling.stop_token_ids))
        runs = sampling.stop_token_sequences
        self._runs_of_one = frozenset(run[0] for run in runs if len(run) == 1)
        self._stop_runs = tuple(run for run in runs if len(run) > 1)
        self.grammar_end_ids = request.eos_token_ids if sampling.grammar is not None else ()
        """They come only where the grammar may end, and then they end the sequence: before
        min_tokens, too, and with ignore_eos, because nothing else could follow."""
        self._min_tokens = sampling.min_tokens
        num_prompt_tokens = len(request.prompt_token_ids)
        room = max_model_len - num_prompt_tokens
        self._max_tokens = room if sampling.max_tokens is None else min(sampling.max_tokens, room)

    @property
    def max_tokens(self) -> int:
        """New tokens at most, as the request and the model's length allow."""
        return self._max_tokens

    @property
    def num_stop_tokens(self) -> int:
        """Distinct tokens each of which ends a sequence."""
        return len(self._stop_token_ids | self._runs_of_one)

    @property
    def suppressed_token_ids(self) -> tuple[int, ...]:
        """What must not be sampled while fewer than min_tokens tokens are there."""
        if not self._min_tokens:
            return ()
        return tuple(sorted(self._stop_token_ids.difference(self.grammar_end_ids)))

    def after(self, sequence: Sequence) -> Stop | None:
        """Why the sequence ends with its last token; None: it goes on."""
        return self.after_token_ids(sequence.token_ids, sequence.num_prompt_tokens)

    def after_token_ids(
        self, token_ids: AbstractSequence[int], num_prompt_tokens: int
    ) -> Stop | None:
        """`after`, of tokens that begin with so many of the prompt.

        A stop token counts as an output token, but it is one that may come only after min_tokens
        others. A stop run lies in the output as a whole, and ends it whenever it comes, as a stop
        string does: min_tokens keeps the model from ending, not the client.
        """
        token_id = token_ids[-1]
        num_output_tokens = len(token_ids) - num_prompt_tokens
        if token_id in self.grammar_end_ids:
            return Stop(FinishReason.STOP, token_id)
        if token_id in self._runs_of_one:
            return Stop(FinishReason.STOP, token_id)
        if num_output_tokens > self._min_tokens and token_id in self._stop_token_ids:
            return Stop(FinishReason.STOP, token_id)
        for run in self._stop_runs:
            if len(run) <= num_output_tokens and tuple(token_ids[-len(run) :]) == run:
                return Stop(FinishReason.STOP)
        if num_output_tokens >= self._max_tokens:
            return Stop(FinishReason.LENGTH)
        return None
