"""Every field that a body may contain, and the chat body that the request becomes."""

from typing import Any

import pytest

from loraplex.core.errors import InvalidParameterError, RequestError
from loraplex.frontends.openai.responses_api import convert
from loraplex.frontends.openai.responses_api.input_items import MAX_ITEMS, read_input
from loraplex.frontends.openai.responses_api.schema import ResponsesBody
from loraplex.frontends.openai.responses_api.tools import shown_tools
from loraplex.frontends.openai.schema import ChatBody
from support.naming import naming

CLOCK = {
    "type": "function",
    "name": "clock",
    "description": "Now.",
    "parameters": {"type": "object"},
}


def body(**fields: Any) -> ResponsesBody:
    return ResponsesBody.model_validate({"model": "m", "input": "hi", **fields})


def chat(**fields: Any) -> ChatBody:
    checked = body(**fields)
    convert.check(checked)
    return convert.chat_body(checked, read_input(checked.input))


@pytest.mark.parametrize(
    "fields",
    [
        {"max_output_tokens": 1},
        {"background": False},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"metadata": {str(number): "v" for number in range(16)}},
        {"metadata": {"k" * 64: "v" * 512}},
        {"top_logprobs": 0},
        {"top_logprobs": 20},
        {"include": list(convert.INCLUDABLE)},
        {"text": {"format": {}}},
        {"text": {"format": {"type": "text"}}},
    ],
    ids=str,
)
def test_the_maximal_request(fields: dict[str, Any]):
    assert chat(**fields).logprobs in (None, "include" in fields)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"background": True}, "background"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"metadata": {str(number): "v" for number in range(17)}}, "metadata"),
        ({"metadata": {"k" * 65: "v"}}, "metadata"),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"include": ["message"]}, "include"),
        ({"text": {"format": {"schema": {}}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "schema": "x"}}}, "text.format.schema"),
    ],
    ids=str,
)
def test_one_more_is_refused(fields: dict[str, Any], param: str):
    with pytest.raises(RequestError) as caught:
        chat(**fields)
    assert caught.value.param == param


def test_a_conversation_has_so_many_items():
    [item] = read_input("hi")
    assert len(read_input([item] * MAX_ITEMS)) == MAX_ITEMS
    assert len(convert.chat_body(body(), [item] * MAX_ITEMS).messages) == MAX_ITEMS
    with pytest.raises(InvalidParameterError, match=naming(8193, 8192)) as caught:
        read_input([item] * (MAX_ITEMS + 1))
    assert caught.value.param == "input"
    with pytest.raises(InvalidParameterError, match=naming(8193, 8192)) as caught:
        convert.chat_body(body(), [item] * (MAX_ITEMS + 1))
    assert caught.value.param == "input"


@pytest.mark.parametrize("schema", [{"type": "object"}, {}, True])
def test_a_schema_is_not_nested_here(schema: Any):
    given = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    assert chat(text={"format": given}).response_format == {
        "type": "json_schema",
        "json_schema": given,
    }


def test_fields_of_another_name():
    made = chat(max_output_tokens=7, reasoning={"effort": "low"}, temperature=0.5)
    assert (made.max_completion_tokens, made.reasoning_effort, made.temperature) == (7, "low", 0.5)
    assert chat().max_completion_tokens is None
    assert chat(include=[convert.LOGPROBS], top_logprobs=3).top_logprobs == 3


def test_tools_are_nested_for_chats_and_flat_for_responses():
    made = chat(
        tools=[{**CLOCK, "strict": True}], tool_choice={"type": "function", "name": "clock"}
    )
    [tool] = made.tools
    function = {"name": "clock", "description": "Now.", "parameters": {"type": "object"}}
    assert tool == {"type": "function", "function": {**function, "strict": True}}
    assert made.tool_choice == {"type": "function", "function": {"name": "clock"}}
    assert shown_tools([CLOCK, {**CLOCK, "strict": True}]) == [
        {**CLOCK, "strict": False},
        {**CLOCK, "strict": True},
    ]


def test_some_tools_are_allowed():
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "x"}]}
    assert chat(tools=[CLOCK], tool_choice=choice).tool_choice == choice
