"""Nemotron-H: `<TOOLCALL>[{"name": .., "arguments": ..}]</TOOLCALL>`.

As the chat templates of nvidia's Nemotron-Nano-v2 and Llama-Nemotron write it. Nemotron-3 writes as
Qwen3-Coder does.
"""

from loraplex.serving.text.text_source import Steps
from loraplex.serving.text.tool_calls.format import CallSyntax, OurIds, json_call, read_marked
from loraplex.serving.text.tool_calls.json_calls import read_call, read_calls
from loraplex.serving.text.tool_calls.reader import CallReader

_START, _END = "<TOOLCALL>", "</TOOLCALL>"


class Nemotron(OurIds):
    name = "nemotron_json"
    markers = (_START, _END)
    syntax = CallSyntax(
        trigger=_START,
        before=f"{_START}[",
        between=", ",
        after=f"]{_END}",
        call=json_call("arguments"),
    )

    def recognises(self, template: str) -> bool:
        return _START in template

    def read(self, reader: CallReader) -> Steps[None]:
        yield from read_marked(reader, (_START,), _calls, (_END,))


def _calls(reader: CallReader) -> Steps[None]:
    yield from reader.take_space()
    is_one = (yield from reader.peek()) == "{"  # the brackets are missing
    yield from (read_call if is_one else read_calls)(reader, markers=(_START, _END))
