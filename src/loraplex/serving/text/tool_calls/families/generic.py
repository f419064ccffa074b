"""Models of no known family: an output that is a call in JSON, a list of them, or, anywhere, one
between Hermes' tags.
"""

from loraplex.serving.text.text_source import Steps
from loraplex.serving.text.tool_calls.families.hermes import Hermes
from loraplex.serving.text.tool_calls.format import CallSyntax, OurIds, json_call
from loraplex.serving.text.tool_calls.json_calls import read_call, read_calls
from loraplex.serving.text.tool_calls.json_text import MalformedError
from loraplex.serving.text.tool_calls.reader import CallReader


class Generic(OurIds):
    name = "generic"
    markers: tuple[str, ...] = Hermes.markers
    syntax = CallSyntax(
        trigger="",
        before="[",
        between=", ",
        after="]",
        call=json_call("arguments"),
        other_triggers=(Hermes.syntax.trigger,),
        first="[{<",
        marked=Hermes.syntax,
    )

    def recognises(self, template: str) -> bool:
        del template
        return True

    def read(self, reader: CallReader) -> Steps[None]:
        yield from reader.attempt(_whole_output(reader))
        yield from Hermes().read(reader)


def _whole_output(reader: CallReader) -> Steps[None]:
    yield from reader.take_space()
    match (yield from reader.peek()):
        case "[":
            yield from read_calls(reader, known_only=True, markers=Generic.markers)
        case "{":
            yield from read_call(reader, known_only=True, markers=Generic.markers)
        case _:
            raise MalformedError
