"""GLM-4.5: `<tool_call>NAME`, then pairs of `<arg_key>` and `<arg_value>`, then `</tool_call>`.

As the chat template of zai-org/GLM-4.5 writes it; values are text, strings without quotes.
"""

from typing import Final

from loraplex.core.tools import FunctionTool
from loraplex.serving.text.text_source import Steps
from loraplex.serving.text.tool_calls.format import CallSyntax, OurIds, read_marked
from loraplex.serving.text.tool_calls.lark import Lark
from loraplex.serving.text.tool_calls.parameters import ArgumentPieces, json_of, properties
from loraplex.serving.text.tool_calls.reader import CallReader
from loraplex.serving.text.tool_calls.text_values import members_rule

_START: Final = "<tool_call>"
_END: Final = "</tool_call>"
_KEY: Final = "<arg_key>"
_KEY_END: Final = "</arg_key>"
_VALUE: Final = "<arg_value>"
_VALUE_END: Final = "</arg_value>"


def _call_rule(lark: Lark, tool: FunctionTool) -> str:
    members = members_rule(lark, tool, f"{_KEY}{{}}{_KEY_END}\n{_VALUE}", f"{_VALUE_END}\n")
    return f"{lark.text(tool.name + chr(10))} {members}"


class Glm(OurIds):
    name = "glm45"
    markers = (_START, _END, _KEY, _KEY_END, _VALUE, _VALUE_END)
    syntax = CallSyntax(
        trigger=_START,
        before=_START,
        between=f"{_END}\n{_START}",
        after=_END,
        call=_call_rule,
    )

    def recognises(self, template: str) -> bool:
        return _KEY in template

    def read(self, reader: CallReader) -> Steps[None]:
        yield from read_marked(reader, (_START,), _call)


def _call(reader: CallReader) -> Steps[None]:
    before, marker = yield from reader.until(_KEY, _END)
    name = before.strip()
    reader.check_name(name)
    reader.begin_call(name)
    schemas = properties(reader.tools.get(name))
    pieces = ArgumentPieces()
    while marker == _KEY:
        key, _ = yield from reader.until(_KEY_END)
        yield from reader.take_space()
        yield from reader.expect(_VALUE)
        text, _ = yield from reader.until(_VALUE_END)
        reader.arguments(pieces.member(key.strip(), json_of(text, schemas.get(key.strip()))))
        yield from reader.take_space()
        marker = yield from reader.expect(_KEY, _END)
    reader.arguments(pieces.end())
    reader.settle()
