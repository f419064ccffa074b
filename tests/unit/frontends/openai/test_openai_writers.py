import json
import math
from typing import Any

import msgspec
import pytest

from loraplex.core.adapter import AdapterChoice, ByName
from loraplex.core.output import RequestOutput, TokenLogprob
from loraplex.core.principal import LOCAL
from loraplex.core.request import GenerateRequest
from loraplex.core.sampling_params import SamplingParams
from loraplex.frontends.openai.logprobs import (
    CompletionLogprobWriter,
    TokenTexts,
    chat_logprobs,
    prompt_logprobs,
)
from loraplex.frontends.openai.writers import Call, ChatWriter, CompletionWriter, fingerprint
from loraplex.frontends.streams import gather_all, generate_all
from loraplex.testing.echo_backend import EchoBackend


class Scene:
    """One HTTP call against an EchoBackend with the adapter `fr`."""

    def __init__(self, *prompts: Any, call: dict[str, Any] | None = None, **sampling: Any) -> None:
        self.backend = EchoBackend()
        self.digest = self.backend.register("fr").digest
        self.requests = tuple(
            GenerateRequest(
                request_id=i,
                model="echo",
                prompt=prompt,
                adapters=(AdapterChoice(ByName("fr")),),
                sampling=SamplingParams(**({"max_tokens": 50} | sampling)),
            )
            for i, prompt in enumerate(prompts)
        )
        self.call = Call(
            response_id="id", created=1, model="fr", requests=self.requests, **(call or {})
        )
        self.texts = TokenTexts(self.backend, "echo")

    async def body(self, writer_class: type[CompletionWriter] | type[ChatWriter]) -> Any:
        outputs = await gather_all(self.backend, self.requests, LOCAL)
        return _json(writer_class(self.call, self.texts).body(outputs))

    async def chunks(self, writer_class: type[CompletionWriter] | type[ChatWriter]) -> list[Any]:
        writer = writer_class(self.call, self.texts)
        chunks = []
        async for item in generate_all(self.backend, self.requests, LOCAL):
            chunks += [_json(chunk) for chunk in writer.chunks(item)]
        return chunks + [_json(chunk) for chunk in writer.last_chunks()]


def _json(struct: msgspec.Struct) -> Any:
    return json.loads(msgspec.json.encode(struct))


TIMING = dict.fromkeys(
    [
        "queue_seconds",
        "adapter_wait_seconds",
        "prefill_seconds",
        "first_token_seconds",
        "seconds_per_token",
        "total_seconds",
    ]
) | dict.fromkeys(
    [
        "adapter_load_seconds",
        "adapter_copy_seconds",
        "preemptions",
        "cached_tokens",
        "draft_tokens",
        "accepted_draft_tokens",
        "restarts",
    ],
    0,
)
"""Timings of a backend that measures nothing: null marks what did not happen."""


async def test_completion_body():
    scene = Scene("hi")
    scene.backend.num_cached_tokens = 2
    assert await scene.body(CompletionWriter) == {
        "id": "id",
        "object": "text_completion",
        "created": 1,
        "model": "fr",
        "system_fingerprint": f"lp-{scene.digest[:12]}",
        "choices": [{"index": 0, "text": "echo+fr: hi", "logprobs": None, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 12,
            "total_tokens": 15,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
        "loraplex": {
            "adapters": [{"name": "fr", "digest": scene.digest, "scale": 1.0}],
            "timing": [TIMING | {"cached_tokens": 2}],
        },
    }


async def test_choices_are_numbered_prompt_major():
    body = await Scene("a", "b", n=2).body(CompletionWriter)
    texts = [(choice["index"], choice["text"]) for choice in body["choices"]]
    assert texts == [
        (0, "echo+fr: a"),
        (1, "echo+fr: a #1"),
        (2, "echo+fr: b"),
        (3, "echo+fr: b #1"),
    ]
    assert body["usage"]["prompt_tokens"] == 4
    assert body["usage"]["completion_tokens"] == 2 * (11 + 14)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"logprobs": 2},
        {"logprobs": 0, "n": 2},
        {"logprobs": 2, "prompt_logprobs": 2, "call": {"echo": True}},
        {"stop": ("fr:",)},
        {"logprobs": 1, "stop": (" hé",), "n": 2, "include_stop_in_output": True},
    ],
)
async def test_the_chunks_of_a_completion_add_up_to_its_body(fields):
    body = await Scene("hé", (104, 105), **fields).body(CompletionWriter)
    chunks = await Scene("hé", (104, 105), **fields).chunks(CompletionWriter)
    for choice in body["choices"]:
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        for name, values in (choice["logprobs"] or {}).items():
            assert [v for part in parts for v in part["logprobs"][name]] == values


async def test_echo_with_logprobs_covers_prompt_and_text():
    call = {"echo": True}
    body = await Scene("é", call=call, logprobs=1, prompt_logprobs=1).body(CompletionWriter)
    [choice] = body["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"] == "éecho+fr: é"
    assert logprobs["tokens"][:4] == ["<s>", "bytes:\\xc3", "bytes:\\xa9", "e"]
    assert logprobs["text_offset"][:5] == [0, 0, 0, 1, 2]
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][3] == {"e": logprobs["token_logprobs"][3]}
    assert len({len(values) for values in logprobs.values()}) == 1


