"""The OpenAI protocol as its clients see it: the openai package over sockets, otherwise httpx.

The backend is an EchoService, so nothing here depends on a model.
"""

import asyncio
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping

import httpx
import msgspec
import openai
import pytest
from starlette.applications import Starlette

from loraplex.core.adapter import LoadPolicy
from loraplex.core.errors import (
    AdapterLoadError,
    InternalError,
    InvalidAdapterError,
    NotReadyError,
    PermissionDeniedError,
    QueueFullError,
    StepFailedError,
    UnauthenticatedError,
)
from loraplex.core.principal import LOCAL, NONE, Principal, Rights
from loraplex.frontends.body_limits import JsonLimits
from loraplex.frontends.openai import OpenAIOptions, openai_fallback_routes, openai_routes
from loraplex.serving.backend import EncoderFormat
from support.echo_service import EchoService
from support.eventually import TIMEOUT_SECONDS, eventually
from support.naming import naming
from support.served import served

HELLO = [{"role": "user", "content": "hello"}]
CHAT_OUTPUT = ": user: hello\nassistant: "


def openai_app(backend: EchoService, **options) -> Starlette:
    app = Starlette()
    app.routes.extend(openai_routes(backend, **options))
    app.routes.extend(openai_fallback_routes())
    return app


@pytest.fixture
def backend() -> EchoService:
    backend = EchoService()
    backend.register("fr", task_id=7)
    return backend


class Switch:
    """An ASGI app that passes on to another: one server, and a fresh backend for every test."""

    app: Starlette

    async def __call__(self, scope, receive, send) -> None:
        await self.app(scope, receive, send)


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[Switch, str]]:
    switch = Switch()
    with served(switch) as url:
        yield switch, url


@pytest.fixture
def url(server: tuple[Switch, str], backend: EchoService) -> str:
    switch, url = server
    switch.app = openai_app(backend)
    return url


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=60) as http:
        yield http


# Completions


def test_completion(client):
    response = client.completions.create(model="echo", prompt="hello", max_tokens=50)
    assert response.choices[0].text == "echo: hello"
    assert response.choices[0].finish_reason == "stop"
    assert (response.object, response.model) == ("text_completion", "echo")
    assert (response.usage.prompt_tokens, response.usage.completion_tokens) == (6, 12)
    assert response.system_fingerprint == "lp-base"


def test_completion_of_several_prompts_and_of_token_ids(client):
    response = client.completions.create(model="echo", prompt=["a", "b"], n=2, max_tokens=50)
    assert [(c.index, c.text) for c in response.choices] == [
        (0, "echo: a"),
        (1, "echo: a #1"),
        (2, "echo: b"),
        (3, "echo: b #1"),
    ]
    for prompt in ([104, 105], [[104, 105]]):
        response = client.completions.create(model="echo", prompt=prompt, max_tokens=50)
        assert response.choices[0].text == "echo: hi"


def test_completion_stops_and_lengths(client):
    response = client.completions.create(model="echo", prompt="a b c", stop=" b", max_tokens=50)
    assert (response.choices[0].text, response.choices[0].finish_reason) == ("echo: a", "stop")
    response = client.completions.create(model="echo", prompt="x" * 50)
    assert response.usage.completion_tokens == 16
    assert response.choices[0].finish_reason == "length"


def test_completion_logprobs_and_echo(client):
    response = client.completions.create(model="echo", prompt="hi", echo=True, logprobs=2)
    [choice] = response.choices
    assert choice.text == "hiecho: hi"
    assert choice.logprobs.tokens == ["<s>", *"hiecho: hi", "</s>"]
    assert choice.logprobs.text_offset == [0, *range(11)]
    assert len(choice.logprobs.token_logprobs) == response.usage.total_tokens
    assert choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.top_logprobs[1] == {"h": -0.4375, "i": -1.4375}


