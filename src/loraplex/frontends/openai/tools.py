"""Tools of a chat body: pure functions, and every refusal.

Fields: `tools`, `tool_choice` and `parallel_tool_calls` of OpenAI's chat completions.
"""

import functools
import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from loraplex.core.errors import InvalidParameterError, UnsupportedFeatureError
from loraplex.core.tools import FunctionTool, ToolMode, ToolUse
from loraplex.frontends.openai.errors import raise_all
from loraplex.frontends.openai.schema import ChatBody

_log = logging.getLogger(__name__)

MAX_TOOLS: Final = 128
MAX_TOOLS_CHARACTERS: Final = 1 << 17
"""Maximum size of all of them together as JSON: the limit of a grammar."""
MAX_DESCRIPTION_CHARACTERS: Final = 1 << 14

_NAME: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_OTHER_TYPE: Final = re.compile(
    "(custom|namespace|web_search|web_search_preview|file_search|code_interpreter|local_shell|shell"
    "|apply_patch|computer|computer_use|computer_use_preview|image_generation|mcp|tool_search"
    ")(_[0-9]{4}_[0-9]{2}_[0-9]{2})?"
)
"""OpenAI's types of tools that are no functions; some have a date."""
_CHOICES: Final = (
    'tool_choice must be "none", "auto", "required", {"type": "function", "function": {"name": '
    '...}} or {"type": "allowed_tools", ...}'
)


def read_tool_use(
    tools: Sequence[Any] | None, tool_choice: Any, parallel_tool_calls: bool | None
) -> ToolUse | None:
    """What may be called, and whether it must; None if nothing may.

    Raises InvalidParameterError, or UnsupportedFeatureError for tools that are no functions.
    """
    functions = read_tools(tools)
    if not functions:
        if tool_choice not in (None, "none", "auto"):
            raise InvalidParameterError(
                "tool_choice needs tools, and only functions are served", param="tool_choice"
            )
        return None
    may_be_parallel = parallel_tool_calls is not False
    match tool_choice:
        case None | "auto":
            return ToolUse(tools=functions, is_parallel=may_be_parallel)
        case "none":
            return None
        case "required":
            return ToolUse(tools=functions, mode=ToolMode.REQUIRED, is_parallel=may_be_parallel)
        case {"type": "function", "function": {"name": str(name)}}:
            return ToolUse(
                tools=_chosen(functions, [name], "tool_choice.function.name"),
                mode=ToolMode.REQUIRED,
                is_parallel=False,
                is_named=True,
            )
        case {"type": "allowed_tools"}:
            return _allowed(functions, tool_choice, may_be_parallel)
    raise InvalidParameterError(f"{_CHOICES}, got {_shown(tool_choice)}", param="tool_choice")


def shown_tools(body: ChatBody) -> list[dict[str, Any]] | None:
    """What the chat template writes into the prompt, of checked fields: nothing if no tool may be
    called, so that the model does not try."""
    if body.tool_choice == "none" or body.include_json_schema_in_prompt is False:
        return None
    return served(body.tools)


def read_tools(tools: Sequence[Any] | None) -> tuple[FunctionTool, ...]:
    """Raises InvalidParameterError or UnsupportedFeatureError, whose param names the place."""
    if not tools:
        return ()
    check_number(tools)
    functions: dict[str, FunctionTool] = {}
    raise_all(
        [
            functools.partial(_add_function, functions, tool, f"tools[{index}]")
            for index, tool in enumerate(tools)
            if is_served(tool)
        ]
    )
    return tuple(functions.values())


def check_number(tools: Sequence[Any]) -> None:
    """Raise InvalidParameterError for too many tools, or too large ones."""
    if len(tools) > MAX_TOOLS:
        raise InvalidParameterError(
            f"tools has {len(tools)} entries; at most {MAX_TOOLS} are allowed", param="tools"
        )
    try:
        size = len(json.dumps(tools))
    except RecursionError as error:
        raise _invalid("tools", "are nested too deep") from error
    if size > MAX_TOOLS_CHARACTERS:
        raise _invalid("tools", f"have {size} characters; at most {MAX_TOOLS_CHARACTERS} fit")


def _add_function(functions: dict[str, FunctionTool], tool: Any, where: str) -> None:
    if not isinstance(tool, dict):
        raise _invalid(where, "must be an object with type and function")
    check_type(tool, where)
    function = read_function(tool.get("function"), f"{where}.function")
    if function.name in functions:
        raise _invalid(f"{where}.function.name", f"{function.name!r} occurs twice")
    functions[function.name] = function


