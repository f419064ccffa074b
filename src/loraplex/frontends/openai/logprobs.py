"""Log probabilities in the three shapes that clients know: chat, completions, vLLM's prompts."""

import codecs
import functools
from collections.abc import Callable, Iterable, Sequence

from loraplex.core.output import TokenLogprob
from loraplex.frontends.long_json import LongList
from loraplex.frontends.openai.responses import (
    ChatLogprobs,
    CompletionLogprobs,
    ContentLogprob,
    LogprobByToken,
    PromptLogprobs,
    RankedLogprob,
    TopLogprob,
)
from loraplex.serving.backend import TextBackend, TextModel

MIN_LOGPROB = -9999.0
"""JSON has no minus infinity; this is what OpenAI writes for it."""
NUM_SIMPLE = 4096
"""Numbers or short texts that are encoded at a time."""


class TokenTexts:
    """How the tokens of one model are written; `as_ids`: as `token_id:5`, vLLM's way.

    It belongs to one response, in which the same few tokens come again and again: each is looked
    up once.
    """

    def __init__(self, backend: TextBackend, model: str, *, as_ids: bool = False) -> None:
        self._model = backend.model(model)
        # No bound methods: a cache of them would refer back to this object.
        self.bytes_of = bytes_of = functools.cache(self._model.token_bytes)
        """Exact bytes of a token."""
        self.text_of = functools.cache(lambda token_id: bytes_of(token_id).decode(errors="replace"))
        """Text of a token; half a character becomes U+FFFD."""
        self.name_of = _name_by_id if as_ids else self.text_of
        """Name in chat's log probabilities."""
        self.legacy_name_of = (
            _name_by_id if as_ids else functools.cache(functools.partial(_legacy_name, bytes_of))
        )
        """Name in the log probabilities of completions: half a character is `bytes:\\xe2\\x80`."""
        self.is_special = functools.cache(functools.partial(_is_special, self._model))
        """Whether the text excludes a token by default."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self._model.detokenize(token_ids, skip_special_tokens=skip_special_tokens)


def _name_by_id(token_id: int) -> str:
    return f"token_id:{token_id}"


def _legacy_name(bytes_of: Callable[[int], bytes], token_id: int) -> str:
    raw = bytes_of(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _is_special(model: TextModel, token_id: int) -> bool:
    text = model.detokenize((token_id,), skip_special_tokens=True)
    return text == "" != model.detokenize((token_id,), skip_special_tokens=False)


class CompletionLogprobWriter:
    """Writes the log probabilities of one choice, piece by piece; keeps the text's offset."""

    def __init__(self, texts: TokenTexts, *, skips_special_tokens: bool = True) -> None:
        self._texts = texts
        self._skips_special_tokens = skips_special_tokens
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, tokens: Iterable[tuple[int, TokenLogprob | None]]) -> CompletionLogprobs:
        """The next (token id, log probability); None is for the first token of a prompt."""
        tokens = list(tokens)
        names = [self._texts.legacy_name_of(token_id) for token_id, _ in tokens]
        offsets = []
        for token_id, _ in tokens:
            offsets.append(self._offset)
            self._offset += self._num_chars(token_id)
        logprobs = [logprob for _, logprob in tokens]
        return CompletionLogprobs(
            tokens=LongList(names, piece_length=NUM_SIMPLE),
            token_logprobs=LongList(logprobs, _value_of, piece_length=NUM_SIMPLE),
            top_logprobs=LongList(logprobs, self._top),
            text_offset=LongList(offsets, piece_length=NUM_SIMPLE),
        )

    def _num_chars(self, token_id: int) -> int:
        """Characters that the token completes."""
        if self._skips_special_tokens and self._texts.is_special(token_id):
            return 0
        return len(self._decoder.decode(self._texts.bytes_of(token_id)))

    def _top(self, logprob: TokenLogprob | None) -> LogprobByToken | None:
        """The most likely tokens and the chosen one; of two with one text, the likelier."""
        if logprob is None:
            return None
        top: LogprobByToken = {}
        for token_id, value in (*logprob.top, (logprob.token_id, logprob.logprob)):
            top.setdefault(self._texts.legacy_name_of(token_id), finite(value))
        return top


def _value_of(logprob: TokenLogprob | None) -> float | None:
    return None if logprob is None else finite(logprob.logprob)


def chat_logprobs(logprobs: Sequence[TokenLogprob], texts: TokenTexts) -> ChatLogprobs:
    return ChatLogprobs(LongList(logprobs, functools.partial(_content_logprob, texts=texts)))


def prompt_logprobs(logprobs: Sequence[TokenLogprob | None], texts: TokenTexts) -> PromptLogprobs:
    return LongList(logprobs, functools.partial(_ranked, texts=texts))


def _content_logprob(logprob: TokenLogprob, texts: TokenTexts) -> ContentLogprob:
    return ContentLogprob(
        token=texts.name_of(logprob.token_id),
        logprob=finite(logprob.logprob),
        bytes=list(texts.bytes_of(logprob.token_id)),
        top_logprobs=[_top_logprob(t, value, texts) for t, value in logprob.top],
    )


def _top_logprob(token_id: int, logprob: float, texts: TokenTexts) -> TopLogprob:
    return TopLogprob(texts.name_of(token_id), finite(logprob), list(texts.bytes_of(token_id)))


def _ranked(logprob: TokenLogprob | None, texts: TokenTexts) -> dict[str, RankedLogprob] | None:
    if logprob is None:
        return None
    candidates = [(token_id, value, rank) for rank, (token_id, value) in enumerate(logprob.top, 1)]
    candidates.append((logprob.token_id, logprob.logprob, logprob.rank))
    return {
        str(token_id): RankedLogprob(finite(value), rank, texts.text_of(token_id))
        for token_id, value, rank in candidates
    }


def finite(logprob: float) -> float:
    """Value that JSON can hold."""
    return max(logprob, MIN_LOGPROB)
