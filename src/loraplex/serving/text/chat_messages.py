"""Checks the messages of a conversation and brings them into the form that templates expect.

The form is the one of transformers: text content as one string (or as parts, for a template that
loops over them), keys without a value left out, the arguments of tool calls as objects. Roles and
fields are those of the OpenAI chat schema.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from loraplex.core.errors import InvalidRequestError
from loraplex.serving.text.content_format import ContentFormat

ROLES = ("system", "developer", "user", "assistant", "tool")

PART_SEPARATOR = "\n"
"""Separator of the text parts of one message, as in vLLM."""

_ONE_TEXT = ContentFormat()

_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


def normalize_messages(
    messages: Sequence[Mapping[str, Any]], content: ContentFormat = _ONE_TEXT
) -> list[dict[str, Any]]:
    """Fresh messages for a template; the given ones are not changed.

    Raises InvalidRequestError, whose text and `param` name the message and the field.
    """
    if not isinstance(messages, list | tuple):
        raise InvalidRequestError("messages must be a list of messages", param="messages")
    if not messages:
        raise InvalidRequestError("messages is empty: at least one is needed", param="messages")
    return [_normalize(message, index, content) for index, message in enumerate(messages)]


def _normalize(message: Any, index: int, content: ContentFormat) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise _invalid(where, f"must be an object, not {_kind(message)}")
    normal = {key: value for key, value in message.items() if value is not None}
    role = normal.get("role")
    if role not in ROLES:
        problem = "is missing" if role is None else f"is {role!r}"
        raise _invalid(f"{where}.role", f"{problem}; it must be one of {', '.join(ROLES)}")
    if "tool_calls" in normal:
        calls = _tool_calls(normal.pop("tool_calls"), f"{where}.tool_calls")
        # Templates look whether the key is there: clients send an empty list for no calls.
        if calls:
            normal["tool_calls"] = calls
    if "content" in normal:
        normal["content"] = _content(normal["content"], f"{where}.content", content)
    elif role != "assistant" or "tool_calls" not in normal:
        raise _invalid(
            f"{where}.content",
            "is missing; only an assistant message with tool_calls may have none",
        )
    return _with_reasoning(normal)


def _content(content: Any, where: str, form: ContentFormat) -> str | list[dict[str, str]]:
    if not isinstance(content, str | list | tuple):
        raise _invalid(where, f"must be a string or a list of parts, not {_kind(content)}")
    if isinstance(content, str):
        return [_text_part(content)] if form.only_parts else content
    texts = [_part_text(part, f"{where}[{index}]") for index, part in enumerate(content)]
    return [_text_part(text) for text in texts] if form.takes_parts else PART_SEPARATOR.join(texts)


def _text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _part_text(part: Any, where: str) -> str:
    if not isinstance(part, Mapping):
        raise _invalid(where, f'must be an object like {{"type": "text"}}, not {_kind(part)}')
    if part.get("type") != "text":
        raise _invalid(
            f"{where}.type", f"is {part.get('type')!r}; only parts of the type 'text' are served"
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise _invalid(f"{where}.text", f"must be a string, not {_kind(text)}")
    return text


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list | tuple):
        raise _invalid(where, f"must be a list, not {_kind(calls)}")
    return [_tool_call(call, f"{where}[{index}]") for index, call in enumerate(calls)]


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _invalid(where, "must be an object with a function that has a name")
    return {**call, "function": {**function, "arguments": read_arguments(function)}}


def read_arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an earlier call as the object that templates write.

    The wire has them as JSON text. What is no object is none: a call that `max_tokens` cut, or that
    a model broke, is a part of the history that clients send back, in each later turn.
    """
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return {}
    return dict(arguments) if isinstance(arguments, Mapping) else {}


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Templates read an earlier turn's reasoning under one name or another: fill the usual two."""
    found = [message[key] for key in _REASONING_KEYS if key in message]
    if not found:
        return message
    return {"thinking": found[0], **message, "reasoning_content": found[0]}


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__


def _invalid(where: str, problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"{where} {problem}", param=where)
