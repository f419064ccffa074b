"""The text of one generated sequence, and where it ends."""

from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

from loraplex.core.output import (
    BeamLogprobs,
    FinishReason,
    Logits,
    SequenceDelta,
    SequenceOutput,
    TokenLogprob,
)
from loraplex.core.sampling_params import SamplingParams
from loraplex.serving.logits_files import first_rows
from loraplex.serving.text.detokenizer import IncrementalDetokenizer
from loraplex.text.tokenizer import Tokenizer

T = TypeVar("T")


class SequenceText:
    """The text of one sequence, and whether and why it has ended."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        shown_ids: Sequence[int] = (),
    ) -> None:
        """shown_ids: special tokens that are text, though the others are skipped."""
        self._detokenizer = IncrementalDetokenizer(
            tokenizer,
            prompt_token_ids,
            skip_special_tokens=sampling.skip_special_tokens,
            shown_ids=shown_ids,
        )
        shows_stop = sampling.include_stop_in_output
        self._shown_tokens = ShownTokens(sampling.stop_token_sequences, shows_stop)
        self._stop_strings = StopStrings(sampling.stop, shows_stop)
        self._has_stop_strings = bool(sampling.stop)
        self._ends_in_text = bool(sampling.stop or sampling.stop_token_sequences)
        """Whether a text or a run of tokens may end it."""
        self.is_finished = False

    def push(
        self, delta: SequenceDelta, eos_token_ids: Sequence[int], logits: Sequence[Logits] = ()
    ) -> SequenceOutput:
        """What the delta adds. After a stop string matched, `is_finished` is set.

        Tokens after the one that completed the string are left out, as if they had come one by
        one: how many a step made does not matter.
        """
        if delta.finish_reason is None and not self._ends_in_text and not logits:
            # Most outputs: nothing is searched in them.
            text = self._detokenizer.push(delta.token_ids)
            return SequenceOutput(
                delta.index,
                text,
                delta.token_ids,
                delta.logprobs,
                None,
                cumulative_logprob=delta.cumulative_logprob,
            )
        text, stop, num_tokens = self._text_of(delta)
        reason = FinishReason.STOP if stop is not None else delta.finish_reason
        self.is_finished = reason is not None
        has_end_token = stop is None and delta.stop_token_id in eos_token_ids
        stop_reason: str | int | None = stop
        if stop is None and not has_end_token:
            stop_reason = delta.stop_token_id
        return SequenceOutput(
            index=delta.index,
            text=text,
            token_ids=delta.token_ids[:num_tokens],
            logprobs=_first(delta.logprobs, num_tokens),
            finish_reason=reason,
            stop_reason=stop_reason,
            logits=first_rows(logits, num_tokens),
            cumulative_logprob=delta.cumulative_logprob,
            has_end_token=has_end_token,
        )

    def _text_of(self, delta: SequenceDelta) -> tuple[str, str | None, int]:
        """(new text, stop string that ended it or None, how many of the tokens count)."""
        texts: list[str] = []
        num_tokens = 0
        for tokens, is_last in self._portions(delta.token_ids):
            num_tokens += len(tokens)
            reason = delta.finish_reason if is_last else None
            text, stop = self._push(tokens, reason, delta.stop_token_id)
            texts.append(text)
            if stop is not None:
                return "".join(texts), stop, num_tokens
        return "".join(texts), None, num_tokens

    def _push(
        self, tokens: tuple[int, ...], reason: FinishReason | None, stop_token_id: int | None
    ) -> tuple[str, str | None]:
        ends = reason is not None
        if reason is None:
            shown = self._shown_tokens.push(tokens)
        else:
            shown = self._shown_tokens.finish(tokens, reason, stop_token_id)
        text = self._detokenizer.push(shown, final=ends)
        return self._stop_strings.push(text, final=ends)

    def _portions(self, token_ids: tuple[int, ...]) -> Iterable[tuple[tuple[int, ...], bool]]:
        """(tokens, whether they are the last): one by one where one may end the text."""
        if not self._has_stop_strings or len(token_ids) < 2:
            return [(token_ids, True)]
        last = len(token_ids) - 1
        return [((token_id,), index == last) for index, token_id in enumerate(token_ids)]


def _first(
    logprobs: tuple[TokenLogprob, ...] | BeamLogprobs, num_tokens: int
) -> tuple[TokenLogprob, ...] | BeamLogprobs:
    if isinstance(logprobs, BeamLogprobs):
        return logprobs.first(num_tokens)
    return logprobs[:num_tokens]


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
        if not self._matchers:
            return tuple(token_ids)
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


class StopStrings:
    """Cuts a text at the stop string that is complete first, however the text is split.

    "First" is as if the text came one character at a time, which is when a generation would have
    been stopped: with stops `abcd` and `bc`, the text `abcd` ends at its `c`. Of stops that end at
    the same character the longest counts. Text is held back only while it may still turn out to
    be the beginning of a stop string.
    """

    def __init__(self, stops: Sequence[str], include_in_output: bool = False) -> None:
        self._matchers = [PrefixMatcher(stop) for stop in stops if stop]
        self._include_in_output = include_in_output
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str, final: bool = False) -> tuple[str, str | None]:
        """(text to give out, stop string that ended it or None).

        After a match nothing more is given out. With `final`, text that was held back is.
        """
        if not self._matchers:
            return text, None
        if self._matched is not None:
            return "", self._matched
        held = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            self._matched = self._advance(char)
            if self._matched is not None:
                self._held = ""
                start = end - len(self._matched)
                return held[: end if self._include_in_output else start], self._matched
        num_held = 0 if final or self._include_in_output else self._num_pending()
        self._held = held[len(held) - num_held :]
        return held[: len(held) - num_held], None

    def _advance(self, char: str) -> str | None:
        matches = [str(m.pattern) for m in self._matchers if m.advance(char)]
        return max(matches, key=len, default=None)

    def _num_pending(self) -> int:
        return max((matcher.num_matched for matcher in self._matchers), default=0)


class PrefixMatcher(Generic[T]):
    """Knuth, Morris and Pratt's search: constant work per item."""

    __slots__ = ("_fallbacks", "num_matched", "pattern")

    def __init__(self, pattern: Sequence[T]) -> None:
        """pattern: not empty."""
        self.pattern = pattern
        self.num_matched = 0
        """Length of the longest beginning of `pattern`, not all of it, that the stream ends
        with."""
        self._fallbacks = _fallbacks(pattern)

    def advance(self, item: T) -> bool:
        """Whether `pattern` is complete with this item."""
        state = _next_state(self.pattern, self._fallbacks, self.num_matched, item)
        is_complete = state == len(self.pattern)
        self.num_matched = self._fallbacks[-1] if is_complete else state
        return is_complete


def _fallbacks(pattern: Sequence[T]) -> list[int]:
    """Return for each length n >= 1, at n - 1, the longest beginning that also ends pattern[:n]."""
    table = [0]
    for item in pattern[1:]:
        table.append(_next_state(pattern, table, table[-1], item))
    return table


def _next_state(pattern: Sequence[T], fallbacks: Sequence[int], num_matched: int, item: T) -> int:
    while num_matched and pattern[num_matched] != item:
        num_matched = fallbacks[num_matched - 1]
    return num_matched + 1 if pattern[num_matched] == item else 0
