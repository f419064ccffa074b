"""Hermes, Qwen 2.5 and 3, and many others: `<tool_call>{"name": .., "arguments": ..}</tool_call>`.

As the chat templates of NousResearch/Hermes-3 and Qwen/Qwen3 write it.
"""

from loraplex.serving.text.text_source import Steps
from loraplex.serving.text.tool_calls.format import CallSyntax, OurIds, json_call, read_marked
from loraplex.serving.text.tool_calls.json_calls import read_call
from loraplex.serving.text.tool_calls.reader import CallReader

_START, _END = "<tool_call>", "</tool_call>"


class Hermes(OurIds):
    name = "hermes"
    markers = (_START, _END)
    syntax = CallSyntax(
        trigger=_START,
        before=f"{_START}\n",
        between=f"\n{_END}\n{_START}\n",
        after=f"\n{_END}",
        call=json_call("arguments"),
    )

    def recognises(self, template: str) -> bool:
        return _START in template

    def read(self, reader: CallReader) -> Steps[None]:
        yield from read_marked(reader, (_START,), _call, (_END,))


def _call(reader: CallReader) -> Steps[None]:
    yield from reader.take_space()
    yield from read_call(reader, markers=(_START, _END))
