"""Tokens of the content of an output that also has reasoning and calls."""

from collections.abc import Iterator, Sequence

from loraplex.core.output import TokenLogprob
from loraplex.frontends.openai.logprobs import TokenTexts, chat_logprobs
from loraplex.frontends.openai.responses import ContentLogprob
from loraplex.serving.text.completion_reader import CompletionDelta


class ContentLogprobs:
    """Keeps log probabilities until it is known what their tokens belong to."""

    def __init__(self, texts: TokenTexts, *, is_all_content: bool) -> None:
        """is_all_content: the output is not split."""
        self._texts = texts
        self._is_all_content = is_all_content
        self._waiting: list[TokenLogprob] = []

    def of(self, delta: CompletionDelta, news: Sequence[TokenLogprob]) -> list[ContentLogprob]:
        """Those of delta's content; news: of the tokens that came with it."""
        self._waiting.extend(news)
        if self._is_all_content:
            chosen = self._waiting if delta.content else []
        else:
            chosen = list(self._making(delta.content))
        if delta.content or delta.reasoning or delta.calls:
            self._waiting = []
        return list(chat_logprobs(chosen, self._texts).content)

    def _making(self, content: str) -> Iterator[TokenLogprob]:
        """The tokens that overlap with the last place where the content stands."""
        tokens = [self._texts.bytes_of(logprob.token_id) for logprob in self._waiting]
        start = b"".join(tokens).rfind(content.encode()) if content else -1
        end, at = start + len(content.encode()), 0
        for logprob, token in zip(self._waiting, tokens, strict=True):
            if start >= 0 and at < end and at + len(token) > start:
                yield logprob
            at += len(token)
