"""DeepSeek V3, R1 and V3.1: calls in a section, between markers of their own.

As the chat templates of deepseek-ai write them: V3 and R1 put the arguments into a fenced block
after the name, V3.1 without a fence.
"""

from typing import Final

from loraplex.core.tools import FunctionTool
from loraplex.serving.text.text_source import Steps
from loraplex.serving.text.tool_calls.format import (
    CallSyntax,
    OurIds,
    arguments_schema,
    read_marked,
    read_named_arguments,
)
from loraplex.serving.text.tool_calls.json_text import MalformedError
from loraplex.serving.text.tool_calls.lark import Lark
from loraplex.serving.text.tool_calls.reader import CallReader

_SECTION: Final = "<｜tool▁calls▁begin｜>"
_SECTION_END: Final = "<｜tool▁calls▁end｜>"
_CALL: Final = "<｜tool▁call▁begin｜>"
_CALL_END: Final = "<｜tool▁call▁end｜>"
_SEPARATOR: Final = "<｜tool▁sep｜>"
_FENCE: Final = "```json"
_ENDS: Final = (_CALL, _CALL_END, _SECTION_END)
"""Markers that no call has within."""


def _fenced_call(lark: Lark, tool: FunctionTool) -> str:
    head = lark.text(f"function{_SEPARATOR}{tool.name}\n{_FENCE}\n")
    return f"{head} {lark.json(arguments_schema(tool))} {lark.text(chr(10) + '```')}"


def _bare_call(lark: Lark, tool: FunctionTool) -> str:
    return f"{lark.text(f'{tool.name}{_SEPARATOR}')} {lark.json(arguments_schema(tool))}"


class DeepSeek(OurIds):
    """V3 and R1."""

    name = "deepseek_v3"
    markers: tuple[str, ...] = (_SECTION, _SECTION_END, _CALL, _CALL_END, _SEPARATOR)
    syntax = CallSyntax(
        trigger=_SECTION,
        before=_SECTION + _CALL,
        between=f"{_CALL_END}\n{_CALL}",
        after=_CALL_END + _SECTION_END,
        call=_fenced_call,
        other_triggers=(_CALL,),
    )

    def recognises(self, template: str) -> bool:
        return _CALL in template

    def read(self, reader: CallReader) -> Steps[None]:
        yield from read_marked(reader, (_SECTION, _CALL), _call, (_SECTION_END, _CALL_END))


class DeepSeekBare(DeepSeek):
    """V3.1. It reads both forms, as the other does."""

    name = "deepseek_v31"
    syntax = CallSyntax(
        trigger=_SECTION,
        before=_SECTION + _CALL,
        between=_CALL_END + _CALL,
        after=_CALL_END + _SECTION_END,
        call=_bare_call,
        other_triggers=(_CALL,),
    )

    def recognises(self, template: str) -> bool:
        return _CALL in template and _FENCE not in template


def _call(reader: CallReader) -> Steps[None]:
    name = yield from _name(reader, _SEPARATOR)
    is_fenced = name == "function"
    if is_fenced:
        name = yield from _name(reader, _FENCE)
    fence = (f"```{_CALL_END}",) if is_fenced else ()
    yield from read_named_arguments(reader, name, markers=(*fence, *_ENDS))
    if is_fenced:
        yield from reader.optional("```")
    reader.settle()


def _name(reader: CallReader, end: str) -> Steps[str]:
    name, marker = yield from reader.until(end, before=_ENDS)
    if marker != end:
        raise MalformedError
    return name.strip()
