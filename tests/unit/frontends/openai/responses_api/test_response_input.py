"""Items of an input, and the messages that they become."""

from typing import Any

import pytest

from loraplex.core.errors import InvalidParameterError, UnsupportedFeatureError
from loraplex.frontends.openai.responses_api.input_items import messages_of, read_input

USER = {"role": "user", "content": "hi"}
THOUGHT = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
SUMMED_UP = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "so"}]}
REPLY = {"role": "assistant", "content": [{"type": "output_text", "text": "yes"}]}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "12:00"}


def call(call_id: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "clock", "arguments": "{}"}


def tool_call(call_id: str) -> dict[str, Any]:
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": "clock", "arguments": "{}"},
    }


def messages(*items: dict[str, Any], instructions: str | None = None) -> list[dict[str, Any]]:
    return messages_of(read_input(list(items)), instructions)


def test_a_text_is_a_message_of_the_user():
    assert messages_of(read_input("hi"), None) == [USER]
    assert messages_of(read_input("hi"), "Be.") == [{"role": "system", "content": "Be."}, USER]


def test_parts_are_lines():
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert messages({"role": "developer", "content": parts}) == [
        {"role": "developer", "content": "a\nb"}
    ]


def test_one_turn_of_the_assistant_is_one_message():
    assert messages(USER, THOUGHT, REPLY, call("c1"), call("c2"), OUTPUT) == [
        USER,
        {
            "role": "assistant",
            "content": "yes",
            "reasoning_content": "hm",
            "tool_calls": [tool_call("c1"), tool_call("c2")],
        },
        {"role": "tool", "tool_call_id": "c1", "name": "clock", "content": "12:00"},
    ]


def test_calls_alone_have_no_content():
    assert messages(SUMMED_UP, call("c1"))[0] == {
        "role": "assistant",
        "content": None,
        "reasoning_content": "so",
        "tool_calls": [tool_call("c1")],
    }


@pytest.mark.parametrize(
    "items",
    [(REPLY, REPLY), (call("c1"), REPLY), (REPLY, THOUGHT), (call("c1"), OUTPUT, REPLY)],
)
def test_a_turn_ends(items: tuple[dict[str, Any], ...]):
    assert [m["role"] for m in messages(*items)].count("assistant") == 2


def test_a_message_of_the_user_ends_the_turn():
    assert messages(THOUGHT, USER, REPLY) == [
        {"role": "assistant", "content": None, "reasoning_content": "hm"},
        USER,
        {"role": "assistant", "content": "yes"},
    ]


def test_full_items_keep_their_ids():
    [given] = read_input([{"role": "user", "content": "hi", "id": "msg_1"}])
    assert given == {
        "id": "msg_1",
        "type": "message",
        "role": "user",
        "status": "completed",
        "content": [{"type": "input_text", "text": "hi"}],
    }
    first, second = read_input([USER, USER])
    assert first["id"] != second["id"]
    assert read_input([first, second]) == [first, second]
    full = read_input([THOUGHT, REPLY, call("c1"), OUTPUT])
    assert read_input(full) == full


def test_an_id_has_128_characters_at_most():
    longest = "i" * 128
    assert read_input([USER | {"id": longest}])[0]["id"] == longest
    for wrong in ("", "i" * 129, 5):
        with pytest.raises(InvalidParameterError, match="1 to 128 characters") as caught:
            read_input([USER, USER | {"id": wrong}])
        assert caught.value.param == "input[1].id"


def test_a_call_may_have_no_text_of_arguments_but_a_name():
    assert read_input([call("c1") | {"arguments": ""}])[0]["arguments"] == ""
    for field in ("name", "call_id"):
        with pytest.raises(InvalidParameterError) as caught:
            read_input([call("c1") | {field: ""}])
        assert caught.value.param == f"input[0].{field}"


def test_a_refusal_is_a_text_of_the_assistant():
    refusal = {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}
    assert messages(refusal) == [{"role": "assistant", "content": "no"}]
    [given] = read_input([refusal])
    assert given["content"] == [
        {"type": "output_text", "text": "no", "annotations": [], "logprobs": []}
    ]


def test_reasoning_itself_comes_before_its_summary():
    assert messages(THOUGHT | SUMMED_UP | {"content": THOUGHT["content"]})[0] == {
        "role": "assistant",
        "content": None,
        "reasoning_content": "hm",
    }


def test_a_call_behind_an_output_is_another_turn():
    turns = messages(call("c1"), OUTPUT, call("c2"))
    assert [turn["role"] for turn in turns] == ["assistant", "tool", "assistant"]


def test_a_list_of_texts_is_an_output():
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert messages(call("c1"), OUTPUT | {"output": parts})[-1]["content"] == "a\nb"


def test_an_output_needs_its_call():
    with pytest.raises(InvalidParameterError, match="'c2'"):
        messages(call("c1"), OUTPUT | {"call_id": "c2"})
    with pytest.raises(InvalidParameterError, match="'c1'"):
        messages(OUTPUT, call("c1"))


@pytest.mark.parametrize("kind", ["item_reference", "web_search_call", "custom_tool_call", "x"])
def test_other_items_are_refused_by_name(kind: str):
    with pytest.raises(UnsupportedFeatureError, match=f"'{kind}'") as caught:
        read_input([USER, {"type": kind}])
    assert caught.value.param == "input[1].type"