def check_type(tool: Mapping[str, Any], where: str) -> None:
    """Raise UnsupportedFeatureError for what is neither a function nor left out."""
    if tool.get("type") != "function":
        raise UnsupportedFeatureError(
            f"{where}.type is {_shown(tool.get('type'))}; only 'function' is served: the client "
            "runs it",
            param=f"{where}.type",
        )


def served(tools: Sequence[Any] | None) -> list[Any] | None:
    """Leave out tools of OpenAI's other types: a model can do without any of them, and agents send
    them to every server. A type that OpenAI does not define stays, and is refused."""
    return [tool for tool in tools or () if is_served(tool)] or None


def left_out(tools: Sequence[Any] | None) -> tuple[str, ...]:
    """Return a note for each tool that is left out, and log it."""
    notes = tuple(
        f"tools[{index}] of type {tool['type']} is left out: only functions are served"
        for index, tool in enumerate(tools or ())
        if not is_served(tool)
    )
    for note in notes:
        _log.info("%s", note)
    return notes


def is_served(tool: Any) -> bool:
    """Whether a tool is not left out; it may yet be refused."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    return not isinstance(kind, str) or _OTHER_TYPE.fullmatch(kind) is None


def read_function(function: Any, where: str) -> FunctionTool:
    """A name, and perhaps description, parameters and strict."""
    if not isinstance(function, dict):
        raise _invalid(where, "must be an object with a name")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _invalid(
            f"{where}.name", f"must be 1 to 64 letters, digits, _ or -, got {_shown(name)}"
        )
    description = function.get("description")
    if not isinstance(description, str | None):
        raise _invalid(f"{where}.description", "must be a text")
    if len(description or "") > MAX_DESCRIPTION_CHARACTERS:
        raise _invalid(
            f"{where}.description", f"has more than {MAX_DESCRIPTION_CHARACTERS} characters"
        )
    strict = function.get("strict")
    if not isinstance(strict, bool | None):
        raise _invalid(f"{where}.strict", f"must be true or false, got {_shown(strict)}")
    return FunctionTool(
        name=name,
        description=description or "",
        parameters=_parameters(function.get("parameters"), f"{where}.parameters"),
        is_strict=bool(strict),
    )


def _parameters(schema: Any, where: str) -> dict[str, Any]:
    if schema is None:
        return {}
    if not isinstance(schema, dict):
        raise _invalid(where, f"must be a JSON schema, an object, got {_shown(schema)}")
    if schema.get("type", "object") != "object":
        raise _invalid(
            f"{where}.type", f"must be 'object': arguments have names, got {_shown(schema['type'])}"
        )
    members = schema.get("properties", {})
    if not isinstance(members, dict):
        raise _invalid(f"{where}.properties", "must be an object of names and schemas")
    return schema


def _allowed(
    functions: tuple[FunctionTool, ...], choice: Mapping[str, Any], may_be_parallel: bool
) -> ToolUse:
    """OpenAI's restriction of one request to some of the tools that its prompt shows."""
    allowed = choice.get("allowed_tools", choice)
    mode = allowed.get("mode") if isinstance(allowed, dict) else None
    if mode not in ("auto", "required"):
        raise InvalidParameterError(
            f"tool_choice.allowed_tools.mode must be 'auto' or 'required', got {_shown(mode)}",
            param="tool_choice",
        )
    entries = allowed.get("tools")
    names = [_allowed_name(entry) for entry in entries] if isinstance(entries, list) else []
    if not names:
        raise InvalidParameterError(
            "tool_choice.allowed_tools.tools must be a list of at least one tool",
            param="tool_choice",
        )
    return ToolUse(
        tools=_chosen(functions, names, "tool_choice.allowed_tools"),
        mode=ToolMode(mode),
        is_parallel=may_be_parallel,
        is_restricted=True,
    )


def _allowed_name(entry: Any) -> str:
    match entry:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
        case {"type": "function", "name": str(name)}:
            return name
    raise InvalidParameterError(
        'an entry of tool_choice.allowed_tools.tools must be {"type": "function", "function": '
        f'{{"name": ...}}}}, got {_shown(entry)}',
        param="tool_choice",
    )


def _chosen(
    functions: tuple[FunctionTool, ...], names: Sequence[str], where: str
) -> tuple[FunctionTool, ...]:
    known = {function.name: function for function in functions}
    for name in names:
        if name not in known:
            raise InvalidParameterError(
                f"{where} names {name[:64]!r}, which is not in tools: they are {', '.join(known)}",
                param="tool_choice",
            )
    return tuple(known[name] for name in dict.fromkeys(names))


def _invalid(where: str, problem: str) -> InvalidParameterError:
    return InvalidParameterError(f"{where} {problem}", param=where)


def _shown(value: Any) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 80 else f"{text[:80]}..."