def test_completion_stream(client):
    stream = client.completions.create(
        model="echo",
        prompt=["a", "b"],
        max_tokens=50,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = list(stream)
    for index, text in enumerate(["echo: a", "echo: b"]):
        choices = [c for chunk in chunks for c in chunk.choices if c.index == index]
        assert "".join(choice.text for choice in choices) == text
        assert choices[-1].finish_reason == "stop"
    assert last.choices == []
    assert last.usage.completion_tokens == 2 * len("echo: a!")
    assert len({chunk.id for chunk in chunks}) == 1


def test_fields_of_vllm(client, backend):
    client.completions.create(
        model="echo",
        prompt="a",
        extra_body={
            "top_k": 3,
            "min_p": 0.1,
            "repetition_penalty": 1.2,
            "min_tokens": 2,
            "stop_token_ids": [5],
            "ignore_eos": True,
            "include_stop_str_in_output": True,
            "add_special_tokens": False,
            "priority": 4,
        },
    )
    [request] = backend.requests
    assert request.sampling.top_k == 3
    assert request.sampling.min_tokens == 2
    assert (request.priority, request.add_special_tokens) == (4, False)


# Chat


def test_chat(client, backend):
    backend.num_cached_tokens = 5
    response = client.chat.completions.create(model="echo", messages=HELLO)
    [choice] = response.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "echo" + CHAT_OUTPUT)
    assert (response.object, choice.finish_reason) == ("chat.completion", "stop")
    assert response.usage.prompt_tokens_details.cached_tokens == 5
    assert response.usage.prompt_tokens == len("<user: hello\nassistant: ")


def test_chat_logprobs_have_bytes(client):
    response = client.chat.completions.create(
        model="echo",
        messages=[{"role": "user", "content": [{"type": "text", "text": "é"}]}],
        logprobs=True,
        top_logprobs=2,
    )
    content = response.choices[0].logprobs.content
    assert bytes(b for entry in content for b in entry.bytes).decode() == (
        f"{response.choices[0].message.content}</s>"
    )
    assert [top.token for top in content[0].top_logprobs] == ["e", "f"]


