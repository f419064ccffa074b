"""Log probabilities of long prompts: which thread decodes them, and how many at a time."""

import threading
from collections.abc import Mapping
from typing import Any

import httpx
import pytest

from loraplex.core.output import (
    LOGPROBS_PIECE,
    EngineOutput,
    PackedLogprobs,
    PromptLogprobs,
    TokenLogprob,
)
from loraplex.core.request import RequestId
from loraplex.core.stats import EngineStats
from loraplex.engine.messages import StepDone, decode_event, encode
from support.described_app import TEST_HOST, described_app
from support.echo_service import EchoService

NUM_TOKENS = 3000
PROMPT = "x" * NUM_TOKENS


@pytest.fixture
def decoding(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """Threads that decoded a piece, in order."""
    threads: list[threading.Thread] = []
    decode = PackedLogprobs._piece

    def counted(self: PackedLogprobs[Any], index: int) -> list[Any]:
        threads.append(threading.current_thread())
        found = decode(self, index)
        assert len(found) <= LOGPROBS_PIECE
        return found

    monkeypatch.setattr(PackedLogprobs, "_piece", counted)
    return threads


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": PROMPT, "prompt_logprobs": 20}),
        ("/v1/completions", {"prompt": PROMPT, "prompt_logprobs": 20, "n": 3}),
        ("/v1/completions", {"prompt": [PROMPT] * 4, "echo": True, "logprobs": 20}),
        ("/v1/completions", {"prompt": PROMPT, "echo": True, "logprobs": 20, "stream": True}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": PROMPT}], "prompt_logprobs": 20},
        ),
        (
            "/generate",
            {"inputs": PROMPT, "parameters": {"details": True, "decoder_input_details": True}},
        ),
    ],
)
async def test_no_event_loop_decodes_those_of_a_long_prompt(
    decoding: list[threading.Thread], path: str, fields: Mapping[str, object]
) -> None:
    transport = httpx.ASGITransport(described_app(EchoService()))
    async with httpx.AsyncClient(transport=transport, base_url=f"http://{TEST_HOST}") as client:
        body = {"model": "echo", "max_tokens": 1, **fields} if path.startswith("/v1") else fields
        response = await client.post(path, json=body)
    assert response.status_code == 200, response.text[:500]
    assert len(decoding) >= NUM_TOKENS // LOGPROBS_PIECE
    assert threading.current_thread() not in decoding


def test_a_message_of_an_engine_keeps_them_encoded(decoding: list[threading.Thread]) -> None:
    logprobs = [None, *[TokenLogprob(5, -0.5, 1, ((5, -0.5), (6, -1.5)))] * NUM_TOKENS]
    output = EngineOutput(RequestId(1), prompt_logprobs=PromptLogprobs.of(logprobs))
    event = decode_event(encode(StepDone((output,), EngineStats())))
    assert isinstance(event, StepDone)
    found = event.outputs[0].prompt_logprobs
    assert found is not None
    assert (len(found), found.num_values) == (NUM_TOKENS + 1, 3 * NUM_TOKENS)
    assert not decoding
    assert found == logprobs
    assert found[0] is None
    assert found[-1] == found[NUM_TOKENS] == logprobs[-1]
    assert found[127:130] == logprobs[127:130]
    with pytest.raises(IndexError):
        found[NUM_TOKENS + 1]
