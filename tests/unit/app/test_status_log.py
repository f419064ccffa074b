"""The server's own log lines: progress, readiness, throughput."""

import asyncio
import logging

import pytest

from loraplex.app.status_log import logging_drain, logging_progress, logging_throughput, throughput
from loraplex.core.stats import AdapterTierStats, EngineStats
from loraplex.serving.draining import DrainReport

IDLE = EngineStats(prompt_tokens=100, generation_tokens=50)
BUSY = EngineStats(
    prompt_tokens=300,
    cached_tokens=50,
    generation_tokens=1050,
    num_running=4,
    num_waiting=2,
    blocks_held=1,
    blocks_free=3,
    adapters=AdapterTierStats(num_on_device=7),
)


def test_a_line_of_throughput():
    assert throughput("base", IDLE, BUSY, 10) == (
        "base: 20.0 prompt and 100.0 output tokens/s; 4 running, 2 waiting; KV cache 25% used, "
        "25% of the prompt tokens cached; 7 adapters on the device"
    )


def test_without_work_there_is_no_line():
    assert throughput("base", IDLE, IDLE, 10) == ""


def test_an_engine_that_was_started_again():
    line = throughput("base", BUSY, EngineStats(num_running=1), 10)
    assert line.startswith("base: 0.0 prompt and 0.0 output tokens/s; 1 running")


async def test_it_is_logged_while_there_is_work(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    snapshots = [{"base": IDLE}, {"base": BUSY}, {"base": EngineStats(prompt_tokens=300)}]
    async with logging_throughput(lambda: snapshots.pop(0), seconds=0.001):
        while snapshots:
            await _turn()
    assert [record.message.partition(":")[0] for record in caplog.records] == ["base"]


async def test_a_long_start_is_no_silence(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    async with logging_progress(0.001):
        while len(caplog.records) < 2:
            await _turn()
    assert caplog.records[0].message.startswith("still loading, ")


async def test_what_is_ready(run, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    server = run()
    await server.until_ready()
    (text,) = (one.message for one in caplog.records if " is ready\n" in one.message)
    url = f"http://127.0.0.1:{server.port('http')}"
    assert f"  OpenAI    {url}/v1\n" in text
    assert f"  console   {url}/console/\n" in text
    assert f"gRPC on port {server.port('grpc')}\n" in text
    assert " on cpu, " in text
    assert "  memory    no limit; --memory sets one\n" in text
    assert "  steps     at most 8 sequences and 512 tokens\n" in text
    assert f"  try       curl {url}/v1/" in text


async def _turn() -> None:
    await asyncio.sleep(0)


async def test_a_drain_is_logged_until_it_is_over(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    report = DrainReport(draining=True, in_work=3, drained=False, seconds_left=24.6)
    async with asyncio.timeout(60), logging_drain(lambda: report, 0.001):
        while not caplog.messages:
            await asyncio.sleep(0.001)
    assert caplog.messages[0] == "still stopping: 3 in-flight prompts have 25 s left"
