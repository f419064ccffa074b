"""GLM-4.5: `<tool_call>NAME`, then pairs of `<arg_key>` and `<arg_value>`, then `</tool_call>`.

As the chat template of zai-org/GLM-4.5 writes it; values are text, strings without quotes.
"""

from typing import Final

from loraplex.core.tools import FunctionTool
from loraplex.serving.text.text_source import Steps
from loraplex.serving.text.tool_calls.format import CallSyntax, OurIds, read_marked
from loraplex.serving.text.tool_calls.json_text import MalformedError
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
_AFTER: Final = (_KEY, _END)
"""What ends a value that has no end tag."""


def _call_rule(lark: Lark, tool: FunctionTool) -> str:
    before = f"{_KEY}{{}}{_KEY_END}\n{_VALUE}"
    members = members_rule(lark, tool, before, f"{_VALUE_END}\n", _AFTER)
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
        yield from read_marked(reader, (_START,), _call, (_END,))


def _call(reader: CallReader) -> Steps[None]:
    text, marker = yield from reader.until(_KEY, _END, before=(_START,))
    name = text.strip()
    reader.check_name(name)
    if marker not in (_KEY, _END):
        raise MalformedError
    reader.begin_call(name)
    schemas = properties(reader.tools.get(name))
    pieces = ArgumentPieces()
    while marker == _KEY:
        key, value, marker = yield from _argument(reader)
        if key and value is not None:
            reader.arguments(pieces.member(key, json_of(value, schemas.get(key))))
    reader.arguments(pieces.end())
    reader.settle()


def _argument(reader: CallReader) -> Steps[tuple[str, str | None, str]]:
    """Read (a key, its value if it has one, the next marker): tags may be missing."""
    text, marker = yield from reader.until(_KEY_END, _VALUE, *_AFTER, may_end=True)
    key = text.strip()
    if marker not in (_KEY_END, _VALUE):
        return key, None, marker
    has_tag = marker == _VALUE or (yield from reader.optional(_VALUE, may_end=True)) is not None
    value, marker = yield from reader.until(_VALUE_END, *_AFTER, may_end=True)
    if marker == _VALUE_END:
        _, marker = yield from reader.until(*_AFTER, before=(_START,), may_end=True)
    elif has_tag:
        value = value.removesuffix("\n")
    if not has_tag:
        value = value.strip()
    return key, value if has_tag or value else None, marker
