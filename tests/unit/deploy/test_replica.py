"""A replica without Ray: its server has a fake engine."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from loraplex.core.config import AdapterConfig, Config, ModelConfig
from loraplex.core.server_config import ServerConfig
from loraplex.demo import ADAPTER_PATHS, BASE_PATH
from loraplex.deploy.relay import Body, HttpCall, Recorded, Relay, ReplicaLost, Start
from loraplex.deploy.replica import Replica, started_replica
from loraplex.deploy.routing import Residents, adapter_key
from support.fake_engine_process import FakeEngineSettings, fake_engine_thread
from support.server_in_loop import CAPACITY

COMPLETION = {"model": "m:zh", "prompt": "x", "max_tokens": 12, "ignore_eos": True, "stream": True}


@contextlib.asynccontextmanager
async def replica(tmp_path: Path, **server: Any) -> AsyncIterator[Replica]:
    config = Config(
        server=ServerConfig(state_dir=str(tmp_path), **server),
        models={
            "m": ModelConfig(
                path=str(BASE_PATH),
                max_num_seqs=8,
                adapters={"zh": AdapterConfig(str(ADAPTER_PATHS["chinese"]), task_id=7)},
            )
        },
    )
    settings = FakeEngineSettings(capacity=CAPACITY)
    async with started_replica(config, lambda _: fake_engine_thread(settings)) as started:
        yield started


def call(path: str, body: Any, method: str = "POST") -> HttpCall:
    headers = ((b"content-type", b"application/json"), (b"x-request-id", b"same"))
    return HttpCall(method, path, b"", headers, json.dumps(body).encode())


async def response(replica: Replica, request: HttpCall) -> tuple[int, bytes, int]:
    """(status, body, number of parts of the record)."""
    messages = [m async for some in replica.respond(request) for m in some]
    (start,) = (m for m in messages if isinstance(m, Start))
    body = b"".join(m.data for m in messages if isinstance(m, Body))
    return start.status, body, sum(isinstance(m, Recorded) for m in messages)


def events(body: bytes) -> list[Any]:
    """The choices of each event, and the closing mark."""
    data = [line.removeprefix(b"data: ") for line in body.splitlines() if line]
    return [json.loads(line)["choices"] if line.startswith(b"{") else line for line in data]


async def test_a_replica_responds_records_and_reports(tmp_path: Path) -> None:
    async with replica(tmp_path) as started:
        status, body, num_parts = await response(started, call("/v1/completions", COMPLETION))
        assert (status, body[-14:]) == (200, b"data: [DONE]\n\n")
        assert num_parts > 2
        report = await started.report()
        assert report.num_slots == 8
        on_device = Residents(report.on_device)
        assert adapter_key("zh") in on_device
        assert adapter_key("task 7") in on_device
        assert adapter_key("ja") not in on_device
        started.check()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("replica-")] == []


async def test_two_replicas_share_a_state_directory_and_continue_each_other(
    tmp_path: Path,
) -> None:
    async with replica(tmp_path) as first, replica(tmp_path) as second:
        request = call("/v1/completions", {**COMPLETION, "seed": 5})
        _, whole, _ = await response(first, request)
        lost = []

        async def send(sent: HttpCall) -> AsyncGenerator[list[Any], None]:
            async for messages in (second if lost else first).respond(sent):
                for message in messages:
                    yield [message]
                    if not lost and isinstance(message, Body) and message.data.count(b"data"):
                        lost.append(sent)
                        raise ReplicaLost("planted")

        relayed = [m async for m in Relay(request, send).messages()]
        body = b"".join(m.data for m in relayed if isinstance(m, Body))
        assert lost
        assert events(body) == events(whole)


async def test_a_request_whose_ingress_has_gone_is_aborted(tmp_path: Path) -> None:
    async with replica(tmp_path) as started:
        long = {**COMPLETION, "max_tokens": 1000}
        responding = started.respond(call("/v1/completions", long))
        await anext(responding)
        await responding.aclose()
        engine = started._served.service.model("m").engine
        async with asyncio.timeout(60):
            while engine.num_requests:
                await asyncio.sleep(0.01)


async def test_changes_of_adapters_are_refused_by_name_without_declarations(
    tmp_path: Path,
) -> None:
    load = {"lora_name": "ja", "lora_path": str(ADAPTER_PATHS["japanese"])}
    async with replica(tmp_path) as started:
        for path, body in (
            ("/v1/load_lora_adapter", load),
            ("/v1/unload_lora_adapter", {"lora_name": "zh"}),
        ):
            status, refusal, _ = await response(started, call(path, body))
            assert status >= 400
            assert b"adapter_declarations" in refusal


async def test_changes_of_adapters_are_declared(tmp_path: Path) -> None:
    load = {"lora_name": "ja", "lora_path": str(ADAPTER_PATHS["japanese"])}
    shared = tmp_path / "declared"
    shared.mkdir()
    server = {
        "adapter_declarations": str(shared),
        "allowed_adapter_roots": (str(ADAPTER_PATHS["japanese"].parent),),
    }
    async with replica(tmp_path, **server) as first, replica(tmp_path, **server) as second:
        status, body, _ = await response(first, call("/v1/load_lora_adapter", load))
        assert status == 200, body
        wanted = call("/v1/completions", {**COMPLETION, "model": "ja"})
        assert (await response(second, wanted))[0] == 200


@pytest.mark.parametrize("path", ["/health/ready", "/v1/models", "/metrics"])
async def test_other_routes_work(path: str, tmp_path: Path) -> None:
    async with replica(tmp_path) as started:
        assert (await response(started, call(path, None, "GET")))[0] == 200
