"""Kimi K2: calls in a section, each with an id of its own, `functions.NAME:INDEX`.

As moonshotai/Kimi-K2-Instruct writes them; its chat template wants these ids back.
"""

import re
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

_SECTION: Final = "<|tool_calls_section_begin|>"
_SECTION_END: Final = "<|tool_calls_section_end|>"
_CALL: Final = "<|tool_call_begin|>"
_CALL_END: Final = "<|tool_call_end|>"
_ARGUMENTS: Final = "<|tool_call_argument_begin|>"
_ID: Final = re.compile(r"(?:functions\.)?(?P<name>.+):[0-9]+")


def _call_rule(lark: Lark, tool: FunctionTool) -> str:
    head = f"{lark.text(f'functions.{tool.name}:')} {lark.regex('[0-9]{1,4}')}"
    return f"{head} {lark.text(_ARGUMENTS)} {lark.json(arguments_schema(tool))}"


class Kimi(OurIds):
    name = "kimi_k2"
    markers = (_SECTION, _SECTION_END, _CALL, _CALL_END, _ARGUMENTS)
    syntax = CallSyntax(
        trigger=_SECTION,
        before=_SECTION + _CALL,
        between=_CALL_END + _CALL,
        after=_CALL_END + _SECTION_END,
        call=_call_rule,
        other_triggers=(_CALL,),
        ends_reasoning=(_SECTION,),
    )

    def recognises(self, template: str) -> bool:
        return _CALL in template

    def read(self, reader: CallReader) -> Steps[None]:
        yield from read_marked(reader, (_SECTION, _CALL), _call, (_SECTION_END, _CALL_END))


def _call(reader: CallReader) -> Steps[None]:
    ends = (_CALL, _CALL_END, _SECTION_END)
    text, marker = yield from reader.until(_ARGUMENTS, before=ends)
    own_id = text.strip()
    match = _ID.fullmatch(own_id)
    if marker != _ARGUMENTS or match is None:
        raise MalformedError
    yield from read_named_arguments(reader, match["name"], own_id, markers=ends)
    reader.settle()
