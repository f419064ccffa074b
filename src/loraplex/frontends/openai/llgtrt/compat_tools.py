"""Tools as in llgtrt: a grammar constrains the output to a call, which is plain content."""

import json
from collections.abc import Mapping
from typing import Any, Final

from loraplex.core.errors import InvalidParameterError
from loraplex.frontends.openai.schema import ChatBody

_ANY_OBJECT: Final = {"type": "object"}
_FREE_TEXT: Final = "TEXT: /([^{](.|\\n)*)?/"
_TOOLS: Final = "loraplex_tools"
"""Where the body keeps them for its template: no schema has such a field. What a client sends under
this name is taken out."""


def tool_changes(body: ChatBody, start_token: str) -> dict[str, Any]:
    """Fields of the body with the tools turned into a format of the output."""
    if not body.tools:
        return {"tools": None, "tool_choice": None, _TOOLS: None}
    grammar = tools_grammar(body.tools, body.tool_choice or "auto", start_token)
    kept = {"tools": None, "tool_choice": None, _TOOLS: body.tools}
    if grammar is None:
        return kept
    return kept | {"response_format": {"type": "lark_grammar", "lark_grammar": grammar}}


def template_tools(body: ChatBody) -> dict[str, Any]:
    """An argument of Backend.render_chat."""
    tools = getattr(body, _TOOLS, None)
    return {} if tools is None else {"tools": tools}


def tools_grammar(tools: list[Any], choice: str | dict[str, Any], start_token: str) -> str | None:
    """Grammar in Lark; None: the output is free. Raises InvalidParameterError for other choices."""
    match choice:
        case "none":
            return None
        case "required":
            start = f"{start_token} call".lstrip()
            return "\n".join((f"start: {start}", _call(tools)))
        case "auto":
            start = f"{start_token} call".lstrip()
            return "\n".join((f"start: TEXT | {start}", _FREE_TEXT, _call(tools)))
    raise InvalidParameterError(
        f"tool_choice must be one of auto, none, required, got {choice!r}", param="tool_choice"
    )


def _call(tools: list[Any]) -> str:
    calls = [_call_schema(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    schema = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return f"call: %json {json.dumps(schema)}"


def _call_schema(tool: Any, where: str) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidParameterError(
            f'{where} must be an object as {{"type": "function", "function": {{"name": ...}}}}',
            param=where,
        )
    parameters = function.get("parameters")
    is_strict = function.get("strict") is True and isinstance(parameters, dict)
    return {
        "type": "object",
        "properties": {
            "type": {"const": "function"},
            "name": {"const": function["name"]},
            "parameters": parameters if is_strict else _ANY_OBJECT,
        },
        "required": ["type", "name", "parameters"],
        "additionalProperties": False,
    }
