"""Requests across the lives of an engine: with threads, and with processes that are killed."""

import asyncio
import os
import re
import signal
import threading

import msgspec
import pytest

from loraplex.core.clock import SystemClock
from loraplex.core.errors import (
    ConfigError,
    NotReadyError,
)
from loraplex.core.plan import CacheGroupCapacity
from loraplex.serving.engines.async_engine import AsyncEngine
from loraplex.serving.engines.in_flight_request import MAX_BLAME
from loraplex.serving.engines.link import ThreadLink
from support.fake_engine_process import (
    FakeEngineSettings,
    fake_engine_process,
    fake_engine_thread,
)
from support.fake_loader import fake_source
from support.fake_runner import FAKE_CAPACITY
from support.naming import naming
from support.scripted_engine import (
    READY,
    ended,
    tokens_of,
)

SOURCE = fake_source("digest", FAKE_CAPACITY.page_geometry)


class TestRealEngines:
    @pytest.mark.parametrize("factory", [fake_engine_thread, fake_engine_process])
    async def test_close_leaves_nothing(self, factory, temporary_folder, make_request, capfd):
        threads = set(threading.enumerate())
        engine = AsyncEngine("m", factory(), SystemClock())
        await engine.start()
        stream = engine.submit(make_request(1, "digest"), [SOURCE])
        tokens = []
        while not (outputs := await stream.take())[-1].finished:
            tokens += [t for o in outputs for d in o.deltas for t in d.token_ids]
        await engine.close()
        left = {t.name for t in set(threading.enumerate()) - threads if "loraplex" in t.name}
        assert left == set()
        assert capfd.readouterr().err == ""

    async def test_a_killed_process(self, temporary_folder, make_request):
        settings = FakeEngineSettings(step_seconds=0.02)
        engine = AsyncEngine("m", fake_engine_process(settings), SystemClock())
        await engine.start()
        requests = [make_request(i, "digest", n=2, max_tokens=30) for i in (1, 2)]
        expected = [await tokens_of(engine.submit(request, [SOURCE])) for request in requests]
        streams = [engine.submit(request, [SOURCE]) for request in requests]
        first = [await stream.take() for stream in streams]
        os.kill(engine._link.pid, signal.SIGKILL)
        for stream, outputs, tokens in zip(streams, first, expected, strict=True):
            assert await tokens_of(stream, outputs) == tokens
        assert engine.num_restarts == 1
        await engine.close()

    async def test_a_request_that_crashes_its_process(self, temporary_folder, make_request):
        """The suspect costs two crashes, and no other request fails."""
        calm = AsyncEngine("m", fake_engine_thread(), SystemClock())
        await calm.start()
        requests = [make_request(i, max_tokens=12) for i in range(1, 7)]
        expected = [await tokens_of(calm.submit(request, [])) for request in requests]
        await calm.close()
        settings = FakeEngineSettings(step_seconds=0.005, poison_prompt=(9, 9), poison_output=4)
        engine = AsyncEngine("m", fake_engine_process(settings), SystemClock())
        await engine.start()
        streams = [engine.submit(request, []) for request in requests[:3]]
        poison = engine.submit(make_request(9, prompt_token_ids=(9, 9), max_tokens=12), [])
        streams += [engine.submit(request, []) for request in requests[3:]]
        for stream, tokens in zip(streams, expected, strict=True):
            assert await tokens_of(stream) == tokens
        outputs = await ended(poison)
        assert outputs[-1].error.code == "request_crashed_engine"
        assert sum(len(d.token_ids) for o in outputs for d in o.deltas) <= 4
        assert engine.num_restarts == 2
        assert (await tokens_of(engine.submit(requests[0], []))) == expected[0]
        await engine.close()

    async def test_an_adapter_that_kills_its_process(self, temporary_folder, make_request):
        """The suspect costs six crashes, and no other request fails."""
        calm = AsyncEngine("m", fake_engine_thread(), SystemClock())
        await calm.start()
        requests = [make_request(i, max_tokens=60) for i in range(1, 4)]
        expected = [await tokens_of(calm.submit(request, [])) for request in requests]
        await calm.close()
        settings = FakeEngineSettings(step_seconds=0.002, poison_adapter="digest")
        engine = AsyncEngine("m", fake_engine_process(settings), SystemClock())
        await engine.start()
        streams = [engine.submit(request, []) for request in requests]
        poison = engine.submit(make_request(9, "digest"), [SOURCE])
        for stream, tokens in zip(streams, expected, strict=True):
            assert await tokens_of(stream) == tokens
        assert (await ended(poison))[-1].error.code == "request_crashed_engine"
        assert engine.num_restarts <= MAX_BLAME
        await engine.close()

    async def test_a_restarted_engine_with_less_memory(self, temporary_folder, make_request):
        """What no longer fits ends at once, and can be retried; the rest continues."""
        groups = (CacheGroupCapacity(num_blocks=2),)
        small = msgspec.structs.replace(FAKE_CAPACITY, cache_groups=groups, num_adapter_pages=1)
        settings = FakeEngineSettings(step_seconds=0.02)
        later = msgspec.structs.replace(settings, capacity=small)

        def start(epoch):
            return fake_engine_process(settings if epoch == 1 else later)(epoch)

        engine = AsyncEngine("m", start, SystemClock())
        await engine.start()
        fits = make_request(1, max_tokens=20)
        expected = await tokens_of(engine.submit(fits, []))
        large = fake_source("large", FAKE_CAPACITY.page_geometry, num_pages=2)
        lost = [
            engine.submit(make_request(2, max_tokens=100), []),
            engine.submit(make_request(3, "large", max_tokens=20), [large]),
        ]
        stream = engine.submit(fits, [])
        first = await stream.take()
        os.kill(engine._link.pid, signal.SIGKILL)
        for error in [(await ended(one))[-1].error for one in lost]:
            assert (error.code, error.retry_after_seconds) == ("engine_restarted", 5)
            assert re.search(naming("less memory"), error.message)
        assert await tokens_of(stream, first) == expected
        assert engine.capacity == small
        new = (await ended(engine.submit(make_request(4, max_tokens=100), [])))[-1].error
        assert new.code == "prompt_too_long"
        await engine.close()

    async def test_a_process_that_cannot_start(self, temporary_folder):
        failure = ConfigError("max_model_len is too long").to_info()
        engine = AsyncEngine(
            "m", fake_engine_process(FakeEngineSettings(failure=failure)), SystemClock()
        )
        with pytest.raises(ConfigError, match="max_model_len is too long"):
            await engine.start()
        await engine.close()

    async def test_closing_a_process_that_starts(self, temporary_folder):
        engine = AsyncEngine(
            "m", fake_engine_process(FakeEngineSettings(start_seconds=60)), SystemClock()
        )
        start = asyncio.create_task(engine.start())
        await asyncio.sleep(0.05)
        async with asyncio.timeout(60):
            await engine.close()
        with pytest.raises(NotReadyError):
            await start

    async def test_a_thread_that_fails_is_replaced(self, make_request, caplog):
        lives = []

        async def start(epoch):
            healthy = await fake_engine_thread()(epoch)
            lives.append(healthy)
            if len(lives) > 1:
                return healthy
            await healthy.close()
            return ThreadLink(lambda channel: (channel.send(READY), channel.receive(None), 1 / 0))

        engine = AsyncEngine("m", start, SystemClock())
        await engine.start()
        assert len((await tokens_of(engine.submit(make_request(), [])))[0]) == 3
        assert engine.num_restarts == 1
        await engine.close()
        assert "ZeroDivisionError" in caplog.text
