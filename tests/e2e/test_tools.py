"""Tools with a real model: it knows nothing of them, and the grammar still makes it call."""

import json
from typing import Any

import openai
import pytest

from loraplex.testing.running_server import RunningServer

pytestmark = pytest.mark.xdist_group("server")

REQUESTED = [{"role": "user", "content": "What is the capital of France?"}]
NUMBER = {"type": "integer", "minimum": 0, "maximum": 99}
SET_LIGHT: Any = {
    "type": "function",
    "function": {
        "name": "set_light",
        "parameters": {
            "type": "object",
            "properties": {
                "room": {"enum": ["kitchen", "bath"]},
                "level": NUMBER,
                "blinks": {"type": "boolean"},
            },
            "required": ["room", "level"],
            "additionalProperties": False,
        },
    },
}
STOP: Any = {
    "type": "function",
    "function": {"name": "stop", "parameters": {"properties": {}, "additionalProperties": False}},
}


@pytest.fixture
def client(server: RunningServer) -> Any:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def complete(client: openai.OpenAI, **fields: Any) -> Any:
    requested = {
        "model": "capitals",
        "messages": REQUESTED,
        "tools": [SET_LIGHT, STOP],
        "max_tokens": 200,
        "temperature": 0,
    }
    return client.chat.completions.create(**requested | fields)


def check(call: Any) -> None:
    arguments = json.loads(call.function.arguments)
    if call.function.name == "stop":
        assert arguments == {}
        return
    assert call.function.name == "set_light"
    assert set(arguments) <= {"room", "level", "blinks"}
    assert arguments["room"] in ("kitchen", "bath")
    assert 0 <= arguments["level"] <= 99


@pytest.mark.parametrize("model", ["capitals", "chinese"])
def test_a_required_call(client: openai.OpenAI, model: str) -> None:
    [choice] = complete(
        client, model=model, tool_choice="required", parallel_tool_calls=False
    ).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    [call] = choice.message.tool_calls
    check(call)


def test_a_named_function(client: openai.OpenAI) -> None:
    for tool in (SET_LIGHT, STOP):
        [choice] = complete(client, tool_choice=tool).choices
        assert choice.finish_reason == "stop"
        [call] = choice.message.tool_calls
        assert call.function.name == tool["function"]["name"]
        check(call)


def test_streamed_as_whole(client: openai.OpenAI) -> None:
    fields = {"tool_choice": "required", "parallel_tool_calls": False, "temperature": 1, "seed": 5}
    whole = complete(client, **fields).choices[0].message.tool_calls[0].function
    name, arguments = "", ""
    for chunk in complete(client, stream=True, **fields):
        for call in chunk.choices[0].delta.tool_calls or () if chunk.choices else ():
            name += call.function.name or ""
            arguments += call.function.arguments
    assert (name, arguments) == (whole.name, whole.arguments)


def test_several_choices_at_any_temperature(client: openai.OpenAI) -> None:
    response = complete(
        client, tool_choice="required", parallel_tool_calls=False, n=8, temperature=1.5, seed=1
    )
    calls = [call for choice in response.choices for call in choice.message.tool_calls]
    assert len(calls) == len({call.id for call in calls}) == 8
    for call in calls:
        check(call)


def test_the_model_decides(client: openai.OpenAI) -> None:
    [choice] = complete(client, max_tokens=24).choices
    assert choice.message.tool_calls is None
    assert choice.message.content


def test_a_schema_that_cannot_be_kept_to(client: openai.OpenAI) -> None:
    function = {"name": "f", "parameters": {"properties": {"a": {"type": "whole"}}}}
    tools = [{"type": "function", "function": function}]
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, tools=tools, tool_choice="required")
    assert caught.value.param == "tools"
    assert "'f'" in str(caught.value)
