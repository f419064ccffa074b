"""The Responses API as the openai package sees it, with a backend of scripted texts."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseFunctionToolCall
from starlette.applications import Starlette

from loraplex.core.errors import RowFailedError
from loraplex.core.grammar import GrammarKind
from loraplex.core.principal import Principal
from loraplex.frontends.openai import openai_fallback_routes, openai_routes
from loraplex.frontends.openai.context import OpenAIOptions, StoreLimits
from loraplex.serving.text.chat_format import ChatFormat, read_completion_grammar
from support.echo_service import EchoService
from support.eventually import eventually
from support.served import served

WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Now.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
CLOCK: Any = {"type": "function", "name": "clock", "parameters": None, "strict": False}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
OTHER_CALL = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
MAX_STORED = 5


class Switch:
    app: Starlette

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.app(scope, receive, send)


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[Switch, str]]:
    switch = Switch()
    with served(switch) as url:
        yield switch, url


def by_tenant(headers: Any) -> Principal:
    return Principal(tenant=headers.get("x-tenant", "default"))


@pytest.fixture
def backend(server: tuple[Switch, str]) -> EchoService:
    switch, _ = server
    backend = EchoService(chat=ChatFormat(tool_calls="hermes", reasoning="think"))
    options = OpenAIOptions(stored_responses=StoreLimits(max_responses=MAX_STORED))
    switch.app = Starlette()
    switch.app.routes.extend(openai_routes(backend, options, by_tenant))
    switch.app.routes.extend(openai_fallback_routes())
    return backend


@pytest.fixture
def client(server: tuple[Switch, str], backend: EchoService) -> Iterator[openai.OpenAI]:
    _, url = server
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def stranger(server: tuple[Switch, str], backend: EchoService) -> Iterator[openai.OpenAI]:
    _, url = server
    headers = {"x-tenant": "other"}
    with openai.OpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, default_headers=headers
    ) as client:
        yield client


def create(client: openai.OpenAI, given: Any = "Hello", **fields: Any) -> Any:
    return client.responses.create(**{"model": "echo", "input": given} | fields)


def prompt_of(backend: EchoService, number: int = -1) -> str:
    return str(backend.requests[number].prompt)


# ---------------------------------------------------------------- whole


def test_a_text(client: openai.OpenAI, backend: EchoService) -> None:
    backend.scripts.append(("Good day.",))
    backend.num_cached_tokens = 3
    response = create(
        client, instructions="Be kind.", metadata={"a": "b"}, temperature=0.5, user="me"
    )
    assert isinstance(response, Response)
    assert prompt_of(backend) == "<s>system: Be kind.\nuser: Hello\nassistant: "
    assert response.output_text == "Good day."
    assert response.id.startswith("resp_")
    assert (response.object, response.status, response.error) == ("response", "completed", None)
    [message] = response.output
    assert message.id.startswith("msg_")
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert message.content[0].annotations == []
    assert (response.instructions, response.metadata) == ("Be kind.", {"a": "b"})
    assert (response.temperature, response.top_p, response.user) == (0.5, 1.0, "me")
    assert (response.tools, response.tool_choice) == ([], "auto")
    assert response.parallel_tool_calls is True
    assert (response.truncation, response.service_tier) == ("disabled", "default")
    reported = response.to_dict()
    assert reported["text"] == {"format": {"type": "text"}, "verbosity": "medium"}
    assert reported["reasoning"] == {"effort": None, "summary": None}
    assert response.completed_at >= response.created_at
    usage = response.usage
    assert usage.input_tokens == len("?system: Be kind.\nuser: Hello\nassistant: ")
    assert usage.input_tokens_details.cached_tokens == 3
    assert usage.output_tokens == len("Good day.") + 1
    assert usage.output_tokens_details.reasoning_tokens == 0
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert len(response.model_extra["loraplex"]["timing"]) == 1


def test_the_model_of_an_adapter(client: openai.OpenAI, backend: EchoService) -> None:
    digest = backend.register("fr").digest
    raw = client.responses.with_raw_response.create(model="fr", input="Hello")
    assert raw.headers["x-loraplex-adapter"] == digest
    assert raw.parse().model == "fr"
    create(client, extra_body={"lora_model": "fr"})
    assert backend.requests[-1].adapters == backend.requests[0].adapters


def test_sampling_and_its_extensions(client: openai.OpenAI, backend: EchoService) -> None:
    extra = {"top_k": 5, "seed": 7, "stop": ["\n"], "min_tokens": 2, "cache_salt": "x"}
    create(client, max_output_tokens=9, top_p=0.5, extra_body=extra)
    request = backend.requests[0]
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.top_p, sampling.top_k) == (9, 0.5, 5)
    assert (sampling.seed, sampling.stop, sampling.min_tokens) == (7, ("\n",), 2)
    assert request.cache_salt == "x"


def test_what_max_output_tokens_cuts(client: openai.OpenAI, backend: EchoService) -> None:
    backend.scripts.append(("Good day.",))
    response = create(client, max_output_tokens=4)
    assert (response.status, response.output_text) == ("incomplete", "Good")
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete"
    assert response.completed_at is None


def test_an_empty_output(client: openai.OpenAI, backend: EchoService) -> None:
    backend.scripts.append(("<think></think>",))
    response = create(client)
    assert [item.type for item in response.output] == ["message"]
    assert (response.status, response.output_text) == ("completed", "")


def test_items_of_every_kind(client: openai.OpenAI, backend: EchoService) -> None:
    backend.scripts.append((f"<think>Hm.</think>\n\nLet me look.\n{CALL}\n{OTHER_CALL}",))
    response = create(client, tools=[WEATHER, CLOCK])
    thought, message, first, second = response.output
    assert thought.id.startswith("rs_")
    assert thought.content[0].text == "Hm."
    assert thought.summary == []
    assert message.content[0].text == "Let me look."
    assert isinstance(first, ResponseFunctionToolCall)
    assert (first.name, json.loads(first.arguments)) == ("get_weather", {"city": "Paris"})
    assert first.id is not None
    assert first.id.startswith("fc_")
    assert first.call_id.startswith("call_")
    assert (second.name, second.arguments, second.status) == ("clock", "{}", "completed")
    assert response.tools[0].name == "get_weather"
    assert (
        0 < response.usage.output_tokens_details.reasoning_tokens <= len("<think>Hm.</think>\n\n")
    )
    shown = {"name": "clock", "strict": False}
    assert backend.renderings[0]["tools"] is not None
    assert backend.renderings[0]["tools"][1] == {"type": "function", "function": shown}


def test_reasoning_may_be_left_out(client: openai.OpenAI, backend: EchoService) -> None:
    backend.scripts.append(("<think>Hm.</think>Yes.",))
    response = create(client, extra_body={"include_reasoning": False})
    assert [item.type for item in response.output] == ["message"]


def test_log_probabilities(client: openai.OpenAI, backend: EchoService) -> None:
    backend.scripts.append(("<think>Hm.</think>Yes.",))
    response = create(client, include=["message.output_text.logprobs"], top_logprobs=2)
    logprobs = response.output[1].content[0].logprobs
    assert [entry.token for entry in logprobs] == [*"Yes.", "</s>"]
    assert len(logprobs[0].top_logprobs) == 2
    assert response.top_logprobs == 2
    create(client, top_logprobs=2)
    assert backend.requests[-1].sampling.logprobs is None


# ---------------------------------------------------------------- tools


def test_a_round_trip_of_a_function(client: openai.OpenAI, backend: EchoService) -> None:
    backend.scripts.append((f"<think>Hm.</think>{CALL}",))
    first = create(client, "weather?", tools=[WEATHER])
    call = first.output[1]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    given = [{"role": "user", "content": "weather?"}, *first.output, output]
    backend.scripts.append(("Sun.",))
    assert create(client, given, tools=[WEATHER]).output_text == "Sun."
    assert prompt_of(backend).endswith("user: weather?\nassistant: \ntool: sunny\nassistant: ")
    backend.scripts.append(("Sun.",))
    again = create(client, [output], tools=[WEATHER], previous_response_id=first.id)
    assert again.output_text == "Sun."
    assert prompt_of(backend) == prompt_of(backend, -2)
    assert again.previous_response_id == first.id


def test_a_call_that_was_cut_is_a_part_of_the_conversation(
    client: openai.OpenAI, backend: EchoService
) -> None:
    backend.scripts.append((CALL,))
    first = create(client, "weather?", tools=[WEATHER], max_output_tokens=CALL.index("ris"))
    [call] = first.output
    assert (first.status, call.arguments) == ("incomplete", '{"city": "Pa')
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "no such city"}
    given = [{"role": "user", "content": "weather?"}, call, output]
    backend.scripts.append(("Sun.",))
    assert create(client, given, tools=[WEATHER]).output_text == "Sun."
    assert prompt_of(backend).endswith("assistant: \ntool: no such city\nassistant: ")
    backend.scripts.append(("Sun.",))
    create(client, [output], tools=[WEATHER], previous_response_id=first.id)
    assert prompt_of(backend) == prompt_of(backend, -2)
    backend.scripts.append(("Sun.",))
    create(client, "Go on.", tools=[WEATHER], previous_response_id=first.id)
    assert prompt_of(backend) == "<s>user: weather?\nuser: Go on.\nassistant: "


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", ["get_weather", "clock"]),
        ({"type": "function", "name": "clock"}, ["clock"]),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "clock"}],
            },
            ["clock"],
        ),
    ],
)
def test_a_choice_of_tools(
    client: openai.OpenAI, backend: EchoService, choice: Any, names: list[str]
) -> None:
    backend.scripts.append((OTHER_CALL,))
    response = create(client, tools=[WEATHER, CLOCK], tool_choice=choice)
    assert response.output[0].name == "clock"
    assert response.status == "completed"
    grammar = backend.requests[0].sampling.grammar
    assert grammar is not None
    tool_use = read_completion_grammar(grammar.text).tool_use
    assert tool_use is not None
    assert [tool.name for tool in tool_use.tools] == names


def test_no_tool_may_be_called(client: openai.OpenAI, backend: EchoService) -> None:
    backend.scripts.append((CALL,))
    response = create(client, tools=[WEATHER], tool_choice="none")
    assert response.output_text == CALL
    assert [each["tools"] for each in backend.renderings] == [None]


# ---------------------------------------------------------------- formats


class Capital(pydantic.BaseModel):
    city: str


def test_parse(client: openai.OpenAI, backend: EchoService) -> None:
    backend.scripts.append(('{"city": "Paris"}',))
    response = client.responses.parse(model="echo", input="Hello", text_format=Capital)
    assert response.output_parsed == Capital(city="Paris")
    grammar = backend.requests[0].sampling.grammar
    assert grammar is not None
    content = read_completion_grammar(grammar.text).content
    assert content is not None
    assert content.kind is GrammarKind.JSON_SCHEMA
    assert json.loads(content.text)["required"] == ["city"]


def test_any_object(client: openai.OpenAI, backend: EchoService) -> None:
    create(client, text={"format": {"type": "json_object"}, "verbosity": "low"})
    grammar = backend.requests[0].sampling.grammar
    assert grammar is not None
    content = read_completion_grammar(grammar.text).content
    assert content is not None
    assert json.loads(content.text) == {"type": "object"}


# ---------------------------------------------------------------- streams


def test_events_of_a_text(client: openai.OpenAI, backend: EchoService) -> None:
    backend.scripts.append(("Hi.",))
    events = list(create(client, stream=True))
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(11))
    assert events[0].response.status == "in_progress"
    assert events[0].response.output == []
    assert [event.delta for event in events[4:7]] == ["H", "i", "."]
    message = events[-1].response.output[0]
    assert {event.item_id for event in events[3:9]} == {message.id}
    assert events[2].item.id == message.id
    assert events[2].item.status == "in_progress"
    assert events[9].item == message
    assert events[-1].response.usage.output_tokens == 4
    assert client.responses.retrieve(events[0].response.id) == events[-1].response


def test_events_of_every_kind(client: openai.OpenAI, backend: EchoService) -> None:
    backend.scripts.append((f"<think>Hm.</think>Look.\n{CALL}\n{OTHER_CALL}",))
    events = list(create(client, stream=True, tools=[WEATHER, CLOCK]))
    added = [e for e in events if e.type == "response.output_item.added"]
    assert [(e.output_index, e.item.type) for e in added] == [
        (0, "reasoning"),
        (1, "message"),
        (2, "function_call"),
        (3, "function_call"),
    ]
    joined = dict.fromkeys(range(4), "")
    for event in events:
        if event.type.endswith(".delta"):
            assert event.item_id == added[event.output_index].item.id
            joined[event.output_index] += event.delta
    assert joined[0] == "Hm."
    assert joined[1] == "Look."
    assert json.loads(joined[2]) == {"city": "Paris"}
    assert joined[3] == "{}"
    done = [e for e in events if e.type == "response.function_call_arguments.done"]
    assert [(e.name, e.arguments) for e in done] == [("get_weather", joined[2]), ("clock", "{}")]
    items = [e.item for e in events if e.type == "response.output_item.done"]
    assert items == events[-1].response.output
    assert [item.status for item in items] == ["completed"] * 4


def test_the_clients_accumulator(client: openai.OpenAI, backend: EchoService) -> None:
    backend.scripts.append((f"Look.\n{CALL}",))
    with client.responses.stream(model="echo", input="Hello", tools=[WEATHER]) as stream:
        list(stream)
        final = stream.get_final_response()
    assert final.output_text == "Look."
    assert final.output[1].name == "get_weather"
    backend.scripts.append(('{"city": "Rome"}',))
    with client.responses.stream(model="echo", input="Hello", text_format=Capital) as parsed:
        assert parsed.get_final_response().output_parsed == Capital(city="Rome")


def test_a_stream_that_is_cut(client: openai.OpenAI, backend: EchoService) -> None:
    backend.scripts.append((CALL,))
    last = list(create(client, stream=True, tools=[WEATHER], max_output_tokens=len(CALL) - 18))[-1]
    assert last.type == "response.incomplete"
    assert last.response.incomplete_details.reason == "max_output_tokens"
    [call] = last.response.output
    assert (call.type, call.status) == ("function_call", "incomplete")
    backend.scripts.append(("Yes.",))
    assert create(client, previous_response_id=last.response.id).output_text == "Yes."
    assert prompt_of(backend) == "<s>user: Hello\nuser: Hello\nassistant: "


def test_a_stream_that_fails(client: openai.OpenAI, backend: EchoService) -> None:
    backend.scripts.append(("Good day.",))
    backend.plant(RowFailedError("the row failed"), after_outputs=4)
    *_, error, failed = list(create(client, stream=True))
    assert (error.type, error.message) == ("error", "the row failed")
    assert failed.type == "response.failed"
    assert failed.sequence_number == error.sequence_number + 1
    assert failed.response.status == "failed"
    assert failed.response.error.code == "server_error"
    assert failed.response.output[0].content[0].text == "Good"
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(failed.response.id)


def test_the_wire_of_a_stream(server: tuple[Switch, str], backend: EchoService) -> None:
    backend.scripts.append(("Hi.",))
    body = {"model": "echo", "input": "Hello", "stream": True}
    text = httpx.post(f"{server[1]}/v1/responses", json=body, timeout=60).text
    events = [event.split("\n") for event in text.removesuffix("\n\n").split("\n\n")]
    for name, data in events:
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"
    assert "[DONE]" not in text


async def test_a_client_that_leaves(server: tuple[Switch, str], backend: EchoService) -> None:
    backend.delay_seconds = 0.02
    backend.scripts.append(("x" * 2000,))
    async with openai.AsyncOpenAI(base_url=f"{server[1]}/v1", api_key="x") as client:
        stream = await client.responses.create(model="echo", input="Hello", stream=True)
        await anext(aiter(stream))
        await stream.close()
    await asyncio.to_thread(eventually, lambda: len(backend.aborted) == 1)


# ---------------------------------------------------------------- what is kept


def test_a_conversation_goes_on(client: openai.OpenAI, backend: EchoService) -> None:
    backend.scripts.extend([("one",), ("two",), ("three",)])
    first = create(client, "1", instructions="Count.")
    second = create(client, "2", previous_response_id=first.id)
    create(client, "3", previous_response_id=second.id, instructions="On.")
    assert prompt_of(backend) == (
        "<s>system: On.\nuser: 1\nassistant: one\nuser: 2\nassistant: two\nuser: 3\nassistant: "
    )
    items = list(client.responses.input_items.list(second.id, order="asc"))
    assert [item.content[0].text for item in items] == ["1", "one", "2"]
    assert len({item.id for item in items}) == 3
    page = client.responses.input_items.list(second.id, limit=2)
    assert [item.content[0].text for item in page.data] == ["2", "one"]
    assert page.has_more
    assert [item.id for item in page] == [item.id for item in reversed(items)]


def test_a_conversation_goes_on_behind_a_text_that_was_cut(
    client: openai.OpenAI, backend: EchoService
) -> None:
    backend.scripts.extend([("<think>Hm.</think>Good day.",), ("two",)])
    first = create(client, "1", max_output_tokens=len("<think>Hm.</think>Good"))
    create(client, "2", previous_response_id=first.id)
    assert prompt_of(backend) == "<s>user: 1\nassistant: Good\nuser: 2\nassistant: "


def test_get_and_delete(client: openai.OpenAI, backend: EchoService) -> None:
    response = create(client)
    assert client.responses.retrieve(response.id) == response
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(response.id)
    client.responses.delete(response.id)
    for call in (
        client.responses.retrieve,
        client.responses.delete,
        client.responses.cancel,
        client.responses.input_items.list,
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            call(response.id)
        assert caught.value.code == "response_not_found"


def test_what_is_kept_does_not_come_as_a_stream(
    server: tuple[Switch, str], client: openai.OpenAI
) -> None:
    url = f"{server[1]}/v1/responses/{create(client).id}"
    assert httpx.get(f"{url}?stream=false", timeout=60).status_code == 200
    response = httpx.get(f"{url}?stream=true", timeout=60)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "stream")


def test_nothing_is_kept_of_what_shall_not_be(client: openai.OpenAI) -> None:
    response = create(client, store=False)
    assert response.model_extra["store"] is False
    with pytest.raises(openai.NotFoundError) as caught:
        create(client, previous_response_id=response.id)
    assert caught.value.param == "previous_response_id"


def test_a_server_that_keeps_nothing(
    server: tuple[Switch, str], client: openai.OpenAI, backend: EchoService
) -> None:
    switch, _ = server
    options = OpenAIOptions(stored_responses=StoreLimits(max_responses=0))
    switch.app = Starlette()
    switch.app.routes.extend(openai_routes(backend, options, by_tenant))
    assert create(client).model_extra["store"] is False
    assert create(client, store=True).model_extra["store"] is False


def test_the_oldest_are_evicted(client: openai.OpenAI) -> None:
    ids = [create(client).id for _ in range(MAX_STORED + 1)]
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(ids[0])
    assert client.responses.retrieve(ids[1]).id == ids[1]


def test_a_tenant_sees_its_own_alone(client: openai.OpenAI, stranger: openai.OpenAI) -> None:
    response = create(client)
    for call in (
        stranger.responses.retrieve,
        stranger.responses.delete,
        stranger.responses.input_items.list,
    ):
        with pytest.raises(openai.NotFoundError):
            call(response.id)
    with pytest.raises(openai.NotFoundError):
        create(stranger, previous_response_id=response.id)
    assert client.responses.retrieve(response.id).id == response.id


def test_truncation_leaves_out_the_oldest_turns(
    client: openai.OpenAI, backend: EchoService
) -> None:
    turns: list[Any] = [{"role": "developer", "content": "Rule."}]
    for number in range(9):
        turns.append({"role": "user", "content": f"{number}" + "x" * 900})
        turns.append({"role": "assistant", "content": "yes"})
    turns.append({"role": "user", "content": "last"})
    with pytest.raises(openai.BadRequestError) as caught:
        create(client, turns)
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "input"
    create(client, turns, truncation="auto", max_output_tokens=600)
    prompt = prompt_of(backend)
    assert prompt.startswith("<s>developer: Rule.\nuser: 6x")
    assert prompt.endswith("user: last\nassistant: ")


def test_input_tokens(client: openai.OpenAI, backend: EchoService) -> None:
    counted = client.responses.input_tokens.count(model="echo", input="Hello")
    assert counted.input_tokens == create(client).usage.input_tokens


# ---------------------------------------------------------------- what is refused


def message(**fields: Any) -> list[Any]:
    return [{"type": "message", "role": "user", **fields}]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [5]}, "input"),
        ({"input": [{}]}, "input[0].type"),
        ({"input": message()}, "input[0].content"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": message(content=[{"type": "input_image"}])}, "input[0].content[0].type"),
        ({"input": message(content=[{"type": "input_text"}])}, "input[0].content[0].text"),
        ({"input": message(content="x", id=5)}, "input[0].id"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "call_id": "c"}]}, "input[0].name"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input"),
        ({"input": [{"type": "reasoning", "content": [5]}]}, "input[0].content[0]"),
        ({"tools": [{"type": "web_serch"}]}, "tools[0].type"),
        ({"tools": [CLOCK, {"type": "mcp"}, {"type": "web_searches"}]}, "tools[2].type"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [CLOCK], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
        ({"tools": [CLOCK], "tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"tools": [CLOCK], "tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"text": {"verbosity": "huge"}}, "text.verbosity"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 500}, "temperature"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"include": ["everything"]}, "include"),
        ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
        ({"metadata": {"k" * 65: "x"}}, "metadata"),
        ({"metadata": {"k": 5}}, "metadata.k"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"truncation": "sometimes"}, "truncation"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
        ({"extra_body": {"max_tokens": 5}}, "max_tokens"),
        ({"extra_body": {"response_format": {"type": "text"}}}, "response_format"),
        ({"extra_body": {"n": 2}}, "n"),
        ({"extra_body": {"messages": [{}]}}, "messages"),
    ],
)
def test_what_is_wrong_is_named(
    client: openai.OpenAI, backend: EchoService, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**{"model": "echo", "input": "Hello"} | fields)
    assert caught.value.param == param
    assert param.split("[", maxsplit=1)[0].split(".", maxsplit=1)[0] in str(caught.value)
    assert not backend.finished, "an engine computed it"


@pytest.mark.parametrize("query", ["order=up", "limit=0", "limit=101", "limit=x", "after=msg_0"])
def test_a_wrong_page_is_named(
    server: tuple[Switch, str], client: openai.OpenAI, query: str
) -> None:
    response_id = create(client).id
    response = httpx.get(f"{server[1]}/v1/responses/{response_id}/input_items?{query}", timeout=60)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == query.split("=", maxsplit=1)[0]


def test_values_without_effect_are_returned(client: openai.OpenAI) -> None:
    response = create(
        client,
        background=False,
        service_tier="auto",
        safety_identifier="x",
        prompt_cache_key="y",
        max_tool_calls=3,
        reasoning={"effort": "low", "summary": "auto"},
        include=["reasoning.encrypted_content"],
        text={"verbosity": "low"},
        truncation="auto",
        parallel_tool_calls=False,
        extra_body={"prompt_cache_options": {}, "conversation": None, "n": 1},
    )
    reported = response.to_dict()
    assert (reported["safety_identifier"], reported["prompt_cache_key"]) == ("x", "y")
    assert (reported["max_tool_calls"], reported["truncation"]) == (3, "auto")
    assert reported["reasoning"] == {"effort": "low", "summary": "auto"}
    assert reported["text"] == {"format": {"type": "text"}, "verbosity": "low"}
    assert reported["parallel_tool_calls"] is False
