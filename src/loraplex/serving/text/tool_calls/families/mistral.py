"""Mistral: `[TOOL_CALLS][{"name": .., "arguments": ..}]`, newer ones `[TOOL_CALLS]name[ARGS]{..}`.

As mistral-common writes them (its tokenizers up to v7, and from v11 on).
"""

import secrets
import string

from loraplex.core.tools import FunctionTool
from loraplex.serving.text.text_source import Steps
from loraplex.serving.text.tool_calls.format import (
    CallSyntax,
    arguments_schema,
    json_call,
    read_marked,
    read_named_arguments,
)
from loraplex.serving.text.tool_calls.json_calls import read_call, read_calls
from loraplex.serving.text.tool_calls.json_text import MalformedError
from loraplex.serving.text.tool_calls.lark import Lark
from loraplex.serving.text.tool_calls.reader import CallReader

_CALLS, _ARGS, _CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_ID_CHARACTERS = string.ascii_letters + string.digits
_ID_LENGTH = 9


class Mistral:
    """A list of objects."""

    name = "mistral"
    markers: tuple[str, ...] = (_CALLS, _ARGS, _CALL_ID)
    syntax = CallSyntax(
        trigger=_CALLS,
        before=f"{_CALLS}[",
        between=", ",
        after="]",
        call=json_call("arguments"),
    )

    def recognises(self, template: str) -> bool:
        return _CALLS in template

    def new_id(self) -> str:
        """Nine letters and digits: its chat templates refuse others."""
        return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(_ID_LENGTH))

    def read(self, reader: CallReader) -> Steps[None]:
        yield from read_marked(reader, (_CALLS,), _calls)


def _named_call(lark: Lark, tool: FunctionTool) -> str:
    return f"{lark.text(f'{tool.name}{_ARGS}')} {lark.json(arguments_schema(tool))}"


class MistralNamed(Mistral):
    """Reads a name and its arguments, each after a marker, in both forms of the family."""

    name = "mistral_named"
    syntax = CallSyntax(trigger=_CALLS, before=_CALLS, between=_CALLS, after="", call=_named_call)

    def recognises(self, template: str) -> bool:
        return _CALLS in template and _ARGS in template


def _calls(reader: CallReader) -> Steps[None]:
    yield from reader.take_space()
    match (yield from reader.peek()):
        case "[":
            yield from read_calls(reader, markers=(_CALLS,))
        case "{":
            yield from read_call(reader, markers=(_CALLS,))
        case _:
            yield from _named(reader)


def _named(reader: CallReader) -> Steps[None]:
    name = yield from reader.name()
    own_id = None
    if (yield from reader.peek()) == "{":  # as of models whose tokenizer has no such marker
        marker = _ARGS
    else:
        marker = yield from reader.expect(_ARGS, _CALL_ID)
    if marker == _CALL_ID:
        own_id, marker = yield from reader.until(_ARGS, before=(_CALLS,))
        if marker != _ARGS:
            raise MalformedError
    yield from read_named_arguments(reader, name, own_id, markers=(_CALLS,))
    reader.settle()
