"""Tools and reasoning as the openai package sees them, with a backend of scripted texts."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from starlette.applications import Starlette

from loraplex.core.grammar import GrammarKind
from loraplex.core.tools import ToolMode
from loraplex.frontends.openai import openai_fallback_routes, openai_routes
from loraplex.serving.text.chat_format import ChatFormat, read_completion_grammar
from support.echo_service import EchoService
from support.served import served

HELLO = [{"role": "user", "content": "weather in Paris?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Now.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CLOCK: Any = {"type": "function", "function": {"name": "clock"}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
OTHER_CALL = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'


class Switch:
    app: Starlette

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.app(scope, receive, send)


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[Switch, str]]:
    switch = Switch()
    with served(switch) as url:
        yield switch, url


@pytest.fixture
def backend(server: tuple[Switch, str]) -> EchoService:
    switch, _ = server
    backend = EchoService(chat=ChatFormat(tool_calls="hermes", reasoning="think"))
    switch.app = Starlette()
    switch.app.routes.extend(openai_routes(backend))
    switch.app.routes.extend(openai_fallback_routes())
    return backend


@pytest.fixture
def client(server: tuple[Switch, str], backend: EchoService) -> Iterator[openai.OpenAI]:
    _, url = server
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def complete(client: openai.OpenAI, **fields: Any) -> Any:
    fields = {"model": "echo", "messages": HELLO, "tools": [WEATHER, CLOCK]} | fields
    return client.chat.completions.create(**fields)


def test_a_call_is_distinguished_from_content(client: openai.OpenAI, backend: EchoService) -> None:
    backend.scripts.append((f"Let me look.\n\n{CALL}\n{OTHER_CALL}",))
    response = complete(client)
    [choice] = response.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me look."
    first, second = choice.message.tool_calls
    assert (first.type, first.function.name) == ("function", "get_weather")
    assert json.loads(first.function.arguments) == {"city": "Paris"}
    assert (second.function.name, second.function.arguments) == ("clock", "{}")
    assert first.id.startswith("call_")
    assert first.id != second.id
    assert response.usage.completion_tokens > 0
    assert [each["tools"] for each in backend.renderings] == [[WEATHER, CLOCK]]
    assert backend.requests[0].sampling.grammar is None


def test_content_is_null_if_there_are_only_calls(
    client: openai.OpenAI, backend: EchoService
) -> None:
    backend.scripts.append((CALL,))
    message = complete(client).choices[0].message
    assert message.content is None
    assert message.tool_calls


def test_a_response_without_calls_is_unchanged(client: openai.OpenAI, backend: EchoService) -> None:
    backend.scripts.append(("It is 5 < 7.\n",))
    [choice] = complete(client).choices
    assert choice.message.content == "It is 5 < 7.\n"
    assert choice.message.tool_calls is None
    assert choice.finish_reason == "stop"


def test_streamed_deltas(client: openai.OpenAI, backend: EchoService) -> None:
    backend.scripts.append((f"Well.\n{CALL}\n{OTHER_CALL}",))
    chunks = list(complete(client, stream=True, stream_options={"include_usage": True}))
    *deltas, last = [chunk.choices[0] for chunk in chunks if chunk.choices]
    calls = [call for delta in deltas for call in delta.delta.tool_calls or ()]
    beginnings = [call for call in calls if call.id is not None]
    assert [(c.index, c.type, c.function.name) for c in beginnings] == [
        (0, "function", "get_weather"),
        (1, "function", "clock"),
    ]
    assert all(c.function.name is None for c in calls if c.id is None)
    arguments = "".join(c.function.arguments for c in calls if c.index == 0)
    assert json.loads(arguments) == {"city": "Paris"}
    assert len([c for c in calls if c.index == 0]) > 5
    assert "".join(delta.delta.content or "" for delta in deltas) == "Well."
    assert last.finish_reason == "tool_calls"
    assert chunks[-1].usage.completion_tokens > 0


def test_the_clients_accumulator(client: openai.OpenAI, backend: EchoService) -> None:
    backend.scripts.append((f"<think>\nHm.\n</think>\n\n{CALL}\n{OTHER_CALL}",))
    with client.chat.completions.stream(
        model="echo", messages=HELLO, tools=[WEATHER, CLOCK]
    ) as stream:
        kinds = {event.type for event in stream}
        final: Any = stream.get_final_completion()
    [choice] = final.choices
    assert "tool_calls.function.arguments.done" in kinds
    assert [c.function.name for c in choice.message.tool_calls] == ["get_weather", "clock"]
    assert choice.message.tool_calls[0].function.arguments == '{"city": "Paris"}'
    assert choice.finish_reason == "tool_calls"


def test_each_choice_has_its_own_calls(client: openai.OpenAI, backend: EchoService) -> None:
    backend.scripts.append((CALL, "No.", f"{OTHER_CALL}{CALL}"))
    choices = complete(client, n=3).choices
    names = [[c.function.name for c in x.message.tool_calls or ()] for x in choices]
    assert names == [["get_weather"], [], ["clock", "get_weather"]]
    ids = [c.id for x in choices for c in x.message.tool_calls or ()]
    assert len(set(ids)) == 3
    assert [x.finish_reason for x in choices] == ["tool_calls", "stop", "tool_calls"]


def test_each_stream_has_its_own_calls(client: openai.OpenAI, backend: EchoService) -> None:
    backend.scripts.append((CALL, OTHER_CALL))
    found: dict[int, str] = {0: "", 1: ""}
    for chunk in complete(client, n=2, stream=True):
        for choice in chunk.choices:
            for call in choice.delta.tool_calls or ():
                assert call.index == 0
                found[choice.index] += call.function.name or ""
                found[choice.index] += call.function.arguments
    assert found == {0: 'get_weather{"city": "Paris"}', 1: "clock{}"}


def test_a_cut_call_ends_by_length(client: openai.OpenAI, backend: EchoService) -> None:
    backend.scripts.append((CALL,))
    [choice] = complete(client, max_tokens=len(CALL) - 18).choices
    assert choice.finish_reason == "length"
    assert '{"city": "Paris"}'.startswith(choice.message.tool_calls[0].function.arguments)


def test_log_probabilities_are_of_all_tokens(client: openai.OpenAI, backend: EchoService) -> None:
    backend.scripts.append((CALL,))
    [choice] = complete(client, logprobs=True).choices
    assert "".join(entry.token for entry in choice.logprobs.content) == f"{CALL}</s>"
    backend.scripts.append((CALL,))
    pieces = [
        entry.token
        for chunk in complete(client, logprobs=True, stream=True)
        for entry in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else ())
    ]
    assert "".join(pieces) == f"{CALL}</s>"


def test_a_required_call_is_held_to_the_grammar(
    client: openai.OpenAI, backend: EchoService
) -> None:
    backend.scripts.append((CALL,))
    assert complete(client, tool_choice="required").choices[0].finish_reason == "tool_calls"
    grammar = backend.requests[0].sampling.grammar
    assert grammar is not None
    assert grammar.kind is GrammarKind.MESSAGE
    tool_use = read_completion_grammar(grammar.text).tool_use
    assert tool_use is not None
    assert tool_use.mode is ToolMode.REQUIRED
    assert [tool.name for tool in tool_use.tools] == ["get_weather", "clock"]


def test_a_named_function_ends_with_stop(client: openai.OpenAI, backend: EchoService) -> None:
    backend.scripts.append((OTHER_CALL,))
    choice = {"type": "function", "function": {"name": "clock"}}
    [response] = complete(client, tool_choice=choice).choices
    assert response.finish_reason == "stop"
    assert response.message.tool_calls[0].function.name == "clock"
    grammar = backend.requests[0].sampling.grammar
    assert grammar is not None
    tool_use = read_completion_grammar(grammar.text).tool_use
    assert tool_use is not None
    assert [tool.name for tool in tool_use.tools] == ["clock"]


def test_allowed_tools(client: openai.OpenAI, backend: EchoService) -> None:
    backend.scripts.append((OTHER_CALL,))
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "clock"}}]}
    complete(client, tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert [each["tools"] for each in backend.renderings] == [[WEATHER, CLOCK]]
    assert backend.requests[0].sampling.grammar is not None


def test_no_tool_may_be_called(client: openai.OpenAI, backend: EchoService) -> None:
    backend.scripts.append((CALL,))
    [choice] = complete(client, tool_choice="none").choices
    assert choice.message.content == CALL
    assert choice.message.tool_calls is None
    assert [each["tools"] for each in backend.renderings] == [None]


def test_the_response_format_binds_where_no_tool_is_called(
    client: openai.OpenAI, backend: EchoService
) -> None:
    backend.scripts.append((CALL,))
    complete(client, response_format={"type": "json_object"})
    grammar = backend.requests[0].sampling.grammar
    assert grammar is not None
    parts = read_completion_grammar(grammar.text)
    assert parts.content is not None
    assert parts.content.kind is GrammarKind.JSON_SCHEMA
    assert parts.tool_use is not None


def test_a_conversation_with_calls(client: openai.OpenAI, backend: EchoService) -> None:
    call = {"id": "call_1", "type": "function"}
    call["function"] = {"name": "clock", "arguments": "{}"}  # type: ignore[assignment]
    messages = [
        {"role": "developer", "content": "Be brief."},
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "12:00"},
    ]
    backend.scripts.append(("Noon.",))
    assert complete(client, messages=messages).choices[0].message.content == "Noon."
    with pytest.raises(openai.BadRequestError, match=r"messages\[3\].tool_call_id"):
        complete(client, messages=[*messages[:3], {"role": "tool", "content": "12:00"}])


def test_a_conversation_with_calls_for_a_template_that_knows_none(
    server: tuple[Switch, str], client: openai.OpenAI
) -> None:
    backend = EchoService(chat=ChatFormat(knows_tools=False, writes_calls=False))
    app = Starlette()
    app.routes.extend(openai_routes(backend))
    server[0].app = app
    call: Any = {"id": "call_1", "function": {"name": "clock", "arguments": "{}"}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [{**call, "type": "function"}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "12:00"},
    ]
    complete(client, messages=messages)
    [request] = backend.requests
    assert str(request.prompt).endswith(
        'assistant: [{"name": "clock", "arguments": {}}]\n'
        "user: Result of clock:\n\n12:00\nassistant: "
    )


# ---------------------------------------------------------------- reasoning


def test_reasoning_is_apart(client: openai.OpenAI, backend: EchoService) -> None:
    backend.scripts.append(("<think>\nIt is <near>.\n</think>\n\nParis.",))
    message = complete(client, tools=openai.NOT_GIVEN).choices[0].message
    assert message.content == "Paris."
    assert message.reasoning_content == "It is <near>."
    assert message.reasoning == "It is <near>."


def test_reasoning_that_the_prompt_began(client: openai.OpenAI, backend: EchoService) -> None:
    backend.prompt_ending = "<think>\n"
    backend.scripts.append((f"So.\n</think>\n{CALL}",))
    [choice] = complete(client).choices
    assert choice.message.reasoning_content == "So."
    assert choice.message.content is None
    assert choice.message.tool_calls[0].function.name == "get_weather"


def test_streamed_reasoning(client: openai.OpenAI, backend: EchoService) -> None:
    backend.scripts.append((f"<think>a </thin b</think>\n\nOne.\n{CALL}",))
    deltas = [chunk.choices[0].delta for chunk in complete(client, stream=True)]
    assert "".join(getattr(d, "reasoning_content", None) or "" for d in deltas) == "a </thin b"
    assert "".join(d.content or "" for d in deltas) == "One."
    assert sum(len(d.tool_calls or ()) for d in deltas) > 5


def test_reasoning_is_left_out_or_left_in(client: openai.OpenAI, backend: EchoService) -> None:
    text = "<think>Hm.</think>Paris."
    backend.scripts.extend([(text,), (text,)])
    out = complete(client, extra_body={"include_reasoning": False}).choices[0].message
    assert out.content == "Paris."
    assert not hasattr(out, "reasoning_content")
    kept = complete(client, extra_body={"separate_reasoning": False}).choices[0].message
    assert kept.content == text


# ---------------------------------------------------------------- what is refused


def named(name: Any, **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": ["x"]}, "tools[0]"),
        ({"tools": [{"type": "web_serch"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [named("")]}, "tools[0].function.name"),
        ({"tools": [named("a b")]}, "tools[0].function.name"),
        ({"tools": [named("x" * 65)]}, "tools[0].function.name"),
        ({"tools": [named("f"), named("f")]}, "tools[1].function.name"),
        ({"tools": [named("f", parameters=[])]}, "tools[0].function.parameters"),
        ({"tools": [named("f", parameters={"type": "array"})]}, "tools[0].function.parameters"),
        ({"tools": [named("f", strict="yes")]}, "tools[0].function.strict"),
        ({"tools": [named("f", description=1)]}, "tools[0].function.description"),
        ({"tools": [named(f"f{i}") for i in range(129)]}, "tools"),
        ({"tools": [named("f", parameters={"x": "y" * 200_000})]}, "tools"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": named("unknown")}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "x"}}}, "tool_choice"),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}},
            "tool_choice",
        ),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
    ],
)
def test_wrong_tools_are_named(
    client: openai.OpenAI, backend: EchoService, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, **fields)
    assert str(caught.value.param).startswith(param)
    assert backend.requests == []
