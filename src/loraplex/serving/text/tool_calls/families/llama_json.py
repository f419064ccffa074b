"""Llama 3.1 and later: the output is `{"name": .., "parameters": ..}`, perhaps after a tag.

Form of the chat templates of meta-llama/Llama-3.x-Instruct.
"""

from loraplex.serving.text.text_source import Steps
from loraplex.serving.text.tool_calls.format import CallSyntax, OurIds, json_call, read_whole
from loraplex.serving.text.tool_calls.json_calls import read_call
from loraplex.serving.text.tool_calls.reader import CallReader

_TAG = "<|python_tag|>"


class LlamaJson(OurIds):
    name = "llama3_json"
    markers = (_TAG,)
    syntax = CallSyntax(
        trigger="",
        before="",
        between="; ",
        after="",
        call=json_call("parameters"),
        first="{<",
        marked=CallSyntax(
            trigger=_TAG,
            before=_TAG,
            between="; ",
            after="",
            call=json_call("parameters"),
        ),
    )

    def recognises(self, template: str) -> bool:
        return _TAG in template or '"parameters": dictionary of argument' in template

    def read(self, reader: CallReader) -> Steps[None]:
        yield from read_whole(reader, _calls(reader), self.markers)


def _calls(reader: CallReader) -> Steps[None]:
    yield from reader.take_space()
    is_tagged = False
    while (yield from reader.optional(_TAG)) is not None:
        is_tagged = True
    yield from reader.take_space()
    while True:
        # Without the tag, a completion in JSON may look like a call.
        yield from read_call(reader, known_only=not is_tagged, markers=(_TAG,))
        # Some models leave the separator out, or take another.
        while (yield from reader.optional(";", ",", _TAG)) is not None:
            reader.settle()
        yield from reader.take_space()
        if not (yield from reader.peek()):
            return
