"""Tools as the Responses API writes them, flat, and as chats do."""

import functools
from collections.abc import Sequence
from typing import Any, Final

from loraplex.core.errors import InvalidParameterError, UnsupportedFeatureError
from loraplex.core.tools import FunctionTool
from loraplex.frontends.openai.errors import raise_all
from loraplex.frontends.openai.tools import check_type, is_served, read_function

_MODES: Final = ("none", "auto", "required")


def chat_tools(tools: Sequence[Any] | None) -> list[dict[str, Any]] | None:
    """Raises InvalidParameterError, or UnsupportedFeatureError for what is no function."""
    if not tools:
        return None
    converted: list[dict[str, Any]] = []
    raise_all(
        [
            functools.partial(_add_tool, converted, tool, f"tools[{index}]")
            for index, tool in enumerate(tools)
            if is_served(tool)
        ]
    )
    return converted


def chat_choice(choice: Any) -> Any:
    """tool_choice in the chat's shape. Raises as chat_tools does."""
    match choice:
        case None | str():
            return choice
        case {"type": "function", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
        case {"type": "function"}:
            raise InvalidParameterError(
                "tool_choice.name must be the name of a function", param="tool_choice.name"
            )
        case {"type": "allowed_tools"}:
            return choice
    kind = choice.get("type")
    raise UnsupportedFeatureError(
        f"tool_choice.type is {str(kind)[:64]!r}; supported: 'function', 'allowed_tools', or one "
        f"of {', '.join(_MODES)} as a text",
        param="tool_choice",
    )


def shown_tools(tools: Sequence[Any] | None) -> list[dict[str, Any]]:
    """Tools as a response repeats them, without those that are left out; they are checked."""
    return [
        {
            "type": "function",
            "name": tool["name"],
            "description": tool.get("description"),
            "parameters": tool.get("parameters"),
            "strict": bool(tool.get("strict")),
        }
        for tool in tools or ()
        if is_served(tool)
    ]


def _add_tool(converted: list[dict[str, Any]], tool: Any, where: str) -> None:
    if not isinstance(tool, dict):
        raise InvalidParameterError(f"{where} must be an object with type and name", param=where)
    check_type(tool, where)
    function: FunctionTool = read_function(tool, where)
    shown: dict[str, Any] = {"name": function.name}
    for field in ("description", "parameters", "strict"):
        if tool.get(field) is not None:
            shown[field] = tool[field]
    converted.append({"type": "function", "function": shown})
