"""llgtrt's responses, from OpenAI's: one object type for all, usage in every chunk."""

import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import UNSET, Struct

from loraplex.core.output import RequestOutput
from loraplex.frontends.openai.expanded_prompt import ResponseWriter
from loraplex.frontends.streams import IndexedOutput


class CompatUsage(Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompatResponse(Struct, frozen=True, kw_only=True):
    """A whole response or a chunk, of a completion or a chat."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    system_fingerprint: None = None
    choices: list[dict[str, Any]]
    usage: CompatUsage | None
    expanded_prompt: str | None


class CompatWriter:
    """Another writer's responses in llgtrt's form."""

    def __init__(self, writer: ResponseWriter, *, is_chat: bool) -> None:
        self._writer = writer
        self._is_chat = is_chat
        self._id = f"cmpl-{uuid.uuid4()}"

    def headers(self, first: IndexedOutput) -> Mapping[str, str]:
        return self._writer.headers(first)

    def chunks(self, item: IndexedOutput) -> Iterator[CompatResponse]:
        for chunk in self._writer.chunks(item):
            choices = [self._chunk_choice(choice) for choice in chunk.choices]
            sent = [choice for choice in choices if _has_content(choice)]
            if sent:
                yield self._response(chunk, sent)

    def last_chunks(self) -> Iterator[CompatResponse]:
        """None: every chunk had the usage."""
        yield from ()

    def body(self, outputs: Sequence[RequestOutput]) -> CompatResponse:
        response = self._writer.body(outputs)
        return self._response(response, [self._choice(choice) for choice in response.choices])

    def _response(self, response: Any, choices: list[dict[str, Any]]) -> CompatResponse:
        usage = response.usage
        expanded = response.expanded_prompt
        return CompatResponse(
            id=self._id,
            created=response.created,
            model=response.model,
            choices=choices,
            usage=CompatUsage(usage.prompt_tokens, usage.completion_tokens, usage.total_tokens)
            if usage
            else None,
            expanded_prompt=None if expanded is UNSET else expanded,
        )

    def _choice(self, choice: Any) -> dict[str, Any]:
        said = (
            {"message": {"role": "assistant", "content": choice.message.content}}
            if self._is_chat
            else {"text": choice.text}
        )
        return _with_end(choice, said, choice.logprobs)

    def _chunk_choice(self, choice: Any) -> dict[str, Any]:
        if not self._is_chat:
            return self._choice(choice)
        content = choice.delta.content
        text = "" if content is UNSET or content is None else content
        return _with_end(choice, {"delta": {"role": "assistant", "content": text}}, choice.logprobs)


def _with_end(choice: Any, said: Mapping[str, Any], logprobs: Any) -> dict[str, Any]:
    # OpenAI's `refusal` next to the tokens is not llgtrt's.
    shown = None if logprobs is None else {"content": logprobs.content}
    end = choice.finish_reason
    return {"index": choice.index, **said, "logprobs": shown, "finish_reason": end}


def _has_content(choice: Mapping[str, Any]) -> bool:
    said = choice.get("text") or choice.get("delta", {}).get("content")
    return bool(said or choice["finish_reason"] or choice["logprobs"])
