"""A response that one server began and another one ends, by the record of the first."""

import contextlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from loraplex.app.front_ends import FrontEnds, front_ends
from loraplex.core.config import Config, ModelConfig
from loraplex.core.server_config import ServerConfig
from loraplex.demo import BASE_PATH
from loraplex.serving.continuation import (
    Admitted,
    Continuation,
    RecordPart,
    Taken,
    Unrecorded,
    continuing,
)
from support.fake_engine_process import FakeEngineSettings, fake_engine_thread
from support.server_in_loop import CAPACITY

SAMPLED = {"model": "m", "prompt": "x", "max_tokens": 12, "ignore_eos": True, "stream": True}
HEADERS = {"x-request-id": "same", "content-type": "application/json"}


@contextlib.asynccontextmanager
async def server(state_dir: Path) -> AsyncIterator[FrontEnds]:
    """A server with a fake engine and without ports."""
    config = Config(
        server=ServerConfig(state_dir=str(state_dir), persist_adapters=False),
        models={"m": ModelConfig(path=str(BASE_PATH))},
    )
    settings = FakeEngineSettings(capacity=CAPACITY)
    async with front_ends(config, lambda _: fake_engine_thread(settings)) as served:
        await served.start()
        yield served


async def respond(
    served: FrontEnds,
    path: str,
    body: Mapping[str, Any],
    former: Sequence[RecordPart] = (),
) -> tuple[bytes, list[RecordPart]]:
    """The body of the response, and its record."""
    record: list[RecordPart] = []
    transport = httpx.ASGITransport(served.app)
    with continuing(Continuation(record.append, former)):
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            response = await client.post(path, content=json.dumps(body), headers=HEADERS)
    return response.content, record


def passed_on(record: Sequence[RecordPart]) -> list[RecordPart]:
    """The record as another process receives it."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(record), type=list[RecordPart])


@pytest.fixture
async def servers(tmp_path: Path) -> AsyncIterator[tuple[FrontEnds, FrontEnds]]:
    async with server(tmp_path / "a") as first, server(tmp_path / "b") as second:
        yield first, second


CHAT = {"messages": [{"role": "user", "content": "x"}]}
REQUESTS = {
    "completion": ("/v1/completions", SAMPLED),
    "two sequences": ("/v1/completions", {**SAMPLED, "n": 2, "logprobs": 2}),
    "chat": ("/v1/chat/completions", {**SAMPLED, **CHAT, "prompt": None}),
    "triton": (
        "/v2/models/tensorrt_llm_bls/generate_stream",
        {"text_input": "x", "max_tokens": 12, "stream": True},
    ),
}


@pytest.mark.parametrize("name", REQUESTS)
async def test_a_continued_response_has_the_bytes_of_an_undisturbed_one(
    name: str, servers: tuple[FrontEnds, FrontEnds]
) -> None:
    first, second = servers
    path, body = REQUESTS[name]
    whole, record = await respond(first, path, body)
    assert isinstance(record[0], Admitted), whole
    assert b"error" not in whole, whole
    for kept in range(1, len(record) + 1):
        continued, again = await respond(second, path, body, passed_on(record[:kept]))
        assert continued == whole, kept
        assert again[:kept] == record[:kept]


@pytest.mark.parametrize("more", [{"prompt_logprobs": 1}, {"n": 2, "best_of": 3}], ids=repr)
async def test_a_whole_response_is_computed_again_but_for_its_times(
    more: Mapping[str, Any], servers: tuple[FrontEnds, FrontEnds]
) -> None:
    path, body = "/v1/completions", {**SAMPLED, "stream": False, **more}
    whole, record = await respond(servers[0], path, body)
    for kept in range(1, len(record) + 1):
        continued, _ = await respond(servers[1], path, body, passed_on(record[:kept]))
        assert json.loads(continued)["choices"] == json.loads(whole)["choices"]


async def test_a_continued_response_can_be_continued(servers: tuple[FrontEnds, FrontEnds]) -> None:
    first, second = servers
    path, body = REQUESTS["completion"]
    whole, record = await respond(first, path, body)
    _, again = await respond(second, path, body, record[:3])
    assert (await respond(first, path, body, again[:6]))[0] == whole


async def test_another_request_is_not_continued(servers: tuple[FrontEnds, FrontEnds]) -> None:
    path, body = REQUESTS["completion"]
    _, record = await respond(servers[0], path, body)
    refused, again = await respond(servers[1], path, {**body, "prompt": "y"}, record[:3])
    assert json.loads(refused)["error"]["code"] == "engine_restarted"
    assert b"cannot be continued" in refused
    assert again == []


async def test_a_request_of_several_prompts_has_no_record(
    servers: tuple[FrontEnds, FrontEnds],
) -> None:
    _, record = await respond(servers[0], "/v1/completions", {**SAMPLED, "prompt": ["x", "y"]})
    assert any(isinstance(part, Unrecorded) for part in record)


async def test_no_time_of_this_machine_is_recorded(servers: tuple[FrontEnds, FrontEnds]) -> None:
    _, record = await respond(servers[0], *REQUESTS["completion"])
    outputs = [out for part in record if isinstance(part, Taken) for out in part.outputs]
    assert outputs[-1].finished
    assert all(out.timing is None for out in outputs)
