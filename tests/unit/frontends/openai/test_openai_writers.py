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
from loraplex.core.task import Generate
from loraplex.frontends.long_json import encoded
from loraplex.frontends.openai.logprobs import (
    CompletionLogprobWriter,
    TokenTexts,
    chat_logprobs,
    prompt_logprobs,
)
from loraplex.frontends.openai.sse import event
from loraplex.frontends.openai.writers import CallFields, ChatWriter, CompletionWriter, fingerprint
from loraplex.frontends.streams import gather_all, generate_all
from support.echo_service import EchoService


class Scene:
    """One HTTP call against an EchoService with the adapter `fr`."""

    def __init__(self, *prompts: Any, call: dict[str, Any] | None = None, **sampling: Any) -> None:
        self.backend = EchoService()
        self.digest = self.backend.register("fr").digest
        self.requests = tuple(
            GenerateRequest(
                request_id=i,
                model="echo",
                prompt=prompt,
                adapters=(AdapterChoice(ByName("fr")),),
                task=Generate(SamplingParams(**({"max_tokens": 50} | sampling))),
            )
            for i, prompt in enumerate(prompts)
        )
        self.call = CallFields(
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
    return json.loads(b"".join(encoded(struct)))


TIMING = {
    "queue_seconds",
    "adapter_wait_seconds",
    "prefill_seconds",
    "first_token_seconds",
    "seconds_per_token",
    "total_seconds",
    "adapter_load_seconds",
    "adapter_copy_seconds",
    "preemptions",
    "cached_tokens",
    "draft_tokens",
    "accepted_draft_tokens",
    "restarts",
}


async def test_completion_body():
    scene = Scene("hi")
    scene.backend.num_cached_tokens = 2
    body = await scene.body(CompletionWriter)
    [timing] = body["loraplex"].pop("timing")
    assert set(timing) == TIMING
    assert timing["cached_tokens"] == 2
    assert 0 < timing["first_token_seconds"] < timing["total_seconds"]
    assert body == {
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


async def test_each_counted_token_of_a_completion_has_a_logprob():
    """The end token, too: lm-evaluation-harness leaves out the last entry, which is the generated
    token, and would score the last token of the prompt never."""
    for sampling, tokens in (
        ({}, [*"echo+fr: hi", "</s>"]),
        ({"max_tokens": 4}, list("echo")),
        ({"stop": (":",)}, list("echo+fr:")),
        ({"stop_token_ids": (ord(":"),)}, list("echo+fr:")),
        ({"stop_token_ids": (ord(":"),), "include_stop_in_output": True}, list("echo+fr:")),
    ):
        body = await Scene("hi", logprobs=0, **sampling).body(CompletionWriter)
        [choice] = body["choices"]
        assert choice["logprobs"]["tokens"] == tokens
        assert len(choice["logprobs"]["text_offset"]) == body["usage"]["completion_tokens"]
        assert max(choice["logprobs"]["text_offset"]) <= len(choice["text"])


async def test_an_echoed_prompt_after_which_the_model_ends_has_one_entry_more():
    scene = Scene("hi", call={"echo": True}, logprobs=1, prompt_logprobs=1, max_tokens=1)
    scene.backend.scripts.append(("",))
    body = await scene.body(CompletionWriter)
    [choice] = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("hi", "stop")
    assert choice["logprobs"]["tokens"] == ["<s>", "h", "i", "</s>"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 2]
    assert body["usage"]["total_tokens"] == len(choice["logprobs"]["token_logprobs"])


async def test_each_counted_token_of_a_chat_has_a_logprob():
    body = await Scene("hi", logprobs=0, call={"returns_token_ids": True}).body(ChatWriter)
    [choice] = body["choices"]
    content = choice["logprobs"]["content"]
    assert content[-1]["token"] == "</s>"
    assert len(content) == len(choice["token_ids"]) == body["usage"]["completion_tokens"]
    chunks = await Scene("hi", logprobs=0).chunks(ChatWriter)
    streamed = [c["logprobs"] for chunk in chunks for c in chunk["choices"] if c["logprobs"]]
    assert [entry for part in streamed for entry in part["content"]] == content


async def test_the_end_token_is_in_no_piece_with_text():
    """guidance joins the tokens of a piece instead of its text."""
    scene = Scene("hi", logprobs=0, call={"returns_token_ids": True})
    outputs = await gather_all(scene.backend, scene.requests, LOCAL)
    chunks = [_json(chunk) for chunk in ChatWriter(scene.call, scene.texts).chunks((0, *outputs))]
    _, piece, last = [chunk["choices"][0] for chunk in chunks]
    tokens = [entry["token"] for entry in piece["logprobs"]["content"]]
    assert "".join(tokens) == piece["delta"]["content"] == "echo+fr: hi"
    assert [entry["token"] for entry in last["logprobs"]["content"]] == ["</s>"]
    assert (last["delta"], last["finish_reason"]) == ({}, "stop")
    assert (len(piece["token_ids"]), len(last["token_ids"])) == (len(tokens), 1)


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
    assert "".join(entry["token"] for entry in content) == "echo+fr: hi</s>"
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


async def test_the_model_is_looked_up_once_and_each_token_once():
    scene = Scene("hello hello")
    looked_up = list[str]()
    token_bytes = list[int]()
    model = scene.backend.model("echo")

    class Counting:
        def model(self, name: str) -> Any:
            looked_up.append(name)
            return self

        def token_bytes(self, token_id: int) -> bytes:
            token_bytes.append(token_id)
            return model.token_bytes(token_id)

        def detokenize(self, *arguments: Any, **options: Any) -> str:
            return model.detokenize(*arguments, **options)

    texts = TokenTexts(Counting(), "echo")  # type: ignore[arg-type]
    tokens = [TokenLogprob(104, -1.0, 1, ((104, -1.0), (105, -2.0)))] * 500
    encoded(chat_logprobs(tokens, texts))
    encoded(prompt_logprobs(tokens, texts))
    encoded(CompletionLogprobWriter(texts).write((104, token) for token in tokens))
    assert looked_up == ["echo"]
    assert sorted(token_bytes) == [104, 105]


@pytest.mark.parametrize("shape", ["chat", "prompt", "completion"])
def test_log_probabilities_are_encoded_in_bounded_pieces(shape):
    texts = Scene("x").texts
    top = tuple((token_id, -float(token_id)) for token_id in range(97, 117))
    tokens = [TokenLogprob(104, -1.0, 1, top)] * 5000
    body: Any = {
        "chat": lambda: chat_logprobs(tokens, texts),
        "prompt": lambda: prompt_logprobs(tokens, texts),
        "completion": lambda: CompletionLogprobWriter(texts).write((104, t) for t in tokens),
    }[shape]()
    pieces = encoded(body)
    assert max(map(len, pieces)) < 300_000 < sum(map(len, pieces))
    json.loads(b"".join(pieces))


@pytest.mark.parametrize("writer_class", [CompletionWriter, ChatWriter])
@pytest.mark.parametrize(
    "call", [{}, {"include_usage": True}, {"include_usage": True, "continuous_usage": True}]
)
async def test_events_of_a_text_are_those_of_its_chunks(writer_class, call):
    scene = Scene('a "text":"" and "content":""', call=call, n=2)
    writer, short = (writer_class(scene.call, scene.texts) for _ in range(2))
    num_short = 0
    async for item in generate_all(scene.backend, scene.requests, LOCAL):
        events = b"".join(map(event, writer.chunks(item)))
        is_middle = all(one.finish_reason is None for one in item[1].sequences)
        written = short.text_events(item) if is_middle else None
        num_short += written is not None
        if written is None:
            written = b"".join(map(event, short.chunks(item)))
        assert written == events
    assert list(short.last_chunks()) == list(writer.last_chunks())
    assert bool(num_short) is not bool(call.get("continuous_usage"))


@pytest.mark.parametrize("sampling", [{"logprobs": 1}, {"n": 1}])
async def test_a_first_output_has_more_than_text(sampling):
    scene = Scene("hi", **sampling)
    [first, *_] = [item async for item in generate_all(scene.backend, scene.requests, LOCAL)]
    assert CompletionWriter(scene.call, scene.texts).text_events(first) is None
    assert ChatWriter(scene.call, scene.texts).text_events(first) is None
