"""Qwen3-Coder: `<tool_call><function=NAME><parameter=KEY>text</parameter></function></tool_call>`.

As the chat templates of Qwen/Qwen3-Coder, Qwen3.5 and Nemotron-3 write it; values are text, strings
without quotes.
"""

from collections.abc import Mapping
from typing import Any, Final

from loraplex.core.tools import FunctionTool
from loraplex.serving.text.text_source import Steps
from loraplex.serving.text.tool_calls.format import (
    CallSyntax,
    OurIds,
    read_marked,
    read_named_arguments,
)
from loraplex.serving.text.tool_calls.json_text import CutError
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
_AFTER: Final = (_PARAMETER, _FUNCTION_END, _END)
"""What ends a value that has no end tag."""
_MAX_NAME: Final = 256


def _call_rule(lark: Lark, tool: FunctionTool) -> str:
    members = members_rule(lark, tool, f"{_PARAMETER}{{}}>\n", f"\n{_PARAMETER_END}\n", _AFTER)
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
        ends_reasoning=(f"{_START}\n{_FUNCTION}", f"{_START}{_FUNCTION}"),
    )

    def recognises(self, template: str) -> bool:
        return _FUNCTION in template

    def read(self, reader: CallReader) -> Steps[None]:
        yield from read_marked(reader, (_START, _FUNCTION), _call, (_END,))


def _call(reader: CallReader) -> Steps[None]:
    """One call, after the tag before its name. End tags may be missing."""
    yield from reader.take_space()
    name = yield from _tag_name(reader)
    reader.check_name(name)
    yield from reader.take_space()
    if (yield from reader.peek()) == "{":  # the arguments as JSON, as some models write them
        yield from read_named_arguments(reader, name, markers=(_FUNCTION_END, _END, _START))
        yield from reader.optional(_FUNCTION_END)
    else:
        marker = yield from reader.expect(_PARAMETER, _FUNCTION_END, _END)
        reader.begin_call(name)
        yield from _read_parameters(reader, properties(reader.tools.get(name)), marker)
    yield from reader.optional(_END)
    reader.settle()


def _read_parameters(
    reader: CallReader, schemas: Mapping[str, Mapping[str, Any]], marker: str
) -> Steps[None]:
    """Parameters, of which the first tag was read, up to the end of the call.

    A value ends at its end tag, before the next parameter, or before the end of the call. A value
    without a name is left out, and so is text between the parameters.
    """
    pieces = ArgumentPieces()
    while marker == _PARAMETER:
        key = yield from _tag_name(reader)
        text, marker = yield from reader.until(_PARAMETER_END, *_AFTER, may_end=True)
        value = text.removeprefix("\n").removesuffix("\n")
        if key:
            reader.arguments(pieces.member(key, json_of(value, schemas.get(key))))
        if marker == _PARAMETER_END:
            _, marker = yield from reader.until(*_AFTER, before=(_START, _FUNCTION), may_end=True)
    reader.arguments(pieces.end())


def _tag_name(reader: CallReader) -> Steps[str]:
    """Take the rest of a tag: its name, perhaps in quotes, and what ends it, if that is there."""
    name = ""
    while (char := (yield from reader.peek())) not in ("", "<", "\n") and len(name) <= _MAX_NAME:
        reader.take(1)
        if char == ">":
            break
        name += char
    if not char and reader.is_cut:
        raise CutError
    return name.strip("\"' ")
