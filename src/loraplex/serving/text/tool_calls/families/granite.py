"""Granite 3: `<|tool_call|>[{"name": .., "arguments": ..}]`, as ibm-granite's templates write it.

Some of them write the marker `<tool_call>`. Granite 4 writes as Hermes does.
"""

from loraplex.serving.text.text_source import Steps
from loraplex.serving.text.tool_calls.format import CallSyntax, OurIds, json_call, read_marked
from loraplex.serving.text.tool_calls.json_calls import read_calls
from loraplex.serving.text.tool_calls.reader import CallReader

_START, _OTHER_START = "<|tool_call|>", "<tool_call>"


class Granite(OurIds):
    name = "granite"
    markers = (_START, _OTHER_START)
    syntax = CallSyntax(
        trigger=_START,
        before=f"{_START}[",
        between=", ",
        after="]",
        call=json_call("arguments"),
        other_triggers=(_OTHER_START,),
    )

    def recognises(self, template: str) -> bool:
        return _START in template

    def read(self, reader: CallReader) -> Steps[None]:
        yield from read_marked(reader, (_START, _OTHER_START), _calls)


def _calls(reader: CallReader) -> Steps[None]:
    yield from reader.take_space()
    yield from read_calls(reader, markers=(_START, _OTHER_START))
