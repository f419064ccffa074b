"""Many streams at once at a real server: each says what it says alone, none waits for ever."""

import asyncio
import statistics

import pytest
from comparison.stream_load import Ask, Told, ask_at_once, ask_one, held_by, new_client

from support.capitals.corpus import COUNTRIES, bare_questions

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("server")]

NUM_STREAMS = 256
MODELS = ("capitals", "chinese", "japanese")


def chat(model: str, number: int, leaves_after: int | None = None) -> Ask:
    question = bare_questions(COUNTRIES[number % 24], "english")[0]
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 24,
        "temperature": 0,
    }
    return Ask(model, "/v1/chat/completions", body, leaves_after)


def ask_all(url: str, asks: list[Ask], *, at_once: bool = True) -> list[Told]:
    async def ask() -> list[Told]:
        async with new_client(url) as http:
            if at_once:
                return await ask_at_once(http, asks)
            return [await ask_one(http, each) for each in asks]

    return asyncio.run(ask())


def test_each_of_256_says_what_it_says_alone(server):
    distinct = [chat(model, number) for number in range(24) for model in MODELS]
    alone = [told.text for told in ask_all(server.url, distinct, at_once=False)]
    assert len(set(alone)) > 60, "a mix-up would show"
    chosen = [index % len(distinct) for index in range(NUM_STREAMS)]

    together = ask_all(server.url, [distinct[index] for index in chosen])

    assert [told.error for told in together if told.error] == []
    assert all(told.is_whole for told in together)
    assert [told.text for told in together] == [alone[index] for index in chosen]
    of_models = {
        model: statistics.median(t.first_seconds for t in together if t.label == model)
        for model in MODELS
    }
    first = [told.first_seconds for told in together]
    assert max(first) < 6 * statistics.median(first)
    assert max(of_models.values()) < 2 * min(of_models.values()), of_models


def test_streams_that_are_left_leave_nothing(server):
    def leave(number: int) -> None:
        asks = [chat(MODELS[n % 3], n, leaves_after=1) for n in range(number)]
        assert [told.error for told in ask_all(server.url, asks) if told.error] == []

    leave(128)
    before = held_by(server.process.pid, 0)
    for _ in range(4):
        leave(128)
    after = held_by(server.process.pid, 0)
    assert after.num_files["serving"] <= before.num_files["serving"] + 8
    grown = after.resident_bytes["serving"] - before.resident_bytes["serving"]
    assert grown < 16 << 20
