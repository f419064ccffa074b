"""Conditions under which a sequence ends with the token that was just appended."""

from collections.abc import Sequence
from typing import NamedTuple

from loraplex.core.output import FinishReason
from loraplex.core.request import EngineRequest


class Stop(NamedTuple):
    """The end of a sequence."""

    reason: FinishReason
    stop_token_id: int | None = None
    """None if a token sequence or a length ended it."""


class StopRules:
    """End tokens, stop tokens, stop token sequences and length limits of one request.

    Serving finds stop strings.
    """

    def __init__(self, request: EngineRequest, max_model_len: int) -> None:
        sampling = request.sampling
        ends = () if sampling.ignore_eos else request.eos_token_ids
        self._stop_token_ids = frozenset((*ends, *sampling.stop_token_ids))
        runs = sampling.stop_token_sequences
        self._runs_of_one = frozenset(run[0] for run in runs if len(run) == 1)
        self._stop_runs = tuple(run for run in runs if len(run) > 1)
        self.grammar_end_ids = request.eos_token_ids if sampling.grammar is not None else ()
        """End tokens that come only where the grammar may end. They end the sequence even before
        min_tokens and with ignore_eos, because nothing else could follow."""
        self._min_tokens = sampling.min_tokens
        num_left = max_model_len - len(request.prompt_token_ids)
        self.max_tokens = (
            num_left if sampling.max_tokens is None else min(sampling.max_tokens, num_left)
        )
        """Maximum number of new tokens, by the request and the model's length."""

    @property
    def num_stop_tokens(self) -> int:
        """Number of distinct tokens each of which ends a sequence."""
        return len(self._stop_token_ids | self._runs_of_one)

    @property
    def suppressed_token_ids(self) -> tuple[int, ...]:
        """Tokens that must not be sampled before there are min_tokens tokens."""
        if not self._min_tokens:
            return ()
        return tuple(sorted(self._stop_token_ids.difference(self.grammar_end_ids)))

    def after(self, token_ids: Sequence[int], num_prompt_tokens: int) -> Stop | None:
        """Return why a sequence ends with its last token; None if it continues.

        A stop token counts as an output token, but it may come only after min_tokens others. A
        stop token sequence lies entirely in the output, and ends it whenever it comes, as a stop
        string does: min_tokens restricts the model, not the client.
        """
        token_id = token_ids[-1]
        num_output_tokens = len(token_ids) - num_prompt_tokens
        if token_id in self.grammar_end_ids or token_id in self._runs_of_one:
            return Stop(FinishReason.STOP, token_id)
        if num_output_tokens > self._min_tokens and token_id in self._stop_token_ids:
            return Stop(FinishReason.STOP, token_id)
        for run in self._stop_runs:
            if len(run) <= num_output_tokens and tuple(token_ids[-len(run) :]) == run:
                return Stop(FinishReason.STOP)
        if num_output_tokens >= self.max_tokens:
            return Stop(FinishReason.LENGTH)
        return None
