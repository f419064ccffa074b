"""Messages of a conversation in the form that chat templates expect.

The form is the one of transformers: text content as one string (or as parts, for a template that
loops over them), keys without a value left out, the arguments of tool calls as objects. Roles and
fields are those of the OpenAI chat schema. For a model whose template does not support tools,
descriptions of tools, earlier calls and results become text of the conversation.
"""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from loraplex.core.errors import InvalidRequestError
from loraplex.serving.text.content_format import ContentFormat

if TYPE_CHECKING:  # a process that renders chats does not need it
    from loraplex.serving.text.tool_calls.format import CallSyntax

ROLES = ("system", "developer", "user", "assistant", "tool")

PART_SEPARATOR = "\n"
"""Separator of the text parts of one message, as in vLLM."""

_ONE_TEXT = ContentFormat()

_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


def normalize_messages(
    messages: Sequence[Mapping[str, Any]],
    content: ContentFormat = _ONE_TEXT,
    roles: Sequence[str] = ROLES,
) -> list[dict[str, Any]]:
    """Fresh messages for a template; the given ones are not changed. roles: that they may have.

    Raises InvalidRequestError, whose text and `param` name the message and the field.
    """
    if not isinstance(messages, list | tuple):
        raise InvalidRequestError("messages must be a list of messages", param="messages")
    if not messages:
        raise InvalidRequestError("messages is empty: at least one is needed", param="messages")
    return [_normalize(message, index, content, roles) for index, message in enumerate(messages)]


def _normalize(
    message: Any, index: int, content: ContentFormat, roles: Sequence[str]
) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise _invalid(where, f"must be an object, not {_kind(message)}")
    normal = {key: value for key, value in message.items() if value is not None}
    role = normal.get("role")
    if role not in roles:
        problem = "is missing" if role is None else f"is {role!r}"
        raise _invalid(f"{where}.role", f"{problem}; it must be one of {', '.join(roles)}")
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
    # Templates read an earlier turn's reasoning under one name or another: fill the usual two.
    found = [normal[key] for key in _REASONING_KEYS if key in normal]
    return {"thinking": found[0], **normal, "reasoning_content": found[0]} if found else normal


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


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__


def _invalid(where: str, problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"{where} {problem}", param=where)


_SYSTEM_ROLES: Final = ("system", "developer")
_FUNCTIONS: Final = "You can call functions. Each line describes one of them as JSON:\n"
_FORM: Final = (
    "\nTo call some of them, answer with nothing but a JSON list like "  # language: quoted
    '[{"name": "function_name", "arguments": {"argument_name": "value"}}].'
)


def with_tools_described(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    *,
    describes_form: bool,
) -> list[Mapping[str, Any]]:
    """Return the messages with descriptions of the tools in the first system or user message.

    Not every template supports a system message. With describes_form the text also describes the
    form of a call.
    """
    lines = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    text = f"{_FUNCTIONS}{lines}{_FORM if describes_form else ''}"
    shown = list(messages)
    at = _place(messages)
    if at is None:
        return [{"role": "system", "content": text}, *shown]
    is_system = messages[at].get("role") in _SYSTEM_ROLES
    shown[at] = {**messages[at], "content": _joined(messages[at].get("content"), text, is_system)}
    return shown


def with_calls_as_text(
    messages: Sequence[Mapping[str, Any]], syntax: "CallSyntax"
) -> list[Mapping[str, Any]]:
    """The messages with calls as text of the assistant, in the way in which the model is to write
    them, and results as text of the user, where turns keep alternating.

    A message that is not as it should be is left as it is.
    """
    names: dict[str, str] = {}
    shown: list[Mapping[str, Any]] = []
    is_result = False
    """The message before is the text of a result."""
    for message in messages:
        role = message.get("role")
        calls = _calls(message) if message.get("tool_calls") else []
        if calls:
            names |= {call["id"]: call["name"] for call in calls}
            message = _with_calls(message, calls, syntax)
        elif role == "tool":
            name = names.get(str(message.get("tool_call_id")), "a call")
            text = _joined(message.get("content"), f"Result of {name}:", False)
            message = {"role": "user", "content": text}
        if is_result and not calls and role in ("tool", "user"):
            shown[-1] = _together(shown[-1], message)
        else:
            shown.append(message)
        is_result = role == "tool"
    return shown


def _calls(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Id, name and arguments of each; none where one of them is not as it should be."""
    calls = message.get("tool_calls")
    try:
        return [
            {
                "id": str(call.get("id")),
                "name": str(call["function"]["name"]),
                "arguments": read_arguments(call["function"]),
            }
            for call in calls or ()
        ]
    except (AttributeError, KeyError, TypeError):
        return []


def _with_calls(
    message: Mapping[str, Any], calls: Sequence[Mapping[str, Any]], syntax: "CallSyntax"
) -> dict[str, Any]:
    written = syntax.between.join(
        json.dumps({"name": call["name"], "arguments": call["arguments"]}, ensure_ascii=False)
        for call in calls
    )
    text = f"{syntax.before}{written}{syntax.after}"
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": _joined(message.get("content"), text, True)}


def _together(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return two messages as one."""
    before, content = one["content"], other.get("content")
    if isinstance(before, str) and isinstance(content, str):
        return {**other, "content": f"{before}\n\n{content}"}
    return {**other, "content": [*_parts(before), *_parts(content)]}


def _parts(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def _place(messages: Sequence[Mapping[str, Any]]) -> int | None:
    if messages and messages[0].get("role") in _SYSTEM_ROLES:
        return 0
    users = (index for index, message in enumerate(messages) if message.get("role") == "user")
    return next(users, None)


def _joined(content: Any, text: str, comes_first: bool) -> Any:
    """comes_first: the content does."""
    if isinstance(content, list):
        part = {"type": "text", "text": text}
        return [*content, part] if comes_first else [part, *content]
    parts = [content or "", text] if comes_first else [text, content or ""]
    return "\n\n".join(part for part in parts if part)