def test_chat_stream(client):
    stream = client.chat.completions.create(
        model="fr", messages=HELLO, stream=True, n=2, logprobs=True
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    texts = {0: "", 1: ""}
    for chunk in chunks:
        [choice] = chunk.choices
        texts[choice.index] += choice.delta.content or ""
    assert texts == {0: "echo+fr" + CHAT_OUTPUT, 1: f"echo+fr{CHAT_OUTPUT} #1"}
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert all(chunk.usage is None for chunk in chunks)


def test_chat_stream_helper_of_the_client_accumulates(client):
    with client.chat.completions.stream(model="echo", messages=HELLO) as stream:
        completion = stream.get_final_completion()
    assert completion.choices[0].message.content == "echo" + CHAT_OUTPUT


async def test_async_client(url):
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        response = await client.chat.completions.create(
            model="echo", messages=HELLO, max_completion_tokens=4
        )
        assert response.choices[0].message.content == "echo"
        stream = await client.completions.create(
            model="echo", prompt="hi", stream=True, max_tokens=50
        )
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "echo: hi"


# Adapters and models


@pytest.mark.parametrize(
    "fields", [{"model": "fr"}, {"model": "echo:fr"}, {"model": "echo", "lora_model": "fr"}]
)
def test_adapter_by_name(http, backend, fields):
    response = http.post("/v1/completions", json=fields | {"prompt": "hi"})
    body = response.json()
    digest = backend.adapters(LOCAL)[0].digest
    assert body["choices"][0]["text"] == "echo+fr: hi"
    assert body["model"] == fields["model"]
    assert body["system_fingerprint"] == f"lp-{digest[:12]}"
    assert response.headers["x-loraplex-adapter"] == digest


def test_stream_names_the_adapter_in_its_headers(http, backend):
    body = {"model": "fr", "prompt": "hi", "stream": True}
    response = http.post("/v1/completions", json=body)
    assert response.headers["x-loraplex-adapter"] == backend.adapters(LOCAL)[0].digest
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(json.loads(event.removeprefix("data: ")) for event in events[:-2])


def test_models(client):
    base, adapter = client.models.list().data
    assert (base.id, base.owned_by, base.max_model_len) == ("echo", "loraplex", 4096)
    assert (base.root, base.parent) == ("echo", None)
    assert (adapter.id, adapter.root, adapter.parent) == ("fr", "echo", "echo")
    assert client.models.retrieve("fr") == adapter
    assert client.models.retrieve("echo") == base
    with pytest.raises(openai.NotFoundError, match=naming("echo", "fr", "nothing")):
        client.models.retrieve("nothing")


def test_a_base_model_has_its_device_and_abilities(http, backend):
    base, adapter = http.get("/v1/models").json()["data"]
    assert base == http.get("/v1/models/echo").json()
    assert (base["device"], base["dtype"], base["quantization"]) == ("cpu", "float32", None)
    assert base["capabilities"] == {
        "chat": True,
        "tools": True,
        "reasoning": False,
        "images": False,
        "completions": True,
        "embeddings": True,
        "scores": True,
        "classification": False,
    }
    assert base["device_name"] is None, "this engine has no device"
    new = {"device", "device_name", "dtype", "quantization", "capabilities", "defaults"}
    assert new.isdisjoint(adapter)
    model = backend.model("echo")
    model.card = msgspec.structs.replace(
        model.card,
        device_name="Abacus 3",
        quantization="int4",
        has_chat_template=False,
        chat=msgspec.structs.replace(model.card.chat, reasoning="think"),
    )
    base = http.get("/v1/models/echo").json()
    encoder = EncoderFormat(max_tokens=8, first_ids=(0,))
    model.card = msgspec.structs.replace(model.card, encoder=encoder)
    assert not http.get("/v1/models/echo").json()["capabilities"]["embeddings"]
    assert (base["device_name"], base["quantization"]) == ("Abacus 3", "int4")
    abilities = [name for name, is_there in base["capabilities"].items() if is_there]
    assert abilities == ["completions", "embeddings", "scores"], (
        "without a template there is no chat"
    )


def test_the_published_defaults_of_a_comparison(http):
    defaults = http.get("/v1/models/echo").json()["defaults"]["compare"]
    assert (defaults["temperature"], defaults["max_tokens"]) == (0.0, 16)
    known = {name: value for name, value in defaults.items() if value is not None}
    body = {"prompt": "a long enough prompt", "adapters": [None, "fr"], "seed": 1}
    bare, full = (http.post("/v1/compare", json=body | more).json() for more in ({}, known))
    assert [each["token_ids"] for each in bare["answers"]] == [
        each["token_ids"] for each in full["answers"]
    ]


def test_models_are_listed_by_kind(http):
    everything = http.get("/v1/models").json()["data"]
    by_kind = {
        kind: http.get(f"/v1/models?kind={kind}").json()["data"] for kind in ("base", "adapter")
    }
    assert [entry["id"] for entry in by_kind["base"]] == ["echo"]
    assert [*by_kind["base"], *by_kind["adapter"]] == everything
    refused = http.get("/v1/models?kind=bases")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "kind")
    assert "'bases'" in refused.json()["error"]["message"]


def test_equal_names_on_two_bases_are_listed_in_full():
    backend = EchoService(("a", "b"))
    for model in ("a", "b"):
        backend.register("x", model=model)
    with served(openai_app(backend)) as url:
        ids = [entry["id"] for entry in httpx.get(f"{url}/v1/models", timeout=60).json()["data"]]
        assert ids == ["a", "b", "a:x", "b:x"]
        assert httpx.get(f"{url}/v1/models/b:x", timeout=60).json()["parent"] == "b"


