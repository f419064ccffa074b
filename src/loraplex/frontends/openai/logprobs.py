"""Log probabilities in the three shapes that clients know: chat, completions, vLLM's prompts."""

import codecs
from collections.abc import Iterable, Sequence

from loraplex.core.output import TokenLogprob
from loraplex.frontends.openai.responses import (
    ChatLogprobs,
    CompletionLogprobs,
    ContentLogprob,
    LogprobByToken,
    PromptLogprobs,
    RankedLogprob,
    TopLogprob,
)
from loraplex.serving.backend import TextBackend

MIN_LOGPROB = -9999.0
"""JSON has no minus infinity; this is what OpenAI writes for it."""


class TokenTexts:
    """How the tokens of one model are written; `as_ids`: as `token_id:5`, vLLM's way."""

    def __init__(self, backend: TextBackend, model: str, *, as_ids: bool = False) -> None:
        self._backend = backend
        self._model = model
        self._as_ids = as_ids

    def bytes_of(self, token_id: int) -> bytes:
        return self._backend.model(self._model).token_bytes(token_id)

    def name_of(self, token_id: int) -> str:
        """Name in chat's log probabilities."""
        if self._as_ids:
            return f"token_id:{token_id}"
        return self.bytes_of(token_id).decode(errors="replace")

    def legacy_name_of(self, token_id: int) -> str:
        """Name in those of completions: a partial character is `bytes:\\xe2\\x80`."""
        if self._as_ids:
            return self.name_of(token_id)
        raw = self.bytes_of(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def is_special(self, token_id: int) -> bool:
        """Whether the text excludes it by default."""
        with_special = self._backend.model(self._model).detokenize(
            (token_id,), skip_special_tokens=False
        )
        return with_special != "" and self.decode((token_id,)) == ""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self._backend.model(self._model).detokenize(
            token_ids, skip_special_tokens=skip_special_tokens
        )


class CompletionLogprobWriter:
    """Writes the log probabilities of one choice, piece by piece; keeps the text's offset."""

    def __init__(self, texts: TokenTexts, *, skips_special_tokens: bool = True) -> None:
        self._texts = texts
        self._skips_special_tokens = skips_special_tokens
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, tokens: Iterable[tuple[int, TokenLogprob | None]]) -> CompletionLogprobs:
        """The next (token id, log probability); None is for the first token of a prompt."""
        written = CompletionLogprobs([], [], [], [])
        for token_id, logprob in tokens:
            written.tokens.append(self._texts.legacy_name_of(token_id))
            written.token_logprobs.append(None if logprob is None else finite(logprob.logprob))
            written.top_logprobs.append(None if logprob is None else self._top(logprob))
            written.text_offset.append(self._offset)
            self._offset += self._num_chars(token_id)
        return written

    def _num_chars(self, token_id: int) -> int:
        """Characters that the token completes."""
        if self._skips_special_tokens and self._texts.is_special(token_id):
            return 0
        return len(self._decoder.decode(self._texts.bytes_of(token_id)))

    def _top(self, logprob: TokenLogprob) -> LogprobByToken:
        """The most likely tokens and the chosen one; of two with one text, the likelier."""
        top: LogprobByToken = {}
        for token_id, value in (*logprob.top, (logprob.token_id, logprob.logprob)):
            top.setdefault(self._texts.legacy_name_of(token_id), finite(value))
        return top


def chat_logprobs(logprobs: Sequence[TokenLogprob], texts: TokenTexts) -> ChatLogprobs:
    return ChatLogprobs([_content_logprob(logprob, texts) for logprob in logprobs])


def prompt_logprobs(logprobs: Sequence[TokenLogprob | None], texts: TokenTexts) -> PromptLogprobs:
    return [None if logprob is None else _ranked(logprob, texts) for logprob in logprobs]


def _content_logprob(logprob: TokenLogprob, texts: TokenTexts) -> ContentLogprob:
    return ContentLogprob(
        token=texts.name_of(logprob.token_id),
        logprob=finite(logprob.logprob),
        bytes=list(texts.bytes_of(logprob.token_id)),
        top_logprobs=[_top_logprob(t, value, texts) for t, value in logprob.top],
    )


def _top_logprob(token_id: int, logprob: float, texts: TokenTexts) -> TopLogprob:
    return TopLogprob(texts.name_of(token_id), finite(logprob), list(texts.bytes_of(token_id)))


def _ranked(logprob: TokenLogprob, texts: TokenTexts) -> dict[str, RankedLogprob]:
    candidates = [(token_id, value, rank) for rank, (token_id, value) in enumerate(logprob.top, 1)]
    candidates.append((logprob.token_id, logprob.logprob, logprob.rank))
    return {
        str(token_id): RankedLogprob(
            finite(value), rank, texts.bytes_of(token_id).decode(errors="replace")
        )
        for token_id, value, rank in candidates
    }


def finite(logprob: float) -> float:
    """Value that JSON can hold."""
    return max(logprob, MIN_LOGPROB)
