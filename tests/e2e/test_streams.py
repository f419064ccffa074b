"""Many concurrent streams at a real server: each outputs what it does alone, and each ends."""

import asyncio
import statistics

import pytest
from comparison.stream_load import (
    LoadRequest,
    LoadResult,
    held_by,
    new_client,
    send_at_once,
    send_one,
)

from support.capitals.corpus import COUNTRIES, phrased_queries
from support.eventually import eventually

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("server")]

NUM_STREAMS = 256
MODELS = ("capitals", "chinese", "japanese")


def chat(model: str, number: int, leaves_after: int | None = None) -> LoadRequest:
    prompt = phrased_queries(COUNTRIES[number % 24], "english")[0]
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 24,
        "temperature": 0,
    }
    return LoadRequest(model, "/v1/chat/completions", body, leaves_after)


def send_all(url: str, requests: list[LoadRequest], *, at_once: bool = True) -> list[LoadResult]:
    async def send() -> list[LoadResult]:
        async with new_client(url) as http:
            if at_once:
                return await send_at_once(http, requests)
            return [await send_one(http, each) for each in requests]

    return asyncio.run(send())


def test_each_of_256_says_what_it_says_alone(server):
    distinct = [chat(model, number) for number in range(24) for model in MODELS]
    alone = [reported.text for reported in send_all(server.url, distinct, at_once=False)]
    assert len(set(alone)) > 60, "a mix-up would show"
    chosen = [index % len(distinct) for index in range(NUM_STREAMS)]

    together = send_all(server.url, [distinct[index] for index in chosen])

    assert [reported.error for reported in together if reported.error] == []
    assert all(reported.is_whole for reported in together)
    assert [reported.text for reported in together] == [alone[index] for index in chosen]
    of_models = {
        model: statistics.median(t.first_seconds for t in together if t.label == model)
        for model in MODELS
    }
    first = [reported.first_seconds for reported in together]
    assert max(first) < 6 * statistics.median(first)
    assert max(of_models.values()) < 2 * min(of_models.values()), of_models


def test_streams_that_are_left_leave_nothing(server):
    def leave(number: int) -> None:
        requests = [chat(MODELS[n % 3], n, leaves_after=1) for n in range(number)]
        assert [
            reported.error for reported in send_all(server.url, requests) if reported.error
        ] == []

    leave(128)
    before = held_by(server.process.pid, 0)
    for _ in range(4):
        leave(128)
    # A connection that is left is closed as soon as serving sees it.
    max_files = before.num_files["serving"] + 8
    assert eventually(lambda: held_by(server.process.pid, 0).num_files["serving"] <= max_files)
    after = held_by(server.process.pid, 0)
    grown = after.resident_bytes["serving"] - before.resident_bytes["serving"]
    assert grown < 16 << 20
