"""Which tokens of a sequence are text: not the end token, nor the run of tokens that ended it."""

from collections.abc import Sequence

from loraplex.core.output import FinishReason
from loraplex.serving.text.prefix_matcher import PrefixMatcher


class ShownTokens:
    """Holds back the tokens that may be the beginning of a stop sequence.

    The engine reports when the last token of such a run has ended the sequence (it looks at
    min_tokens, too); only then is it known that the tokens before it are no part of the text.
    """

    def __init__(self, stop_sequences: Sequence[tuple[int, ...]], shows_stop: bool) -> None:
        """shows_stop: what ends a sequence is part of its text."""
        self._shows_stop = shows_stop
        runs = () if shows_stop else stop_sequences
        self._matchers = [PrefixMatcher(run) for run in runs]
        self._held: tuple[int, ...] = ()
        self._num_complete = 0
        """Tokens of the longest stop sequence that ends with the newest token."""

    def push(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """The tokens that may be shown now, while the sequence goes on."""
        tokens = self._take(token_ids)
        num_held = max((matcher.num_matched for matcher in self._matchers), default=0)
        return self._show(tokens, num_held)

    def finish(
        self, token_ids: Sequence[int], reason: FinishReason, stop_token_id: int | None
    ) -> tuple[int, ...]:
        """The rest, without what ended the sequence: the stop token, or else a stop sequence."""
        tokens = self._take(token_ids)
        if self._shows_stop or reason is not FinishReason.STOP:
            return tokens
        return self._show(tokens, 1 if stop_token_id is not None else self._num_complete)

    def _take(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        for token_id in token_ids:
            complete = [m.pattern for m in self._matchers if m.advance(token_id)]
            self._num_complete = max(map(len, complete), default=0)
        return (*self._held, *token_ids)

    def _show(self, tokens: tuple[int, ...], num_held: int) -> tuple[int, ...]:
        num_shown = len(tokens) - num_held
        self._held = tokens[num_shown:]
        return tokens[:num_shown]
