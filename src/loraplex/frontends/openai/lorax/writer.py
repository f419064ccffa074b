"""Writer of LoRAX's responses from RequestOutputs, whole or token by token."""

from collections.abc import Iterator, Mapping

from msgspec import UNSET

from loraplex.core.output import FinishReason, RequestOutput, SequenceOutput, TokenLogprob
from loraplex.frontends.long_json import LongList
from loraplex.frontends.openai.logprobs import TokenTexts, finite
from loraplex.frontends.openai.lorax.schema import (
    AlternativeToken,
    Details,
    Generated,
    PrefillToken,
    StreamDetails,
    StreamedToken,
    Token,
)
from loraplex.frontends.openai.writers import adapter_headers
from loraplex.frontends.streams import IndexedOutput


class LoraxWriter:
    """Writer of one call; tokens have their log probabilities if they are shown."""

    def __init__(
        self, texts: TokenTexts, *, text_before: str, seed: int | None, num_alternatives: int
    ) -> None:
        """text_before: start of the output; num_alternatives: likely tokens at each position."""
        self._texts = texts
        self._text = text_before
        self._seed = seed
        self._num_alternatives = num_alternatives

    def whole(self, output: RequestOutput, *, with_details: bool) -> Generated:
        [sequence] = output.sequences
        text = self._text + sequence.text
        return Generated(text, self._details(output, sequence) if with_details else UNSET)

    def headers(self, first: IndexedOutput) -> Mapping[str, str]:
        return adapter_headers(first[1])

    def chunks(self, item: IndexedOutput) -> Iterator[StreamedToken]:
        """One event for each token; the text of several comes with their last."""
        _, output = item
        for sequence in output.sequences:
            self._text += sequence.text
            yield from self._tokens(output, sequence)

    def _tokens(self, output: RequestOutput, sequence: SequenceOutput) -> Iterator[StreamedToken]:
        *before, last = sequence.logprobs
        for logprob in before:
            is_special = self._texts.is_special(logprob.token_id)
            yield StreamedToken(self._token(logprob, "", is_special=is_special))
        # Clients leave out the text of special tokens: one that brings text of others is none.
        is_special = not sequence.text and self._texts.is_special(last.token_id)
        token = self._token(last, sequence.text, is_special=is_special)
        if sequence.finish_reason is None:
            yield StreamedToken(token)
        else:
            yield StreamedToken(token, self._text, self._stream_details(output, sequence))

    def last_chunks(self) -> Iterator[StreamedToken]:
        return iter(())

    def _details(self, output: RequestOutput, sequence: SequenceOutput) -> Details:
        return Details(
            finish_reason=_finish_reason(sequence),
            prompt_tokens=len(output.prompt_token_ids),
            generated_tokens=output.num_output_tokens,
            seed=self._seed,
            prefill=LongList(
                list(zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=False)),
                self._prefill,
            ),
            tokens=LongList(sequence.logprobs, self._whole_token),
        )

    def _stream_details(self, output: RequestOutput, sequence: SequenceOutput) -> StreamDetails:
        return StreamDetails(
            finish_reason=_finish_reason(sequence),
            prompt_tokens=len(output.prompt_token_ids),
            generated_tokens=output.num_output_tokens,
            seed=self._seed,
        )

    def _whole_token(self, logprob: TokenLogprob) -> Token:
        token_id = logprob.token_id
        is_special = self._texts.is_special(token_id)
        return self._token(logprob, self._texts.name_of(token_id), is_special=is_special)

    def _prefill(self, position: tuple[int, TokenLogprob | None]) -> PrefillToken:
        token_id, logprob = position
        value = None if logprob is None else finite(logprob.logprob)
        return PrefillToken(token_id, self._texts.name_of(token_id), value)

    def _token(self, logprob: TokenLogprob, text: str, *, is_special: bool) -> Token:
        alternatives = [
            AlternativeToken(token_id, self._texts.name_of(token_id), finite(value))
            for token_id, value in logprob.top[: self._num_alternatives]
        ]
        return Token(
            id=logprob.token_id,
            text=text,
            logprob=finite(logprob.logprob),
            special=is_special,
            alternative_tokens=alternatives if self._num_alternatives else UNSET,
        )


def _finish_reason(sequence: SequenceOutput) -> str:
    if sequence.finish_reason is FinishReason.LENGTH:
        return "length"
    return "stop_sequence" if isinstance(sequence.stop_reason, str) else "eos_token"
