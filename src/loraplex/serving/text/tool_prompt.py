"""Tools for a model whose chat template does not know of any: told in the conversation itself."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

_SYSTEM_ROLES: Final = ("system", "developer")
_FUNCTIONS: Final = "You can call functions. Each line describes one of them as JSON:\n"
_FORM: Final = (
    "\nTo call some of them, answer with nothing but a JSON list like "
    '[{"name": "function_name", "arguments": {"argument_name": "value"}}].'
)


def with_tools_told(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], *, tells_form: bool
) -> list[Mapping[str, Any]]:
    """The messages with the tools described in the first one of the system, or else of the user:
    not every template has room for a system message. tells_form: how a call is to be written, too.
    """
    lines = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    text = f"{_FUNCTIONS}{lines}{_FORM if tells_form else ''}"
    told = list(messages)
    at = _place(messages)
    if at is None:
        return [{"role": "system", "content": text}, *told]
    is_system = messages[at].get("role") in _SYSTEM_ROLES
    told[at] = {**messages[at], "content": _joined(messages[at].get("content"), text, is_system)}
    return told


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
