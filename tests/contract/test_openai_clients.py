"""The official clients beyond a plain call: openai's raw responses, retries and time-outs, and
LangChain's ChatOpenAI.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import openai
import pytest
from starlette.applications import Starlette

from loraplex.core.errors import InternalError, NotReadyError, QueueFullError
from loraplex.frontends.openai import openai_fallback_routes, openai_routes
from support.echo_service import EchoService
from support.eventually import eventually
from support.naming import naming
from support.served import served

# The tests import LangChain: it takes longer than they do, and each process reads this file.
if TYPE_CHECKING:
    from langchain_openai import ChatOpenAI

HELLO = [{"role": "user", "content": "hello"}]
OUTPUT = "echo: user: hello\nassistant: "


@pytest.fixture(scope="module")
def backend() -> EchoService:
    backend = EchoService()
    backend.register("fr")
    return backend


@pytest.fixture(scope="module")
def url(backend) -> Iterator[str]:
    app = Starlette()
    app.routes.extend(openai_routes(backend))
    app.routes.extend(openai_fallback_routes())
    with served(app) as url:
        yield f"{url}/v1"


@pytest.fixture
def client(url) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def chat_openai(url: str, **fields) -> "ChatOpenAI":
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(base_url=url, api_key="none", model="echo", max_retries=0, **fields)


# ------------------------------------------------------------------ openai


def test_a_raw_response_has_the_headers(client):
    raw = client.chat.completions.with_raw_response.create(model="fr", messages=HELLO)
    assert raw.headers["x-loraplex-adapter"]
    assert raw.parse().choices[0].message.content.startswith("echo+fr")
    assert raw.headers["x-request-id"] == raw.parse()._request_id


def test_a_streaming_response_is_read_line_by_line(client):
    with client.chat.completions.with_streaming_response.create(
        model="echo", messages=HELLO, stream=True
    ) as response:
        lines = list(response.iter_lines())
    assert lines[-2] == "data: [DONE]"


def test_what_another_attempt_helps_is_tried_again(client, backend):
    patient = client.with_options(max_retries=2)
    for error in (QueueFullError("full", retry_after_seconds=0), NotReadyError("not yet")):
        backend.plant(error)
        assert patient.completions.create(model="echo", prompt="x").choices[0].text == "echo: x"


@pytest.mark.parametrize(
    ("send", "code"),
    [
        (lambda client: client.moderations.create(input="x"), "unsupported_route"),
        (
            lambda client: client.completions.create(model="echo", prompt="x", suffix="y"),
            "unsupported_feature",
        ),
    ],
)
def test_what_no_attempt_helps_is_not(client, backend, send, code):
    num_before = len(backend.requests)
    with pytest.raises(openai.APIStatusError) as caught:
        send(client.with_options(max_retries=2))
    assert caught.value.code == code
    assert caught.value.response.request.headers["x-stainless-retry-count"] == "0"
    assert len(backend.requests) == num_before


def test_a_time_out_of_the_client_aborts_the_request(client, backend):
    backend.delay_seconds = 600
    num_before, seconds = len(backend.requests), 0.1
    try:
        while len(backend.requests) == num_before:  # none has arrived before its client left
            seconds *= 2
            with pytest.raises(openai.APITimeoutError):
                client.with_options(timeout=seconds).completions.create(model="echo", prompt="x")
        request = backend.requests[num_before]
        assert eventually(lambda: request.request_id in backend.aborted)
    finally:
        backend.delay_seconds = 0.0


def test_an_error_in_the_middle_of_a_stream(client, backend):
    backend.plant(InternalError("broke"), after_outputs=3)
    stream = client.chat.completions.create(model="echo", messages=HELLO, stream=True)
    with pytest.raises(openai.APIError) as caught:
        list(stream)
    assert "broke" in caught.value.message


async def test_the_async_client_streams_and_leaves(url, backend):
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(
            model="echo", messages=HELLO, stream=True, extra_body={"ignore_eos": True}
        )
        async for _ in stream:
            break
        await stream.close()
    request = backend.requests[-1]
    assert eventually(lambda: request.request_id in backend.aborted)


# ------------------------------------------------------------------ LangChain


def test_langchain_invokes(url):
    from langchain_core.messages import AIMessage, HumanMessage

    message = chat_openai(url, logprobs=True).invoke([HumanMessage("hello")])
    assert isinstance(message, AIMessage)
    assert message.content == OUTPUT
    assert message.usage_metadata["output_tokens"] == len(OUTPUT) + 1
    assert message.response_metadata["finish_reason"] == "stop"
    assert message.response_metadata["logprobs"]["content"][0]["token"] == "e"


def test_langchain_streams(url):
    chunks = list(chat_openai(url, stream_usage=True).stream("hello"))
    assert "".join(chunk.content for chunk in chunks) == OUTPUT
    assert len(chunks) > 5
    usages = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
    assert [usage["output_tokens"] for usage in usages] == [len(OUTPUT) + 1]


def test_langchain_batches_and_names_an_adapter(url, backend):
    from langchain_core.messages import HumanMessage, SystemMessage

    model = chat_openai(url, extra_body={"adapter_id": "fr"}, seed=7, temperature=0)
    messages = [[SystemMessage("s"), HumanMessage(text)] for text in "abc"]
    responses = model.batch(messages)
    assert [message.content for message in responses] == [
        f"echo+fr: system: s\nuser: {text}\nassistant: " for text in "abc"
    ]
    assert backend.requests[-1].sampling.seed == 7


async def test_langchain_asynchronously(url):
    model = chat_openai(url)
    assert (await model.ainvoke("hello")).content == OUTPUT
    assert "".join([chunk.content async for chunk in model.astream("hello")]) == OUTPUT


def test_langchain_completions(url):
    from langchain_openai import OpenAI

    model = OpenAI(base_url=url, api_key="none", model="echo", max_retries=0, best_of=1)
    assert model.invoke("hi") == "echo: hi"
    assert "".join(model.stream("hi")) == "echo: hi"


def test_langchain_binds_tools(url, backend):
    def weather(city: str) -> str:
        """The weather of a city."""
        return city

    model = chat_openai(url).bind_tools([weather], tool_choice="auto", parallel_tool_calls=False)
    assert model.invoke("hello").tool_calls == []
    assert backend.requests[-1].sampling.n == 1


def test_langchain_reports_an_error(url):
    with pytest.raises(openai.BadRequestError, match=naming("temperature", "[0, 100]", 1000.0)):
        chat_openai(url, temperature=1000).invoke("hello")
