"""GET /v1/requests of a whole server: a request while it runs, and after its end."""

import asyncio
import json

from support.fake_engine_process import FakeEngineSettings


async def listed(server, query=""):
    status, text = await server.get(f"/v1/requests{query}")
    assert status == 200
    return json.loads(text)


async def test_a_request_while_it_runs_and_after_its_end(run):
    server = run(FakeEngineSettings(step_seconds=0.005))
    completion = await server.running_completion(max_tokens=200)
    async with asyncio.timeout(60):
        while not (now := await listed(server))["open"]:
            assert not now["requests"]
    (one,) = now["open"]
    assert (one["id"], one["tenant"], one["protocol"]) == (0, "default", "http")
    assert one["phase"] in ("admission", "waiting", "decode")
    assert (await completion)[0] == 200
    async with asyncio.timeout(60):
        while not (later := await listed(server, f"?after={now['next']}"))["requests"]:
            pass
    (same,) = later["requests"]
    assert (later["open"], same["phase"], same["status"]) == ([], "ended", 200)
    assert (same["request_id"], same["time"]) == (one["request_id"], one["time"])
    assert same["completion_tokens"] == 200
    phases = same["generations"][0]["phases"]
    assert all(phases[name] >= 0 for name in phases)
    assert phases["decode_ms"] > 0
    assert sum(phases.values()) <= same["seconds"] * 1000 + 1