def test_adapter_routes(http):
    body = {"name": "org/de.v2", "path": "/adapters/de", "task_id": 0}
    created = http.post("/v1/adapters", json=body)
    assert created.status_code == 201
    entry = created.json()
    assert (entry["name"], entry["task_id"], entry["model"]) == ("org/de.v2", 0, "echo")
    assert (entry["version"], entry["unchanged"], entry["dry_run"]) == (1, False, False)
    assert entry["content"]["ranks"] == {"q_proj": [8, 8]}
    assert (entry["canary"], entry["seconds"].pop("read")) == (None, 0.5)
    assert set(entry["seconds"]) == {"register"}
    shown = http.get("/v1/adapters/org/de.v2").json()
    assert {key: shown[key] for key in ("digest", "residency", "aliases", "state")} == {
        "digest": entry["digest"],
        "residency": "device",
        "aliases": [],
        "state": "ready",
    }
    listed = {one["name"]: one for one in http.get("/v1/adapters").json()["data"]}
    assert listed["org/de.v2"]["residency"] == "device"
    assert listed["fr"]["residency"] == "absent"
    assert listed["org/de.v2"].items() <= shown.items()
    assert http.post("/v1/adapters", json=body).status_code == 409
    replaced = http.post("/v1/adapters", json=body | {"path": "/other", "replace": True})
    assert replaced.json()["digest"] != entry["digest"]
    named_source = {"name": "org/de.v2", "source": "/other", "replace": True}
    assert http.post("/v1/adapters", json=named_source).json()["unchanged"]
    both = http.post("/v1/adapters", json=named_source | {"path": "/third"})
    assert (both.status_code, both.json()["error"]["param"]) == (400, "path")
    assert http.delete("/v1/adapters/org/de.v2").json() == {
        "name": "org/de.v2",
        "object": "adapter",
        "deleted": True,
        "digest": replaced.json()["digest"],
        "version": 2,
        "num_ended": 0,
    }
    assert http.delete("/v1/adapters/org/de.v2").status_code == 404
    assert http.delete("/v1/adapters/echo").status_code == 404


def test_versions_over_http(http):
    for path in ("/1", "/2", "/3"):
        http.post("/v1/adapters", json={"name": "a/b", "path": path, "replace": True})
    history = http.get("/v1/adapters/a/b").json()["versions"]
    assert [one["version"] for one in history] == [3, 2, 1]
    pinned = http.post("/v1/adapters/a/b/pin", json={"version": 2}).json()
    assert (pinned["version"], pinned["pinned"]) == (2, True)
    unpinned = http.post("/v1/adapters/a/b/pin", json={"version": 2, "pinned": False}).json()
    assert unpinned["pinned"] is False
    back = http.post("/v1/adapters/a/b/rollback", json={}).json()
    assert (back["version"], back["source"]) == (4, "/2")
    first = http.post("/v1/adapters/a/b/rollback", json={"version": 1}).json()
    assert (first["version"], first["digest"]) == (5, history[2]["digest"])
    none = http.post("/v1/adapters/a/b/rollback", json={"version": 77})
    assert (none.status_code, none.json()["error"]["param"]) == (404, "version")


def test_aliases_over_http(http, client):
    http.post("/v1/adapters", json={"name": "de-2", "path": "/de"})
    assert http.post("/v1/adapters/de-2/alias", json={"alias": "de"}).json()["name"] == "de-2"
    assert client.completions.create(model="de", prompt="x").choices[0].text == "echo+de-2: x"
    assert http.get("/v1/adapters/de").json()["aliases"] == ["de"]
    assert client.models.retrieve("de").id == "de"
    taken = http.post("/v1/adapters/fr/alias", json={"alias": "de"})
    assert taken.status_code == 409
    moved = http.post("/v1/adapters/fr/alias", json={"alias": "de", "replace": True})
    assert moved.json()["name"] == "fr"
    gone = http.delete("/v1/adapters/de").json()
    assert (gone["object"], gone["name"]) == ("alias", "de")
    assert http.get("/v1/adapters/fr").status_code == 200


