"""Items of a response while its output streams."""

import itertools
from typing import Any

from loraplex.core.tools import CallDelta
from loraplex.frontends.openai.responses_api import objects as wire
from loraplex.frontends.openai.responses_api.output_items import OutputItems
from loraplex.serving.text.chat_format import CompletionDelta

THOUGHT = CompletionDelta(reasoning="hm")
TEXT = CompletionDelta(content="yes", parts=("yes",))


def calling(index: int, arguments: str = "") -> CompletionDelta:
    call = CallDelta(index=index, call_id=f"c{index}", name="f", arguments=arguments)
    return CompletionDelta(calls=(call,), parts=(call,))


def reported(
    *deltas: CompletionDelta, status: wire.Status | None = None
) -> tuple[OutputItems, list[Any]]:
    items = OutputItems(itertools.count().__next__)
    events = [event for delta in deltas for event in items.add(delta)]
    if status is not None:
        events.extend(items.end(status))
    return items, events


def test_just_the_last_item_is_incomplete_in_a_response_that_is():
    items, events = reported(THOUGHT, TEXT, calling(0, "{"), status="incomplete")
    assert [item.status for item in items.so_far()] == ["completed", "completed", "incomplete"]
    done = [event.item for event in events if isinstance(event, wire.ItemDone)]
    assert done == items.so_far()


def test_what_is_open_is_incomplete_so_far():
    for deltas in ((THOUGHT,), (TEXT,), (calling(0),)):
        [item] = reported(*deltas)[0].so_far()
        assert item.status == "incomplete"


def test_every_item_begins_in_progress():
    _, events = reported(THOUGHT, TEXT, calling(0), calling(1))
    added = [event for event in events if isinstance(event, wire.ItemAdded)]
    assert [event.item.status for event in added] == ["in_progress"] * 4
    assert [event.output_index for event in added] == [0, 1, 2, 3]


def test_a_call_without_arguments_has_no_delta():
    _, events = reported(calling(0), calling(1, "{}"), status="completed")
    deltas = [event.delta for event in events if isinstance(event, wire.ArgumentsDelta)]
    assert deltas == ["{}"]


def test_text_behind_a_call_is_another_message():
    items, _ = reported(TEXT, calling(0), TEXT, status="completed")
    kinds = [type(item) for item in items.so_far()]
    assert kinds == [wire.MessageItem, wire.CallItem, wire.MessageItem]


def test_a_response_of_nothing_has_an_empty_message():
    items, events = reported(status="completed")
    [item] = items.so_far()
    assert isinstance(item, wire.MessageItem)
    assert item.content[0].text == ""
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_when_the_output_begins():
    assert not reported()[0].has_begun
    assert not reported(THOUGHT)[0].has_begun
    assert reported(THOUGHT, TEXT)[0].has_begun
    assert reported(calling(0))[0].has_begun
