"""Hostile grammars, template arguments and lists at a real server: each gets a response in time,
and a concurrent stream continues."""

import asyncio
import json
import time

import httpx
import pytest
from comparison.stream_load import LoadRequest, held_by, new_client, send_one

from loraplex.core.grammar import GrammarKind
from support.hostile_grammars import hostile_grammars

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("server")]

RESPONSE_SECONDS = 30.0
GAP_SECONDS = 3.0
"""Longest gap of the concurrent stream: half a second of compiling, twice, on a busy machine."""
MOST_GROWTH = 200 << 20
CHAT = {
    "model": "capitals",
    "messages": [{"role": "user", "content": "x"}],
    "max_tokens": 3,
    "temperature": 0,
}
_FIELDS = {
    GrammarKind.JSON_SCHEMA: "guided_json",
    GrammarKind.REGEX: "guided_regex",
    GrammarKind.LARK: "guided_grammar",
    GrammarKind.EBNF: "ebnf",
    GrammarKind.CHOICE: "guided_choice",
}


def grammar_bodies():
    for name, grammar in hostile_grammars().items():
        if grammar.kind is GrammarKind.LLGUIDANCE:
            inner = {"type": "llguidance", "grammar": json.loads(grammar.text)}
            yield name, {**CHAT, "response_format": inner}
            continue
        is_json = grammar.kind in (GrammarKind.JSON_SCHEMA, GrammarKind.CHOICE)
        value = json.loads(grammar.text) if is_json else grammar.text
        yield name, {**CHAT, _FIELDS[grammar.kind]: value}
        if grammar.kind is GrammarKind.JSON_SCHEMA:
            function = {"name": "f", "parameters": value, "strict": True}
            tools = [{"type": "function", "function": function}]
            yield f"tool {name}", {**CHAT, "tools": tools, "tool_choice": "required"}


def list_bodies():
    nested: object = "x"
    for _ in range(80):
        nested = [nested]
    yield "stop-many", {**CHAT, "stop": ["x" * 4000] * 1_000}
    yield "stop-empty", {**CHAT, "stop": [""]}
    yield "bias-many", {**CHAT, "logit_bias": {str(n): 1 for n in range(300_000)}}
    yield "bias-huge", {**CHAT, "logit_bias": {"9" * 5000: 1}}
    yield "words-many", {**CHAT, "bad_words": ["word " * 800] * 1024}
    yield "arguments-many", {**CHAT, "chat_template_kwargs": {f"k{n}": "v" for n in range(200_000)}}
    yield "arguments-nested", {**CHAT, "chat_template_kwargs": {"k": nested}}
    yield (
        "tools-many",
        {
            **CHAT,
            "tools": [{"type": "function", "function": {"name": f"f{n}"}} for n in range(5000)],
        },
    )


BODIES = dict([*grammar_bodies(), *list_bodies()])


def test_each_has_a_response_and_a_stream_goes_on(server):
    asyncio.run(_beside_a_stream(server))


async def _beside_a_stream(server) -> None:
    endless = {"model": "capitals", "prompt": "x", "max_tokens": 1500, "ignore_eos": True}
    gaps: list[float] = []
    is_over = asyncio.Event()

    async def stream() -> None:
        async with new_client(server.url) as http:
            while not is_over.is_set():
                reported = await send_one(
                    http, LoadRequest("stream", "/v1/completions", endless, 60)
                )
                assert not reported.error
                gaps.append(reported.longest_gap)

    streaming = asyncio.create_task(stream())
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        await http.post("/v1/chat/completions", json={**CHAT, "guided_regex": "a"})
        before = held_by(server.process.pid, 0)
        slow, wrong = {}, {}
        for name, body in BODIES.items():
            start = time.monotonic()
            response = await http.post("/v1/chat/completions", json=body)
            if time.monotonic() - start > RESPONSE_SECONDS:
                slow[name] = time.monotonic() - start
            if response.status_code not in (200, 400, 413) or len(response.content) > 20_000:
                wrong[name] = (response.status_code, response.text[:200])
    is_over.set()
    await streaming
    after = held_by(server.process.pid, 0)
    assert (slow, wrong) == ({}, {})
    assert max(gaps) < GAP_SECONDS
    for process in ("serving", "engine"):
        grown = after.resident_bytes[process] - before.resident_bytes[process]
        assert grown < MOST_GROWTH, (process, grown)
