"""llgtrt's answers, from those of the room: one object type for all, usage in every chunk."""

import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import UNSET, Struct

from loraplex.core.output import RequestOutput
from loraplex.frontends.openai.dialect import AnswerWriter
from loraplex.frontends.streams import IndexedOutput


class CompatUsage(Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompatAnswer(Struct, frozen=True, kw_only=True):
    """A whole answer or a chunk, of a completion or a chat."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    system_fingerprint: None = None
    choices: list[dict[str, Any]]
    usage: CompatUsage | None
    expanded_prompt: str | None


class CompatWriter:
    """Another writer's answers, told as llgtrt tells them."""

    def __init__(self, writer: AnswerWriter, *, is_chat: bool) -> None:
        self._writer = writer
        self._is_chat = is_chat
        self._id = f"cmpl-{uuid.uuid4()}"

    def headers(self, first: IndexedOutput) -> Mapping[str, str]:
        return self._writer.headers(first)

    def chunks(self, item: IndexedOutput) -> Iterator[CompatAnswer]:
        for chunk in self._writer.chunks(item):
            choices = [self._chunk_choice(choice) for choice in chunk.choices]
            told = [choice for choice in choices if _says_something(choice)]
            if told:
                yield self._answer(chunk, told)

    def last_chunks(self) -> Iterator[CompatAnswer]:
        """None: every chunk had the usage."""
        yield from ()

    def body(self, outputs: Sequence[RequestOutput]) -> CompatAnswer:
        answer = self._writer.body(outputs)
        return self._answer(answer, [self._choice(choice) for choice in answer.choices])

    def _answer(self, answer: Any, choices: list[dict[str, Any]]) -> CompatAnswer:
        usage = answer.usage
        expanded = answer.expanded_prompt
        return CompatAnswer(
            id=self._id,
            created=answer.created,
            model=answer.model,
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
    # OpenAI's `refusal` beside the tokens is not llgtrt's.
    told = None if logprobs is None else {"content": logprobs.content}
    end = choice.finish_reason
    return {"index": choice.index, **said, "logprobs": told, "finish_reason": end}


def _says_something(choice: Mapping[str, Any]) -> bool:
    said = choice.get("text") or choice.get("delta", {}).get("content")
    return bool(said or choice["finish_reason"] or choice["logprobs"])