def test_how_an_adapter_is_unloaded(http, backend):
    backend.delay_seconds = 0.02  # the responses take longer than the test
    body = {"model": "x", "prompt": "y", "stream": True, "ignore_eos": True, "max_tokens": 4000}
    for mode, num_ended in (("drain", 0), ("immediate", 1)):
        http.post("/v1/adapters", json={"name": "x", "path": "/x"})
        with http.stream("POST", "/v1/completions", json=body) as running:
            lines = running.iter_lines()
            assert '"text":"e"' in next(lines)
            gone = http.delete(f"/v1/adapters/x?mode={mode}")
            assert (gone.status_code, gone.json()["num_ended"]) == (200, num_ended)
    http.post("/v1/adapters", json={"name": "x", "path": "/x"})
    wrong = http.delete("/v1/adapters/x?mode=soon")
    assert wrong.status_code == 400
    assert re.search(naming("drain", "immediate", "soon"), wrong.json()["error"]["message"])


def test_a_dry_run_and_a_canary(http):
    body = {"name": "x", "path": "/x", "dry_run": True, "canary": True}
    report = http.post("/v1/adapters", json=body)
    assert (report.status_code, report.json()["dry_run"]) == (200, True)
    assert report.json()["canary"]["largest_difference"] == 0.5
    assert http.get("/v1/adapters/x").status_code == 404


@pytest.mark.parametrize("action", ["", "/fr/rollback", "/fr/pin", "/fr/alias"])
def test_an_unknown_field_of_an_adapter_is_refused(http, action):
    body = {"name": "x", "path": "/x", "alias": "y", "replcae": True}
    known = {"": ("name", "path"), "/fr/alias": ("alias",)}.get(action, ())
    sent = {key: value for key, value in body.items() if key in (*known, "replcae")}
    response = http.post(f"/v1/adapters{action}", json=sent)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "replcae"
    assert re.search(naming("replcae"), response.json()["error"]["message"])


@pytest.mark.parametrize("key", ["model", "lora_model"])
def test_load_lora_weights(http, backend, key):
    body = {key: "fr", "prompt": "x", "load_lora_weights": "never"}
    missed = http.post("/v1/completions", json=body)
    assert missed.status_code == 404
    # llgtrt's text.
    assert "load_lora_weights is set to never" in missed.json()["error"]["message"]
    assert http.post("/v1/completions", json=body | {"load_lora_weights": "auto"}).is_success
    assert http.post("/v1/completions", json=body).status_code == 200
    chat = {key: "fr", "messages": [{"role": "user", "content": "x"}]}
    for policy in ("always", "auto"):
        response = http.post("/v1/chat/completions", json=chat | {"load_lora_weights": policy})
        assert response.status_code == 200
        assert backend.requests[-1].load_policy is LoadPolicy(policy)


def test_adapter_routes_of_vllm(http, client):
    body = {"lora_name": "de", "lora_path": "/adapters/de"}
    loaded = http.post("/v1/load_lora_adapter", json=body | {"is_3d_lora_weight": False})
    assert loaded.text == "Success: LoRA adapter 'de' added successfully."
    assert client.completions.create(model="de", prompt="x").choices[0].text == "echo+de: x"
    again = http.post("/v1/load_lora_adapter", json=body | {"lora_path": "/new"})
    assert again.status_code == 400
    # vLLM's text.
    assert again.json()["error"]["message"] == (
        "The lora adapter 'de' has already been loaded. If you want to load the adapter in place, "
        "set 'load_inplace' to True."
    )
    inplace = http.post("/v1/load_lora_adapter", json=body | {"load_inplace": True})
    assert inplace.status_code == 200
    empty = http.post("/v1/load_lora_adapter", json=body | {"lora_path": ""})
    assert (empty.status_code, empty.json()["error"]["message"]) == (
        400,
        "Both 'lora_name' and 'lora_path' must be provided.",
    )
    unloaded = http.post("/v1/unload_lora_adapter", json={"lora_name": "de", "lora_int_id": 1})
    assert unloaded.text == "Success: LoRA adapter 'de' removed successfully."
    gone = http.post("/v1/unload_lora_adapter", json={"lora_name": "de"})
    assert gone.status_code == 404
    # vLLM's text.
    assert gone.json()["error"]["message"] == "The lora adapter 'de' cannot be found."
    assert http.post("/v1/unload_lora_adapter", json={"lora_name": ""}).status_code == 400


