"""The Responses API with a real model."""

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest

from loraplex.testing.running_server import RunningServer

pytestmark = pytest.mark.xdist_group("server")

PROMPT = "What is the capital of France?"
SET_LIGHT: Any = {
    "type": "function",
    "name": "set_light",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"room": {"enum": ["kitchen", "bath"]}},
        "required": ["room"],
        "additionalProperties": False,
    },
}


class City(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    name: Literal["Paris", "Rome"]
    is_capital: bool


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def create(client: openai.OpenAI, **fields: Any) -> Any:
    requested = {"model": "capitals", "input": PROMPT, "max_output_tokens": 40, "temperature": 0}
    return client.responses.create(**requested | fields)


@pytest.mark.parametrize("model", ["capitals", "chinese"])
def test_a_response_says_what_a_chat_says(client: openai.OpenAI, model: str) -> None:
    response = create(client, model=model)
    chat = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": PROMPT}],
        max_tokens=40,
        temperature=0,
    )
    assert response.output_text == chat.choices[0].message.content
    assert response.usage.output_tokens == chat.usage.completion_tokens
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    counted = client.responses.input_tokens.count(model=model, input=PROMPT)
    assert counted.input_tokens == response.usage.input_tokens


def test_a_stream_adds_up_to_the_response(client: openai.OpenAI) -> None:
    events = list(create(client, stream=True))
    whole = create(client)
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text == events[-1].response.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_going_on_is_sending_the_whole_conversation(client: openai.OpenAI) -> None:
    first = create(client)
    after = create(client, input="And Italy?", previous_response_id=first.id)
    whole = [
        {"role": "user", "content": PROMPT},
        *first.output,
        {"role": "user", "content": "And Italy?"},
    ]
    sent = create(client, input=whole)
    assert after.output_text == sent.output_text
    assert after.usage.input_tokens == sent.usage.input_tokens
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        create(client, previous_response_id=first.id)


def test_parse_gives_a_pydantic_object(client: openai.OpenAI) -> None:
    response = client.responses.parse(
        model="capitals", input=PROMPT, text_format=City, max_output_tokens=60, temperature=0
    )
    assert isinstance(response.output_parsed, City)


def test_a_function_is_called_and_its_output_used(client: openai.OpenAI) -> None:
    choice = {"type": "function", "name": "set_light"}
    first = create(client, tools=[SET_LIGHT], tool_choice=choice, max_output_tokens=200)
    [call] = [item for item in first.output if item.type == "function_call"]
    assert json.loads(call.arguments)["room"] in ("kitchen", "bath")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    response = create(client, input=[output], previous_response_id=first.id, tools=[SET_LIGHT])
    assert response.status in ("completed", "incomplete")


def test_log_probabilities_are_of_the_text(client: openai.OpenAI) -> None:
    response = create(client, include=["message.output_text.logprobs"], top_logprobs=3)
    part = response.output[0].content[0]
    reported = b"".join(bytes(entry.bytes) for entry in part.logprobs).decode()
    assert reported.removesuffix("</s>").strip() == part.text.strip()
    assert all(len(entry.top_logprobs) == 3 for entry in part.logprobs)
