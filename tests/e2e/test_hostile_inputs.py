"""Hostile grammars, template arguments and lists at a real server: each gets a response in time,
and a concurrent stream continues."""

import asyncio
import json

import httpx
import pytest
from comparison.stream_load import held_by

from loraplex.core.grammar import GrammarKind
from support.cpu_seconds import cpu_seconds
from support.hostile_grammars import hostile_grammars

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("server")]

REPLY_SECONDS = 300.0
"""Limit for one that never gets a response."""
MAX_CPU_SECONDS = 1.5
"""Most processor time of the server's process between two tokens of a stream."""
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

    async def stream(http: httpx.AsyncClient) -> None:
        """Note the processor time that the server's process uses between two tokens."""
        body = endless | {"stream": True}
        while not is_over.is_set():
            async with http.stream("POST", "/v1/completions", json=body) as response:
                last = cpu_seconds(server.process.pid)
                async for line in response.aiter_lines():
                    assert '"error"' not in line
                    if line:
                        now = cpu_seconds(server.process.pid)
                        gaps.append(now - last)
                        last = now

    async with httpx.AsyncClient(base_url=server.url, timeout=REPLY_SECONDS) as http:
        streaming = asyncio.create_task(stream(http))
        await http.post("/v1/chat/completions", json={**CHAT, "guided_regex": "a"})
        before = held_by(server.process.pid, 0)
        wrong = {}
        for name, body in BODIES.items():
            response = await http.post("/v1/chat/completions", json=body)
            if response.status_code not in (200, 400, 413) or len(response.content) > 20_000:
                wrong[name] = (response.status_code, response.text[:200])
        is_over.set()
        await streaming
    after = held_by(server.process.pid, 0)
    assert wrong == {}
    assert max(gaps) < MAX_CPU_SECONDS
    for process in ("serving", "engine"):
        grown = after.resident_bytes[process] - before.resident_bytes[process]
        assert grown < MOST_GROWTH, (process, grown)