def test_a_bad_adapter_is_422(http, backend):
    backend.plant_load(InvalidAdapterError("adapter_config.json has no r"))
    response = http.post("/v1/adapters", json={"name": "bad", "path": "/bad"})
    assert response.status_code == 422
    assert response.json()["error"]["code"] == "invalid_adapter"


def test_an_adapter_is_no_base_model(http):
    response = http.post("/v1/adapters", json={"name": "x", "path": "/x", "model": "fr"})
    assert response.status_code == 400
    assert re.search(naming("fr"), response.json()["error"]["message"])


def test_further_names_of_a_model(http, client, backend):
    model = backend.model("echo")
    model.card = msgspec.structs.replace(model.card, served_names=("publishers/ns/models/echo",))
    ids = [model["id"] for model in http.get("/v1/models").json()["data"]]
    assert ids[:2] == ["echo", "publishers/ns/models/echo"]
    for name in ids[:2]:
        assert http.get(f"/v1/models/{name}").json()["id"] == name
        assert client.completions.create(model=name, prompt="x").choices[0].text == "echo: x"
    for name in ("echo_fr", "publishers/ns/models/echo:fr"):
        assert client.completions.create(model=name, prompt="x").choices[0].text == "echo+fr: x"


def test_tokenize_and_detokenize(http):
    tokens = http.post("/tokenize", json={"model": "fr", "prompt": "hi"}).json()
    assert tokens == {
        "count": 3,
        "max_model_len": 4096,
        "tokens": [256, 104, 105],
        "token_strs": None,
    }
    bare = http.post("/tokenize", json={"prompt": "hi", "add_special_tokens": False}).json()
    assert bare["tokens"] == [104, 105]
    text = http.post("/detokenize", json={"tokens": [256, 104, 105]}).json()
    assert text == {"prompt": "<s>hi"}
    chat = http.post("/tokenize", json={"messages": HELLO}).json()
    assert bytes(chat["tokens"][1:]).decode() == "user: hello\nassistant: "


# Errors


ERRORS = [
    (QueueFullError("full", retry_after_seconds=1.5), 429, openai.RateLimitError),
    (NotReadyError("starting"), 503, openai.InternalServerError),
    (AdapterLoadError("disk"), 503, openai.InternalServerError),
    (StepFailedError("broke"), 500, openai.InternalServerError),
    (PermissionDeniedError("no"), 403, openai.PermissionDeniedError),
]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("after_outputs", [None, 0])
@pytest.mark.parametrize(("error", "status", "exception"), ERRORS)
def test_errors_before_the_first_token_have_a_status(
    client, backend, is_stream, after_outputs, error, status, exception
):
    backend.plant(error, after_outputs=after_outputs)
    with pytest.raises(exception) as caught:
        client.completions.create(model="echo", prompt="x", stream=is_stream)
    assert caught.value.status_code == status
    assert caught.value.body["message"] == error.message
    assert caught.value.code == error.code
    retry_after = caught.value.response.headers.get("retry-after")
    assert retry_after == ("2" if error.retry_after_seconds else None)
    assert caught.value.request_id


def test_an_error_in_mid_stream_is_an_event_without_done(client, http, backend):
    backend.plant(InternalError("broke"), after_outputs=3)
    response = http.post("/v1/completions", json={"prompt": "x", "stream": True})
    *chunks, last = [e.removeprefix("data: ") for e in response.text.strip().split("\n\n")]
    assert response.status_code == 200
    assert [json.loads(chunk)["choices"][0]["text"] for chunk in chunks] == list("ech")
    assert json.loads(last)["error"]["message"] == "broke"
    backend.plant(InternalError("broke"), after_outputs=3)
    stream = client.chat.completions.create(model="echo", messages=HELLO, stream=True)
    contents = (chunk.choices[0].delta.content for chunk in stream)
    assert [next(contents) for _ in range(4)] == ["", "e", "c", "h"]
    with pytest.raises(openai.APIError, match="broke"):
        next(contents)


