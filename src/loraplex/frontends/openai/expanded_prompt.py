"""llgtrt's return_expanded_prompt: the text of the prompt's tokens, in the response."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from loraplex.core.output import RequestOutput
from loraplex.frontends.openai.logprobs import TokenTexts
from loraplex.frontends.streams import IndexedOutput


class ResponseWriter(Protocol):
    """Writer of the response to one call: whole, or chunk by chunk."""

    def headers(self, first: IndexedOutput) -> Mapping[str, str]: ...

    def chunks(self, item: IndexedOutput) -> Iterable[Any]: ...

    def last_chunks(self) -> Iterable[Any]: ...

    def body(self, outputs: Sequence[RequestOutput]) -> Any:
        """A msgspec.Struct, as the chunks are."""
        ...


class ExpandedPromptWriter:
    """Another writer's responses with `expanded_prompt`: in a stream, in the first chunk.

    It is the first prompt's if there are several.
    """

    def __init__(self, writer: ResponseWriter, texts: TokenTexts) -> None:
        self._writer = writer
        self._texts = texts
        self._is_sent = False

    def headers(self, first: IndexedOutput) -> Mapping[str, str]:
        return self._writer.headers(first)

    def chunks(self, item: IndexedOutput) -> Iterator[Any]:
        for chunk in self._writer.chunks(item):
            yield chunk if self._is_sent else self._with_prompt(chunk, item[1])
            self._is_sent = True

    def last_chunks(self) -> Iterator[Any]:
        yield from self._writer.last_chunks()

    def body(self, outputs: Sequence[RequestOutput]) -> Any:
        return self._with_prompt(self._writer.body(outputs), outputs[0])

    def _with_prompt(self, response: Any, output: RequestOutput) -> Any:
        text = self._texts.decode(output.prompt_token_ids, skip_special_tokens=False)
        return msgspec.structs.replace(response, expanded_prompt=text)