async def test_echo_of_token_ids_is_their_text():
    [choice] = (await Scene((256, 104, 105), call={"echo": True}).body(CompletionWriter))["choices"]
    assert choice["text"] == "hiecho+fr: hi"


async def test_the_end_token_has_no_logprob_but_a_stop_string_has():
    [ended] = (await Scene("hi", logprobs=0).body(CompletionWriter))["choices"]
    assert "".join(ended["logprobs"]["tokens"]) == ended["text"] == "echo+fr: hi"
    [cut] = (await Scene("hi", logprobs=0, max_tokens=4).body(CompletionWriter))["choices"]
    assert cut["logprobs"]["tokens"] == list("echo")


@pytest.mark.parametrize("writer_class", [CompletionWriter, ChatWriter])
async def test_usage_is_the_last_chunk_if_requested(writer_class):
    *chunks, last = await Scene("hi", call={"include_usage": True}).chunks(writer_class)
    assert {chunk["usage"] for chunk in chunks} == {None}
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 15
    assert not any("usage" in chunk for chunk in await Scene("hi").chunks(writer_class))


async def test_prompt_logprobs_are_a_separate_field_if_requested():
    call = {"wants_prompt_logprobs": True}
    body = await Scene("h", call=call, prompt_logprobs=1).body(CompletionWriter)
    first, second = body["choices"][0]["prompt_logprobs"]
    assert first is None
    assert second == {"104": {"logprob": second["104"]["logprob"], "rank": 1, "decoded_token": "h"}}
    assert (await Scene("h", call=call, prompt_logprobs=1).body(ChatWriter))["prompt_logprobs"]


async def test_chat_body():
    body = await Scene("hi", n=2, logprobs=1).body(ChatWriter)
    assert body["object"] == "chat.completion"
    assert [choice["message"] for choice in body["choices"]] == [
        {"role": "assistant", "content": "echo+fr: hi", "refusal": None},
        {"role": "assistant", "content": "echo+fr: hi #1", "refusal": None},
    ]
    content = body["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == "echo+fr: hi"
    assert content[0]["bytes"] == content[0]["top_logprobs"][0]["bytes"] == [ord("e")]


async def test_chat_chunks_begin_with_the_role_and_end_with_the_reason():
    chunks = await Scene("hi", n=2).chunks(ChatWriter)
    for index, text in enumerate(["echo+fr: hi", "echo+fr: hi #1"]):
        choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(c["delta"].get("content", "") for c in choices) == text
        assert choices[-1] == {
            "index": index,
            "delta": {},
            "logprobs": None,
            "finish_reason": "stop",
        }
        assert all("role" not in c["delta"] for c in choices[1:])


async def test_a_token_that_gives_no_text_yet_gives_no_chunk():
    chunks = await Scene("é").chunks(ChatWriter)
    assert [c["choices"][0]["delta"] for c in chunks[-3:]] == [
        {"content": " "},
        {"content": "é"},
        {},
    ]


def test_headers_and_fingerprint_of_base_and_adapter():
    scene = Scene("hi")
    base = RequestOutput(1, "", "echo", (), (1,), (), 0, False)
    assert fingerprint(base) == "lp-base"
    assert CompletionWriter(scene.call, scene.texts).headers((0, base)) == {}


async def test_adapter_header_has_the_digest():
    scene = Scene("hi")
    item = await anext(generate_all(scene.backend, scene.requests, LOCAL))
    headers = CompletionWriter(scene.call, scene.texts).headers(item)
    assert headers == {"x-loraplex-adapter": scene.digest}


IMPOSSIBLE = TokenLogprob(token_id=97, logprob=-math.inf, rank=3, top=((98, -0.5), (99, -1.0)))


def test_minus_infinity_can_be_written_as_json():
    texts = Scene("hi").texts
    written = CompletionLogprobWriter(texts).write([(97, IMPOSSIBLE)])
    assert written.token_logprobs == [-9999.0]
    assert written.top_logprobs == [{"b": -0.5, "c": -1.0, "a": -9999.0}]
    assert chat_logprobs([IMPOSSIBLE], texts).content[0].logprob == -9999.0


def test_prompt_logprobs_hold_the_candidates_and_the_token():
    [ranked] = prompt_logprobs([IMPOSSIBLE], Scene("hi").texts)
    assert {key: (value.rank, value.decoded_token) for key, value in ranked.items()} == {
        "98": (1, "b"),
        "99": (2, "c"),
        "97": (3, "a"),
    }


def test_special_tokens_take_space_only_if_they_are_written():
    texts = Scene("hi").texts
    tokens = [(256, None), (104, None), (105, None)]
    assert CompletionLogprobWriter(texts).write(tokens).text_offset == [0, 0, 1]
    writer = CompletionLogprobWriter(texts, skips_special_tokens=False)
    assert writer.write(tokens).text_offset == [0, 3, 4]
