"""However the text of an output is split, its events add up to the same items."""

import itertools
import json
from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from loraplex.core.tools import FunctionTool, ToolUse
from loraplex.frontends.long_json import encoded
from loraplex.frontends.openai.responses_api import objects as wire
from loraplex.frontends.openai.responses_api.output_items import OutputItems
from loraplex.serving.text.chat_format import ChatFormat, CompletionSyntax
from support.examples import examples

TOOLS = ToolUse(tools=(FunctionTool(name="f"), FunctionTool(name="g")))
PIECES = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    '{"name": "f", "arguments": {"a": "é"}}',
    '<tool_call>{"name": "g", "arguments": {}}</tool_call>',
    "Yes.",
    " ",
    "\n",
    "<",
    "日本",
)
TEXTS = st.lists(st.sampled_from(PIECES), max_size=10).map("".join)
READINGS = st.builds(
    CompletionSyntax,
    chat_format=st.sampled_from(
        [
            ChatFormat(tool_calls=calls, reasoning=reasoning)
            for calls in ("hermes", "generic")
            for reasoning in ("think", "none")
        ]
    ),
    tool_use=st.sampled_from([None, TOOLS]),
)


def events_of(reading: CompletionSyntax, pieces: Sequence[str]) -> list[Any]:
    items = OutputItems(itertools.count().__next__)
    reader = reading.reader()
    events = []
    for index, piece in enumerate(pieces):
        delta = reader.push(piece, final=index == len(pieces) - 1)
        events.extend(items.add(delta))
    events.extend(items.end("completed"))
    assert items.so_far() == [event.item for event in events if isinstance(event, wire.ItemDone)]
    return events


def contents(events: Sequence[Any]) -> list[Any]:
    """Contents of the items, without random ids."""
    found: list[Any] = []
    for event in events:
        match event:
            case wire.ItemDone(item=wire.CallItem(name=name, arguments=arguments)):
                found.append((name, arguments))
            case wire.ItemDone(item=item):
                found.append((type(item), item.content[0].text))
    return found


def check(events: Sequence[Any]) -> None:
    """Numbers, places and deltas are right."""
    assert [event.sequence_number for event in events] == list(range(len(events)))
    added = [event.item.id for event in events if isinstance(event, wire.ItemAdded)]
    assert len(set(added)) == len(added)
    joined = dict.fromkeys(added, "")
    for event in events:
        if isinstance(event, wire.InItemEvent):
            assert added[event.output_index] == event.item_id
        if isinstance(event, wire.TextDelta | wire.ReasoningDelta | wire.ArgumentsDelta):
            assert event.delta
            joined[event.item_id] += event.delta
        if isinstance(event, wire.TextDone | wire.ReasoningDone):
            assert event.text == joined[event.item_id]
        if isinstance(event, wire.ArgumentsDone):
            assert event.arguments == joined[event.item_id]
    for number, event in enumerate(e for e in events if isinstance(e, wire.ItemDone)):
        assert (event.output_index, event.item.id) == (number, added[number])
    json.loads(b"[" + b",".join(b"".join(encoded(event)) for event in events) + b"]")


@examples(4)
@given(READINGS, TEXTS, st.data())
def test_any_split_gives_the_same_items(reading: CompletionSyntax, text: str, data: Any) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8).map(sorted))
    split = [text[start:end] for start, end in itertools.pairwise([0, *cuts, len(text)])]
    whole, pieces = events_of(reading, [text]), events_of(reading, split)
    check(whole)
    check(pieces)
    assert contents(pieces) == contents(whole)
    assert contents(events_of(reading, list(text) or [""])) == contents(whole)


@given(TEXTS)
def test_a_text_without_a_reader_stays_as_it_is(text: str) -> None:
    reading = CompletionSyntax(chat_format=ChatFormat(reasoning="none"))
    assert contents(events_of(reading, list(text) or [""])) == [(wire.MessageItem, text)]