def test_a_bug_is_500_and_does_not_expose_details(http, backend, caplog):
    backend.plant(ValueError("secret"), after_outputs=1)  # type: ignore[arg-type]
    response = http.post("/v1/completions", json={"prompt": "x"}, headers={"x-request-id": "r1"})
    assert response.status_code == 500
    assert "secret" not in response.text
    assert "r1" in response.json()["error"]["message"]
    backend.plant(ValueError("secret"), after_outputs=1)  # type: ignore[arg-type]
    stream = http.post("/v1/completions", json={"prompt": "x", "stream": True})
    assert "secret" not in stream.text
    assert "internal_error" in stream.text


def test_request_id_goes_in_and_out(http, backend):
    headers = {"x-request-id": "mine-1"}
    response = http.post("/v1/completions", json={"prompt": "x"}, headers=headers)
    assert response.headers["x-request-id"] == "mine-1"
    assert response.json()["id"] == "cmpl-mine-1"
    assert backend.requests[0].client_request_id == "mine-1"
    stream = http.post("/v1/completions", json={"prompt": "x", "stream": True}, headers=headers)
    assert stream.headers["x-request-id"] == "mine-1"
    assert http.get("/v1/models").headers["x-request-id"]
    too_long = http.get("/v1/models", headers={"x-request-id": "x" * 257})
    assert too_long.status_code == 400


# Authentication and limits


def _by_key(headers: Mapping[str, str]) -> Principal:
    match headers.get("authorization"):
        case "Bearer admin":
            return LOCAL
        case "Bearer reader":
            return Principal(rights=Rights(manage=NONE))
        case _:
            raise UnauthenticatedError("send a valid key as Authorization: Bearer ...")


def test_authentication_comes_before_everything(backend):
    with served(openai_app(backend, authenticate=_by_key)) as url:
        response = httpx.post(f"{url}/v1/completions", content=b"not json", timeout=60)
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"
        with openai.OpenAI(base_url=f"{url}/v1", api_key="bad", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError):
                client.models.list()
            reader = client.with_options(api_key="reader")
            assert reader.completions.create(model="fr", prompt="x").choices[0].text
            with pytest.raises(openai.PermissionDeniedError):
                reader.delete("/adapters/fr", cast_to=object)


def test_a_body_that_is_too_large_is_413(backend):
    options = OpenAIOptions(json=JsonLimits(max_bytes=1000, max_values=100_000), max_prompts=2)
    with served(openai_app(backend, options=options)) as url:
        declared = httpx.post(f"{url}/v1/completions", json={"prompt": "x" * 1000}, timeout=60)
        assert declared.status_code == 413
        assert declared.json()["error"]["code"] == "payload_too_large"

        def undeclared() -> Iterator[bytes]:
            yield b'{"prompt": "'
            yield from [b"x" * 500] * 3

        headers = {"content-type": "application/json"}
        chunked = httpx.post(
            f"{url}/v1/completions", content=undeclared(), headers=headers, timeout=60
        )
        assert chunked.status_code == 413
        prompts = httpx.post(f"{url}/v1/completions", json={"prompt": ["a"] * 3}, timeout=60)
        assert re.search(naming("prompt", 3, 2), prompts.json()["error"]["message"])


