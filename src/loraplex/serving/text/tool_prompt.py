"""Tools for a model whose chat template does not support them: descriptions of tools, earlier calls
and results become text of the conversation.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from loraplex.serving.text.chat_messages import read_arguments
from loraplex.serving.text.tool_calls.format import CallSyntax

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
    messages: Sequence[Mapping[str, Any]], syntax: CallSyntax
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
        calls = _calls(message)
        if calls:
            names |= {call["id"]: call["name"] for call in calls}
            shown.append(_with_calls(message, calls, syntax))
        elif message.get("role") == "tool":
            name = names.get(str(message.get("tool_call_id")), "a call")
            text = _joined(message.get("content"), f"Result of {name}:", False)
            _add(shown, {"role": "user", "content": text}, joins=is_result)
        else:
            _add(shown, message, joins=is_result and message.get("role") == "user")
        is_result = message.get("role") == "tool"
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
    message: Mapping[str, Any], calls: Sequence[Mapping[str, Any]], syntax: CallSyntax
) -> dict[str, Any]:
    written = syntax.between.join(
        json.dumps({"name": call["name"], "arguments": call["arguments"]}, ensure_ascii=False)
        for call in calls
    )
    text = f"{syntax.before}{written}{syntax.after}"
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": _joined(message.get("content"), text, True)}


def _add(shown: list[Mapping[str, Any]], message: Mapping[str, Any], *, joins: bool) -> None:
    """joins: the message becomes a part of the one before."""
    if not joins:
        shown.append(message)
        return
    before, content = shown[-1]["content"], message.get("content")
    if isinstance(before, str) and isinstance(content, str):
        together: Any = f"{before}\n\n{content}"
    else:
        together = [*_parts(before), *_parts(content)]
    shown[-1] = {**message, "content": together}


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
