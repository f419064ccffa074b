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
    read_section,
)
from loraplex.serving.text.tool_calls.lark import Lark
from loraplex.serving.text.tool_calls.reader import CallReader

_SECTION: Final = "<｜tool▁calls▁begin｜>"
_SECTION_END: Final = "<｜tool▁calls▁end｜>"
_CALL: Final = "<｜tool▁call▁begin｜>"
_CALL_END: Final = "<｜tool▁call▁end｜>"
_SEPARATOR: Final = "<｜tool▁sep｜>"
_FENCE: Final = "```json"


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
    )

    def recognises(self, template: str) -> bool:
        return _CALL in template

    def read(self, reader: CallReader) -> Steps[None]:
        yield from read_marked(reader, (_SECTION,), read_section(_CALL, _SECTION_END, _call))


class DeepSeekBare(DeepSeek):
    """V3.1. It reads both forms, as the other does."""

    name = "deepseek_v31"
    syntax = CallSyntax(
        trigger=_SECTION,
        before=_SECTION + _CALL,
        between=_CALL_END + _CALL,
        after=_CALL_END + _SECTION_END,
        call=_bare_call,
    )

    def recognises(self, template: str) -> bool:
        return _CALL in template and _FENCE not in template


def _call(reader: CallReader) -> Steps[None]:
    name, _ = yield from reader.until(_SEPARATOR)
    is_fenced = name.strip() == "function"
    if is_fenced:
        name, _ = yield from reader.until(_FENCE)
    yield from read_named_arguments(reader, name.strip())
    if is_fenced:
        yield from reader.expect("```")
        yield from reader.take_space()
    yield from reader.expect(_CALL_END)
    reader.settle()