@pytest.mark.parametrize("route", ["completions", "chat/completions", "responses"])
def test_a_field_that_no_server_defines(backend, route):
    prompt = {"messages": [{"role": "user", "content": "a"}], "prompt": "a", "input": "a"}
    field = {"completions": "prompt", "responses": "input"}.get(route, "messages")
    body = {field: prompt[field], "temprature": 0}
    with served(openai_app(backend)) as url:
        refused = httpx.post(f"{url}/v1/{route}", json=body, timeout=60)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["code"], error["param"]) == ("invalid_parameter", "temprature")
    assert re.search(naming("temprature", "temperature"), error["message"])
    with served(openai_app(backend, options=OpenAIOptions(ignores_unknown=True))) as url:
        assert httpx.post(f"{url}/v1/{route}", json=body, timeout=60).status_code == 200


def test_fields_that_only_other_servers_use(client, backend):
    """LangChain, LiteLLM, vLLM's and SGLang's benchmarks, llama.cpp's and Ollama's clients."""
    client.chat.completions.create(
        model="echo",
        messages=[{"role": "user", "content": "a"}],
        metadata={"tags": "x"},
        user="u",
        store=False,
        service_tier="auto",
        extra_body={
            "cache_prompt": True,
            "keep_alive": "5m",
            "session_id": "s",
            "adapter_source": "hub",
            "return_hidden_states": False,
            "guided_decoding_backend": "xgrammar",
        },
    )
    assert len(backend.requests) == 1


# Disconnects


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_client_that_leaves_a_stream_aborts_it(http, backend, path):
    backend.delay_seconds = 0.01
    body = {"prompt": "x", "messages": HELLO, "stream": True, "max_tokens": 4000}
    with http.stream("POST", path, json=body | {"ignore_eos": True}) as response:
        assert response.status_code == 200
        next(response.iter_lines())
    assert eventually(lambda: backend.aborted == [backend.requests[0].request_id])
    assert backend.finished == []


async def leave_when(has_arrived: Callable[[], bool], client: openai.OpenAI, **body) -> None:
    """Send a completion, and leave once `has_arrived`."""
    async with openai.AsyncOpenAI(base_url=client.base_url, api_key="x", max_retries=0) as leaving:
        request = asyncio.create_task(leaving.completions.create(model="echo", **body))
        async with asyncio.timeout(TIMEOUT_SECONDS):
            while not has_arrived():
                await asyncio.sleep(0.005)
        request.cancel()
        await asyncio.wait([request])


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
async def test_a_client_that_does_not_wait_for_the_first_token_aborts_at_once(
    client, backend, is_stream, prompt
):
    backend.delay_seconds = 600
    await leave_when(
        lambda: len(backend.requests) == len(prompt), client, prompt=prompt, stream=is_stream
    )
    assert eventually(lambda: len(backend.aborted) == len(prompt))
    assert sorted(backend.aborted) == [request.request_id for request in backend.requests]


def test_closing_the_stream_of_the_client_aborts(client, backend):
    backend.delay_seconds = 0.01
    stream = client.completions.create(model="echo", prompt="x" * 4000, stream=True, max_tokens=90)
    next(iter(stream))
    stream.close()
    assert eventually(lambda: len(backend.aborted) == 1)


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("adapters", {"name": "slow", "path": "/slow"}),
        ("load_lora_adapter", {"lora_name": "slow", "lora_path": "/slow"}),
    ],
)
def test_a_client_that_leaves_ends_its_load(client, backend, monkeypatch, route, body):
    begun, ended, seconds = threading.Event(), threading.Event(), 0.1

    async def load(*_, **__):
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    monkeypatch.setattr(backend.adapter_admin, "load", load)
    while not begun.is_set():
        seconds *= 2
        with pytest.raises(httpx.TimeoutException):
            httpx.post(f"{client.base_url}{route}", json=body, timeout=seconds)
    assert ended.wait(TIMEOUT_SECONDS)


async def test_the_server_goes_on_after_a_disconnect(client, backend):
    backend.delay_seconds = 600
    await leave_when(lambda: len(backend.requests) == 1, client, prompt="x")
    assert eventually(lambda: bool(backend.aborted))
    backend.delay_seconds = 0
    assert client.completions.create(model="echo", prompt="x").choices[0].text == "echo: x"
