"""Grammar of a chat completion: reasoning, then calls as its model writes them, or content."""

import json
from collections.abc import Callable
from typing import Any, Final

from loraplex.core.errors import InvalidParameterError
from loraplex.core.grammar import Grammar
from loraplex.core.tools import ToolMode, ToolUse
from loraplex.serving.text.chat_format import CompletionGrammar, Reasoning
from loraplex.serving.text.tool_calls.format import CallSyntax
from loraplex.serving.text.tool_calls.formats import FORMATS
from loraplex.serving.text.tool_calls.lark import Lark, pattern_of

_CONTENT: Final = "content"
"""Name of the grammar of the content, next to that of the completion."""
_SPACE: Final = r"[ \t\r\n]{1,4}"


def completion_form(parts: CompletionGrammar, form_of: Callable[[Grammar], str]) -> str:
    """Return llguidance's JSON form; `form_of` makes that of the content's grammar."""
    lark = Lark(parts.special_ids)
    beside = [] if parts.content is None else [_named(form_of(parts.content))]
    content = "" if parts.content is None else f"@{_CONTENT}"
    completion = _completion(lark, parts, content)
    ends = () if parts.tool_use is None else FORMATS[parts.tool_calls].syntax.ends_reasoning
    before = "" if parts.reasoning is None else _reasoning(lark, parts.reasoning, ends)
    own = {"lark_grammar": lark.grammar(f"{before} {completion}".strip() or '""')}
    return json.dumps({"grammars": [own, *beside]}, ensure_ascii=False)


def _named(form: str) -> dict[str, Any]:
    """Raises InvalidParameterError for what cannot be a part of another grammar."""
    grammars = json.loads(form).get("grammars")
    if not isinstance(grammars, list) or len(grammars) != 1:
        raise InvalidParameterError(
            "a grammar of several grammars cannot be used together with tools or reasoning",
            param="response_format",
        )
    return {**grammars[0], "name": _CONTENT}


def _reasoning(lark: Lark, reasoning: Reasoning, ends: tuple[str, ...]) -> str:
    """ends: texts that a reader takes for the end of the reasoning, too."""
    tags = reasoning.tags
    thought = f"{lark.any_until(tags.end, ends)} ({lark.regex(_SPACE)})?"
    if reasoning.is_open:
        return thought
    return f"({lark.text(tags.start)} {thought})?"


def _completion(lark: Lark, parts: CompletionGrammar, content: str) -> str:
    """The expression of all that may follow the reasoning."""
    if parts.tool_use is None:
        return content or f"({lark.any_text()})?"
    syntax = FORMATS[parts.tool_calls].syntax
    if content and syntax.marked is not None:
        syntax = syntax.marked
    calls = _calls(lark, syntax, parts.tool_use)
    begin = lark.text(syntax.before) if syntax.before else ""
    if parts.tool_use.mode is ToolMode.REQUIRED:
        return f"{begin} {calls}"
    if content:
        return lark.choice([content, f"{begin} {calls}"])
    return lark.choice([f"({_content(lark, syntax)})?", _content_and_calls(lark, syntax, calls)])


def _content(lark: Lark, syntax: CallSyntax) -> str:
    """Any that cannot be taken for a call."""
    if syntax.trigger:
        return lark.any_without(syntax.trigger, *syntax.other_triggers)
    pattern = rf"[^ \t\r\n{pattern_of(syntax.first)}](?s:.*)"
    return lark.any_without(*syntax.other_triggers, pattern=pattern)


def _content_and_calls(lark: Lark, syntax: CallSyntax, calls: str) -> str:
    if not syntax.trigger:
        return f"{lark.text(syntax.before)} {calls}" if syntax.before else calls
    rest = syntax.before.removeprefix(syntax.trigger)
    content = lark.any_until(syntax.trigger, syntax.other_triggers)
    return f"{content} {lark.text(rest) if rest else ''} {calls}"


def _calls(lark: Lark, syntax: CallSyntax, tool_use: ToolUse) -> str:
    """One or several, and what closes them."""
    call = lark.choice([syntax.call(lark, tool) for tool in tool_use.tools])
    more = f" ({lark.text(syntax.between)} {call})*" if tool_use.is_parallel else ""
    return f"{call}{more} {lark.text(syntax.after) if syntax.after else ''}".strip()
