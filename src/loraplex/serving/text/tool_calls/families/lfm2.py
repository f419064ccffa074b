"""LFM2: `<|tool_call_start|>[f(a=1, b='x'), g()]<|tool_call_end|>`, in the syntax of Python.

As LiquidAI's chat templates write it. The same as JSON is read, too: a system prompt can require
it, and some templates write the calls of earlier turns in this way.
"""

from loraplex.serving.text.text_source import Steps
from loraplex.serving.text.tool_calls.families.pythonic import call_rule, read_python_calls
from loraplex.serving.text.tool_calls.format import CallSyntax, OurIds, read_marked
from loraplex.serving.text.tool_calls.json_calls import read_call, read_calls
from loraplex.serving.text.tool_calls.json_text import CutError
from loraplex.serving.text.tool_calls.reader import CallReader

_START, _END = "<|tool_call_start|>", "<|tool_call_end|>"
_TOOLS = "<|tool_list_start|>"
"""A marker of templates that leave the calls of earlier turns out."""


class Lfm2(OurIds):
    name = "lfm2"
    markers = (_START, _END)
    syntax = CallSyntax(
        trigger=_START,
        before=f"{_START}[",
        between=", ",
        after=f"]{_END}",
        call=call_rule,
    )

    def recognises(self, template: str) -> bool:
        return _START in template or _TOOLS in template

    def read(self, reader: CallReader) -> Steps[None]:
        yield from read_marked(reader, (_START,), _calls, (_END,))


def _calls(reader: CallReader) -> Steps[None]:
    yield from reader.take_space()
    markers = (_START, _END)
    if (yield from reader.peek()) == "{":
        yield from read_call(reader, markers=markers)
    else:
        yield from reader.expect("[")
        yield from reader.take_space()
        if (yield from reader.peek()) == "{":
            yield from read_calls(reader, is_open=True, markers=markers)
        else:
            yield from read_python_calls(reader)
    if (yield from reader.optional(_END)) is not None:
        reader.settle()
        yield from _skip_echo(reader)


def _skip_echo(reader: CallReader) -> Steps[None]:
    """Drop the list of calls that these models often repeat before a second end marker."""
    if (yield from reader.visible(0))[0] != "[":
        return
    try:
        _, marker = yield from reader.until(_END, before=(_START,), may_end=True)
    except CutError:
        return
    if marker == _END:
        reader.settle()
