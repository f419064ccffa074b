"""Responses that repeat a long prompt in each of many outputs: their memory, who writes them."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import pytest

from loraplex.frontends.long_json import encoded
from loraplex.frontends.openai import context
from loraplex.serving.local_texts import LocalTexts
from loraplex.serving.response_memory import ResponseMemory
from support.described_app import TEST_HOST, described_app
from support.echo_service import EchoService

NUM_TOKENS = 3000
PROMPT = "x" * NUM_TOKENS
IDS = [120] * NUM_TOKENS
N = 20
TRITON = "/v2/models/ensemble/generate"


def with_inputs(path: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    if path == TRITON:
        return {"text_input": PROMPT, "max_tokens": 1, "num_return_sequences": N, **fields}
    return {"model": "echo", "prompt": PROMPT, "max_tokens": 1, "n": N, **fields}


async def post(service: EchoService, path: str, fields: Mapping[str, Any]) -> httpx.Response:
    transport = httpx.ASGITransport(described_app(service))
    async with httpx.AsyncClient(transport=transport, base_url=f"http://{TEST_HOST}") as client:
        return await client.post(path, json=with_inputs(path, fields))


REPEATING = [
    ("/v1/completions", {"echo": True}),
    ("/v1/completions", {"echo": True, "prompt": IDS}),
    ("/v1/completions", {"return_token_ids": True}),
    ("/v1/completions", {"echo": True, "stream": True}),
    (TRITON, {}),
]


@pytest.mark.parametrize(("path", "fields"), REPEATING)
async def test_more_than_a_tenant_may_have_is_refused_before_the_work(
    path: str, fields: Mapping[str, Any]
) -> None:
    service = EchoService()
    service.responses = ResponseMemory(N * NUM_TOKENS, N * NUM_TOKENS)
    response = await post(service, path, fields)
    assert response.status_code == 400
    assert "max_bodies_bytes" in response.text
    assert "(prompt " in response.text
    assert service.responses.num_bytes == 0
    assert not service.finished
    once = {"num_return_sequences": 1} if path == TRITON else {"n": 1}
    assert (await post(service, path, {**fields, **once})).status_code == 200


@pytest.mark.parametrize(
    ("path", "fields"),
    [("/v1/completions", {}), (TRITON, {"exclude_input_in_output": True})],
)
async def test_a_prompt_that_is_not_repeated_does_not_count(
    path: str, fields: Mapping[str, Any]
) -> None:
    service = EchoService()
    service.responses = ResponseMemory(0, 0)
    assert (await post(service, path, fields)).status_code == 200


@pytest.mark.parametrize(
    ("path", "fields"), [("/v1/completions", {"echo": True, "prompt": IDS}), (TRITON, {})]
)
async def test_no_event_loop_writes_a_prompt_many_times(
    monkeypatch: pytest.MonkeyPatch, path: str, fields: Mapping[str, Any]
) -> None:
    threads: list[threading.Thread] = []
    decode = LocalTexts.detokenize

    def counted(self: LocalTexts, token_ids: Sequence[int], **options: Any) -> str:
        if len(token_ids) >= NUM_TOKENS:
            threads.append(threading.current_thread())
        return decode(self, token_ids, **options)

    monkeypatch.setattr(LocalTexts, "detokenize", counted)
    response = await post(EchoService(), path, fields)
    assert response.status_code == 200, response.text[:500]
    assert response.text.count(PROMPT) >= N
    assert len(threads) == 1
    assert threading.current_thread() not in threads


async def test_many_choices_are_encoded_in_bounded_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[bytes] = []

    def seen(body: Any) -> list[bytes]:
        pieces.extend(encoded(body))
        return pieces

    monkeypatch.setattr(context, "encoded", seen)
    fields = {"prompt": IDS, "echo": True, "return_token_ids": True}
    body = (await post(EchoService(), "/v1/completions", fields)).json()
    assert [choice["prompt_token_ids"] for choice in body["choices"]] == [IDS] * N
    assert [choice["index"] for choice in body["choices"]] == list(range(N))
    assert max(map(len, pieces)) < sum(map(len, pieces)) / 10
