"""Tools as the Responses API writes them, flat, and as chats do."""

from collections.abc import Sequence
from typing import Any, Final

from loraplex.core.errors import InvalidParameterError, UnsupportedFeatureError
from loraplex.core.tools import FunctionTool
from loraplex.frontends.openai.tools import read_function

_MODES: Final = ("none", "auto", "required")


def chat_tools(tools: Sequence[Any] | None) -> list[dict[str, Any]] | None:
    """Raises InvalidParameterError, or UnsupportedFeatureError for what is no function."""
    if not tools:
        return None
    return [_chat_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]


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
    """Tools as a response repeats them; they have been checked."""
    return [
        {
            "type": "function",
            "name": tool["name"],
            "description": tool.get("description"),
            "parameters": tool.get("parameters"),
            "strict": bool(tool.get("strict")),
        }
        for tool in tools or ()
    ]


def _chat_tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise InvalidParameterError(f"{where} must be an object with type and name", param=where)
    kind = tool.get("type")
    if kind != "function":
        raise UnsupportedFeatureError(
            f"{where}.type is {str(kind)[:64]!r}; only 'function' is served: the client runs it",
            param=f"{where}.type",
        )
    function: FunctionTool = read_function(tool, where)
    shown: dict[str, Any] = {"name": function.name}
    for field in ("description", "parameters", "strict"):
        if tool.get(field) is not None:
            shown[field] = tool[field]
    return {"type": "function", "function": shown}
