"""Phi-4-mini: `functools[{"name": .., "arguments": ..}]`, as microsoft/Phi-4-mini-instruct does."""

from loraplex.serving.text.text_source import Steps
from loraplex.serving.text.tool_calls.format import CallSyntax, OurIds, json_call, read_marked
from loraplex.serving.text.tool_calls.json_calls import read_calls
from loraplex.serving.text.tool_calls.reader import CallReader

_START = "functools["


class Phi4(OurIds):
    name = "phi4_mini_json"
    markers: tuple[str, ...] = ()
    syntax = CallSyntax(
        trigger=_START,
        before=_START,
        between=", ",
        after="]",
        call=json_call("arguments"),
    )

    def recognises(self, template: str) -> bool:
        return "functools" in template or "<|/tool|>" in template

    def read(self, reader: CallReader) -> Steps[None]:
        yield from read_marked(reader, (_START,), _calls)


def _calls(reader: CallReader) -> Steps[None]:
    yield from read_calls(reader, is_open=True)
