"""Qwen3-Coder: `<tool_call><function=NAME><parameter=KEY>text</parameter></function></tool_call>`.

As the chat template of Qwen/Qwen3-Coder writes it; values are text, strings without quotes.
"""

from typing import Final

from loraplex.core.tools import FunctionTool
from loraplex.serving.text.text_source import Steps
from loraplex.serving.text.tool_calls.format import CallSyntax, OurIds
from loraplex.serving.text.tool_calls.lark import Lark
from loraplex.serving.text.tool_calls.parameters import ArgumentPieces, json_of, properties
from loraplex.serving.text.tool_calls.reader import CallReader
from loraplex.serving.text.tool_calls.text_values import members_rule

_START: Final = "<tool_call>"
_END: Final = "</tool_call>"
_FUNCTION: Final = "<function="
_FUNCTION_END: Final = "</function>"
_PARAMETER: Final = "<parameter="
_PARAMETER_END: Final = "</parameter>"


def _call_rule(lark: Lark, tool: FunctionTool) -> str:
    members = members_rule(lark, tool, f"{_PARAMETER}{{}}>\n", f"\n{_PARAMETER_END}\n")
    return f"{lark.text(f'{_FUNCTION}{tool.name}>' + chr(10))} {members} {lark.text(_FUNCTION_END)}"


class Qwen3Coder(OurIds):
    name = "qwen3_coder"
    markers = (_START, _END)
    syntax = CallSyntax(
        trigger=_START,
        before=f"{_START}\n",
        between=f"\n{_END}\n{_START}\n",
        after=f"\n{_END}",
        call=_call_rule,
        other_triggers=(_FUNCTION,),
    )

    def recognises(self, template: str) -> bool:
        return _FUNCTION in template

    def read(self, reader: CallReader) -> Steps[None]:
        while (start := (yield from reader.content_until((_START, _FUNCTION)))) is not None:
            yield from reader.attempt(_call(reader, has_frame=start == _START))


def _call(reader: CallReader, *, has_frame: bool) -> Steps[None]:
    if has_frame:
        yield from reader.take_space()
        yield from reader.expect(_FUNCTION)
    name, _ = yield from reader.until(">")
    reader.check_name(name)
    reader.begin_call(name)
    schemas = properties(reader.tools.get(name))
    pieces = ArgumentPieces()
    yield from reader.take_space()
    while (yield from reader.expect(_PARAMETER, _FUNCTION_END)) == _PARAMETER:
        key, _ = yield from reader.until(">")
        text, _ = yield from reader.until(_PARAMETER_END)
        value = text.removeprefix("\n").removesuffix("\n")
        reader.arguments(pieces.member(key, json_of(value, schemas.get(key))))
        yield from reader.take_space()
    reader.arguments(pieces.end())
    if has_frame:
        yield from reader.take_space()
        yield from reader.expect(_END)
    reader.settle()
