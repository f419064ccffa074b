"""The text of one generated sequence, and where it ends."""

from collections.abc import Iterable, Sequence

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
from loraplex.serving.text.shown_tokens import ShownTokens
from loraplex.serving.text.stop_strings import StopStrings
from loraplex.text.tokenizer import Tokenizer


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
        self.is_finished = False

    def push(
        self, delta: SequenceDelta, eos_token_ids: Sequence[int], logits: Sequence[Logits] = ()
    ) -> SequenceOutput:
        """What the delta adds. After a stop string matched, `is_finished` is set.

        Tokens after the one that completed the string are left out, as if they had come one by
        one: how many a step made does not matter.
        """
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
