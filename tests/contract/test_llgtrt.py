"""llgtrt's dialect of the OpenAI protocol as its clients see it, over sockets.

The backend is an EchoService; each row of DIFFERENCES has a test.
"""

import asyncio
import json
import re
import tempfile
from collections.abc import Iterator

import httpx
import pytest
from starlette.applications import Starlette

from loraplex.app.builder import build_service
from loraplex.core.adapter import LoadPolicy
from loraplex.core.config import Config, ModelConfig
from loraplex.core.errors import QueueFullError, RateLimitedError, StepFailedError
from loraplex.core.grammar import GrammarKind
from loraplex.core.server_config import ServerConfig
from loraplex.demo import BASE_PATH
from loraplex.frontends.openai import OpenAIOptions, openai_fallback_routes, openai_routes
from loraplex.frontends.openai.llgtrt import CompatDialect, LlgtrtDialect
from loraplex.serving.request_metrics import RequestMetrics
from support.echo_service import EchoService
from support.naming import naming
from support.served import served
from tools.llgtrt_differences import DIFFERENCES

HELLO = [{"role": "user", "content": "hello"}]
COMPLETION_TEXT = ": user: hello\nassistant: "
CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"


class Switch:
    app: Starlette

    async def __call__(self, scope, receive, send) -> None:
        await self.app(scope, receive, send)


TOOL_START = "<pad>"
"""A special token that the model has."""


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[Switch, str]]:
    switch = Switch()
    with served(switch) as url:
        yield switch, url


@pytest.fixture
def backend() -> EchoService:
    backend = EchoService()
    backend.register("fr", task_id=7)
    backend.register("team/v1.2")
    return backend


class DialectClient:
    """A server with one dialect and an httpx client for it."""

    def __init__(self, server, backend, dialect) -> None:
        switch, url = server
        app = Starlette()
        app.routes.extend(openai_routes(backend, OpenAIOptions(dialect=dialect)))
        app.routes.extend(openai_fallback_routes())
        switch.app = app
        self.url = url

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=60)

    def post(self, path: str, body, **options) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, **options, timeout=60)

    def chat(self, **fields):
        body = {"model": "llama", "messages": HELLO, **fields}
        return self.post(CHAT, {k: v for k, v in body.items() if v is not ...})

    def complete(self, **fields):
        body = {"model": "llama", "prompt": "hello", **fields}
        return self.post(COMPLETION, {k: v for k, v in body.items() if v is not ...})


@pytest.fixture
def ours(server, backend) -> DialectClient:
    return DialectClient(server, backend, LlgtrtDialect(has_lora_root=True))


@pytest.fixture
def without_root(server, backend) -> DialectClient:
    return DialectClient(server, backend, LlgtrtDialect(has_lora_root=False))


@pytest.fixture
def theirs(server, backend) -> DialectClient:
    return DialectClient(
        server, backend, CompatDialect(has_lora_root=True, json_start_token=TOOL_START)
    )


def events(response: httpx.Response) -> list:
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def error_of(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["message"]


# ------------------------------------------------------------ models and adapters


def test_any_model_is_taken_and_echoed(ours, backend):
    for model in ("llama", "fr", "echo", "no:such/model"):
        response = ours.chat(model=model).json()
        assert response["model"] == model
        assert backend.requests[-1].adapters == ()
        assert backend.requests[-1].model == "echo"


@pytest.mark.parametrize("name", ["fr", "team/v1.2"])
@pytest.mark.parametrize("policy", ["auto", "always", None])
def test_lora_model_selects(ours, backend, name, policy):
    response = ours.chat(lora_model=name, load_lora_weights=policy)
    assert response.status_code == 200
    [choice] = backend.requests[-1].adapters
    assert choice.key.name == name
    assert backend.requests[-1].load_policy is LoadPolicy(policy or "auto")


def test_never_fails_with_llgtrts_words_when_it_is_not_in_memory(ours):
    status, message = error_of(ours.chat(lora_model="fr", load_lora_weights="never"))
    assert status == 404
    assert "was not in cache and load_lora_weights is set to never" in message


def test_an_unknown_adapter_is_an_error(ours):
    for send in (ours.complete, ours.chat):
        for stream in (False, True):
            response = send(lora_model="nobody", stream=stream)
            status, message = error_of(response)
            assert status == 404
            assert message.startswith("lora_model: adapter 'nobody' not")  # language: quoted
            assert response.json()["error"]["param"] == "lora_model"


@pytest.mark.parametrize("name", ["../fr", "/fr", "team/../../fr", "a\0b"])
def test_a_path_outside_the_root_is_refused(ours, backend, name):
    status, message = error_of(ours.complete(lora_model=name))
    assert status == 400
    # llgtrt's text.
    assert "is outside the LoRA base directory" in message
    assert backend.requests == []


@pytest.mark.parametrize("send", [DialectClient.chat, DialectClient.complete])
def test_a_server_without_a_model(server, send):
    client = DialectClient(
        server,
        EchoService(models=()),
        LlgtrtDialect(has_lora_root=True),
    )
    response = send(client)
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


def test_without_a_root_llgtrts_words(without_root, backend):
    status, message = error_of(without_root.complete(lora_model="nobody"))
    assert status == 400
    # llgtrt's text.
    assert message.startswith("lora_model specified but lora_root not set")
    # What was loaded over the API is there all the same.
    assert without_root.complete(lora_model="fr").status_code == 200


# ------------------------------------------------------------ fields


def test_defaults(ours, backend):
    ours.chat()
    chat = backend.requests[-1]
    assert (chat.sampling.max_tokens, chat.sampling.min_tokens) == (None, 1)
    assert chat.add_special_tokens
    ours.complete(min_tokens=3, min_p=0.25)
    completion = backend.requests[-1].sampling
    assert (completion.max_tokens, completion.min_tokens, completion.min_p) == (16, 3, 0.25)


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def schema_format(**fields):
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, **fields}}


def test_strict_keeps_to_the_schema(ours, backend):
    ours.chat(response_format=schema_format(strict=True))
    assert json.loads(backend.requests[-1].sampling.grammar.text) == SCHEMA


@pytest.mark.parametrize("strict", [{}, {"strict": False}])
def test_not_strict_is_any_object(ours, backend, strict):
    ours.chat(response_format=schema_format(**strict))
    assert json.loads(backend.requests[-1].sampling.grammar.text) == {"type": "object"}


def test_strict_without_a_schema(ours):
    broken = {"type": "json_schema", "json_schema": {"name": "n", "strict": True}}
    status, message = error_of(ours.chat(response_format=broken))
    assert (status, message.partition(":")[0]) == (400, "missing schema in strict mode")


def test_grammars_of_a_request(ours, backend):
    ours.chat(response_format={"type": "lark_grammar", "lark_grammar": 'start: "a"'})
    assert backend.requests[-1].sampling.grammar.kind is GrammarKind.LARK
    ours.chat(response_format={"type": "llguidance", "grammar": {"grammars": []}})
    assert backend.requests[-1].sampling.grammar.kind is GrammarKind.LLGUIDANCE


TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {}}}},
}


def test_a_format_and_tools_are_an_error(ours, theirs):
    for client in (ours, theirs):
        response = client.chat(tools=[TOOL], response_format={"type": "json_object"})
        assert "response_format cannot be specified together with tools" in response.text
        assert response.status_code in (400, 500)
    assert ours.chat(tools=[TOOL], response_format={"type": "text"}).status_code == 200


def test_what_the_template_sees(server):
    backend = EchoService()
    client = DialectClient(server, backend, LlgtrtDialect(has_lora_root=True))
    client.chat(response_format=schema_format())
    variables = backend.renderings[-1]["template_kwargs"]
    assert variables["json_schema"] == SCHEMA
    assert variables["date_string"].endswith(tuple("0123456789"))
    assert backend.renderings[-1]["omits_absent"] is True
    client.chat(response_format=schema_format(), include_json_schema_in_prompt=False)
    assert "json_schema" not in backend.renderings[-1]["template_kwargs"]
    client.chat(tools=[TOOL], include_json_schema_in_prompt=False)
    assert backend.renderings[-1]["tools"] is None
    client.chat(tools=[TOOL])
    assert backend.renderings[-1]["tools"]


def test_tools_of_compat_are_seen_by_the_template(server):
    backend = EchoService()
    client = DialectClient(server, backend, CompatDialect(has_lora_root=True))
    client.chat(tools=[TOOL])
    assert backend.renderings[-1]["tools"] == [TOOL]
    client.chat(tools=[TOOL], include_json_schema_in_prompt=False)
    assert backend.renderings[-1]["tools"] is None


def test_expanded_prompt_whole_and_streamed(ours):
    assert ours.complete(return_expanded_prompt=True).json()["expanded_prompt"] == "<s>hello"
    chunks = events(ours.chat(return_expanded_prompt=True, stream=True))[:-1]
    reported = [chunk.get("expanded_prompt") for chunk in chunks]
    assert reported[0].endswith("user: hello\nassistant: ")
    assert not any(reported[1:])


@pytest.mark.parametrize("level", ["none", "warning", "json", "verbose"])
def test_llg_log_level_is_taken(ours, level):
    assert ours.chat(llg_log_level=level).status_code == 200
    assert error_of(ours.chat(llg_log_level="loud"))[0] == 400


# ------------------------------------------------------------ the guidance protocol

GRAMMAR = {"grammars": [{"lark_grammar": "start: /(.|\\n)*/"}]}
RUN = {"controller": "llguidance", "controller_arg": {"grammar": GRAMMAR}}


@pytest.mark.parametrize("path", ["/v1/run", "/guidance"])
def test_a_run(ours, backend, path):
    response = ours.post(path, {**RUN, "prompt": "hello", "max_tokens": 50, "lora_model": "fr"})
    assert response.headers["content-type"].startswith("text/event-stream")
    begin, *runs, done = events(response)
    assert begin["object"] == "initial-run"
    assert begin["id"].startswith("run-")
    assert done == "[DONE]"
    assert {run["object"] for run in runs} == {"run"}
    forks = [fork for run in runs for fork in run["forks"]]
    assert "".join(fork["text"] for fork in forks) == "echo+fr: hello"
    assert [fork["finish_reason"] for fork in forks][-1] == "stop"
    assert {fork["error"] for fork in forks} == {""}
    usage = runs[-1]["usage"]
    assert usage["cost"] == 3 * usage["sampled_tokens"] + usage["ff_tokens"]
    request = backend.requests[-1]
    assert request.sampling.grammar.kind is GrammarKind.LLGUIDANCE
    assert json.loads(request.sampling.grammar.text) == GRAMMAR


def test_a_run_of_messages_has_sixteen_tokens(ours, backend):
    ours.post("/v1/run", {**RUN, "messages": HELLO, "temperature": 0.5, "top_p": 0.5})
    request = backend.requests[-1]
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (16, 0.5, 0.5)
    assert request.prompt == "<s>user: hello\nassistant: "


def test_captures_are_in_the_logs(ours):
    lark = 'start: "echo: " word\nword[capture="w"]: /[a-z]{5}/'
    argument = {"grammar": {"grammars": [{"lark_grammar": lark}]}}
    response = ours.post("/v1/run", {**RUN, "controller_arg": argument, "prompt": "hello"})
    logs = "".join(f["logs"] for e in events(response)[1:-1] for f in e["forks"])
    said = [json.loads(line.removeprefix("JSON-OUT: ")) for line in logs.splitlines()]
    assert bytes.fromhex("".join(e["hex"] for e in said if e["object"] == "text")).startswith(
        b"echo: hello"
    )
    captures = {e["name"]: bytes.fromhex(e["hex"]) for e in said if e["object"] == "capture"}
    assert captures == {"w": b"hello"}


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"controller": "guidance", "prompt": "a"}, ("controller", "llguidance", "guidance")),
        ({"controller": "llguidance", "prompt": "a"}, ("controller_arg.grammar",)),
        (RUN, ("prompt", "messages")),
        ({**RUN, "prompt": "a", "messages": HELLO}, ("prompt", "messages")),
        ({**RUN, "prompt": "a", "temperature": "hot"}, ("temperature", "hot")),
        ({**RUN, "prompt": "a", "lora_model": "nobody"}, ("nobody",)),
    ],
)
def test_runs_that_are_refused(ours, body, named):
    status, message = error_of(ours.post("/v1/run", body))
    assert status in (400, 404)
    assert re.search(naming(*named), message)


def test_a_run_that_fails_on_the_way(ours, backend):
    backend.plant(StepFailedError("broken"), after_outputs=2)
    *_, last = events(ours.post("/v1/run", {**RUN, "prompt": "hello"}))
    assert last["error"]["message"] == "broken"


# ------------------------------------------------------------ health


def test_health(ours, backend):
    assert ours.get("/v1/health/live").text == "Check complete"
    assert ours.get("/v1/health/ready").text == ""
    assert ours.get("/v1/health/model").text == "Check complete"
    probe = backend.requests[-1]
    assert (probe.prompt, probe.sampling.max_tokens, probe.priority) == ("Hi", 2, -10)


def test_a_model_that_does_not_respond(ours, backend):
    backend.plant(QueueFullError("full"))
    response = ours.get("/v1/health/model")
    assert (response.status_code, response.text) == (503, "Check failed")


def test_the_probe_is_a_request_of_the_caller(ours, backend):
    backend.plant(RateLimitedError("slow down", retry_after_seconds=1))
    assert ours.get("/v1/health/model").status_code == 429


# ------------------------------------------------------------ differences, a test for each row

ROWS = {}


def row(name):
    def register(check):
        ROWS[name] = check
        return check

    return register


def test_every_difference_has_a_test():
    assert list(ROWS) == [difference.name for difference in DIFFERENCES]


@pytest.mark.parametrize("name", [difference.name for difference in DIFFERENCES])
def test_difference(name, server, backend):
    def client(dialect):
        return DialectClient(server, backend, dialect)

    ROWS[name](
        lambda: client(LlgtrtDialect(has_lora_root=True)),
        lambda: client(CompatDialect(has_lora_root=True, json_start_token=TOOL_START)),
        backend,
    )


@row("max_tokens of a chat")
def _(ours, theirs, backend):
    ours().chat()
    theirs().chat()
    assert [r.sampling.max_tokens for r in backend.requests] == [None, 16]
    theirs().chat(max_completion_tokens=3)
    assert backend.requests[-1].sampling.max_tokens == 3


@row("object")
def _(ours, theirs, backend):
    assert ours().chat().json()["object"] == "chat.completion"
    assert theirs().chat().json()["object"] == "text_completion"
    assert theirs().chat().json()["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": ("echo" + COMPLETION_TEXT)[:16]},
            "logprobs": None,
            "finish_reason": "length",
        }
    ]


@row("id")
def _(ours, theirs, backend):
    assert ours().chat().json()["id"].startswith("chatcmpl-")
    response = theirs().chat().json()["id"]
    assert (response[:5], len(response)) == ("cmpl-", 41)


@row("system_fingerprint")
def _(ours, theirs, backend):
    assert ours().chat().json()["system_fingerprint"].startswith("lp-")
    assert theirs().chat().json()["system_fingerprint"] is None


@row("expanded_prompt")
def _(ours, theirs, backend):
    assert "expanded_prompt" not in ours().chat().json()
    assert theirs().chat().json()["expanded_prompt"] is None
    assert theirs().chat(return_expanded_prompt=True).json()["expanded_prompt"]


@row("usage of a stream")
def _(ours, theirs, backend):
    assert not any("usage" in chunk for chunk in events(ours().chat(stream=True))[:-1])
    chunks = events(theirs().chat(stream=True))
    assert chunks.pop() == "[DONE]"
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 16
    assert all(chunk["choices"] for chunk in chunks)
    assert "usage" in events(ours().chat(stream=True, stream_options={"include_usage": True}))[-2]


@row("role in a stream")
def _(ours, theirs, backend):
    first, second, *_ = events(ours().chat(stream=True))
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "role" not in second["choices"][0]["delta"]
    deltas = [c["choices"][0]["delta"] for c in events(theirs().chat(stream=True))[:-1]]
    assert {delta["role"] for delta in deltas} == {"assistant"}
    assert deltas[0]["content"] != ""
    assert "".join(delta["content"] for delta in deltas) == ("echo" + COMPLETION_TEXT)[:16]


@row("errors")
def _(ours, theirs, backend):
    assert error_of(ours().chat(temperature=-1))[0] == 400
    assert error_of(ours().chat(lora_model="nobody"))[0] == 404
    response = theirs().chat(temperature=-1)
    assert (response.status_code, set(response.json())) == (500, {"error"})
    assert "temperature" in response.json()["error"]
    assert theirs().chat(lora_model="nobody", stream=True).status_code == 500


@row("errors in a stream")
def _(ours, theirs, backend):
    for client, reported in (
        (ours, {"message": "broken", "type": "server_error", "param": None, "code": "step_failed"}),
        (theirs, {"status_code": 500, "message": "broken"}),
    ):
        backend.plant(StepFailedError("broken"), after_outputs=2)
        assert events(client().chat(stream=True))[-1] == {"error": reported}


@row("bodies that cannot be read")
def _(ours, theirs, backend):
    def statuses(client):
        bodies = (b"{", b"[]", b'{"model": 5, "messages": []}')
        responses = [
            httpx.post(
                f"{client.url}{CHAT}",
                content=body,
                headers={"content-type": "application/json"},
                timeout=60,
            )
            for body in bodies
        ]
        responses.append(httpx.post(f"{client.url}{CHAT}", content=b"{}", timeout=60))
        return responses

    assert [response.status_code for response in statuses(ours())] == [400] * 4
    reported = statuses(theirs())
    assert [response.status_code for response in reported] == [400, 400, 422, 415]
    assert all(response.headers["content-type"].startswith("text/plain") for response in reported)


@row("a missing or wrong key")
def _(ours, theirs, backend):
    from loraplex.core.errors import UnauthenticatedError
    from loraplex.frontends.openai.errors import error_response
    from loraplex.frontends.openai.llgtrt.compat import CompatErrors

    error = UnauthenticatedError("no key")
    assert CompatErrors().response(error).body == b""
    assert CompatErrors().response(error).status_code == error_response(error).status_code == 401


@row("model")
def _(ours, theirs, backend):
    assert ours().chat(model=...).status_code == 200
    assert theirs().chat(model=...).status_code == 422


@row("stop")
def _(ours, theirs, backend):
    assert ours().chat(stop="x").status_code == 200
    assert theirs().chat(stop="x").status_code == 422
    assert theirs().chat(stop=["x"]).status_code == 200


@row("roles")
def _(ours, theirs, backend):
    messages = [{"role": "developer", "content": "be kind"}, *HELLO]
    assert ours().chat(messages=messages).status_code == 200
    assert theirs().chat(messages=messages).status_code == 422
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    assert theirs().chat(messages=image).json() == {"error": "unexpected ImageUrl"}


@row("prompt")
def _(ours, theirs, backend):
    for prompt in (["a", "b"], [1, 2], [[1, 2]], []):
        assert ours().complete(prompt=prompt).status_code == (200 if prompt else 400)
        response = theirs().complete(prompt=prompt)
        assert response.json() == {"error": "prompt must be a single string"}
    for prompt in ("a", ["a"]):
        assert theirs().complete(prompt=prompt).status_code == 200


def refused(ours, theirs, path, message, **fields):
    for make, status in ((ours, 200), (theirs, 500)):
        client = make()
        response = client.complete(**fields) if path == COMPLETION else client.chat(**fields)
        assert response.status_code == status, response.text
    assert response.json() == {"error": message}


@row("logprobs of a completion")
def _(ours, theirs, backend):
    refused(ours, theirs, COMPLETION, "logprobs not supported yet", logprobs=1)


@row("best_of")
def _(ours, theirs, backend):
    refused(ours, theirs, COMPLETION, "best_of not supported yet", best_of=2)
    assert theirs().complete(best_of=1).status_code == 200


@row("echo")
def _(ours, theirs, backend):
    refused(ours, theirs, COMPLETION, "echo not supported yet", echo=True)
    assert theirs().complete(echo=False).status_code == 200


@row("logit_bias")
def _(ours, theirs, backend):
    for path in (COMPLETION, CHAT):
        refused(ours, theirs, path, "logit_bias not supported yet", logit_bias={"5": 1})


@row("top_logprobs")
def _(ours, theirs, backend):
    message = "logprobs > 1 not supported yet"
    refused(ours, theirs, CHAT, message, logprobs=True, top_logprobs=2)
    choice = theirs().chat(logprobs=True, top_logprobs=1).json()["choices"][0]
    assert set(choice["logprobs"]) == {"content"}


@row("tool_choice")
def _(ours, theirs, backend):
    choice = {"type": "function", "function": {"name": "f"}}
    assert ours().chat(tools=[TOOL], tool_choice=choice).status_code == 200
    response = theirs().chat(tools=[TOOL], tool_choice=choice)
    assert response.json() == {
        "error": "only simple options are currently supported for tool_choice"
    }


@row("tool calls")
def _(ours, theirs, backend):
    for choice, start in (
        ("required", f"start: {TOOL_START} call"),
        (..., f"start: TEXT | {TOOL_START} call"),
        ("none", None),
    ):
        response = theirs().chat(tools=[TOOL], tool_choice=choice).json()
        assert isinstance(response["choices"][0]["message"]["content"], str)
        assert "tool_calls" not in response["choices"][0]["message"]
        grammar = backend.requests[-1].sampling.grammar
        assert (grammar and grammar.text.partition("\n")[0]) == start


@row("special tokens of an output")
def _(ours, theirs, backend):
    for send in ("chat", "complete"):
        getattr(ours(), send)()
        assert backend.requests[-1].sampling.skip_special_tokens
        getattr(theirs(), send)()
        assert not backend.requests[-1].sampling.skip_special_tokens
    theirs().chat(tools=[TOOL], tool_choice="required")
    assert not backend.requests[-1].sampling.skip_special_tokens


@row("tojson of a chat template")
def _(ours, theirs, backend):
    for dialect, expected in (("llgtrt", '{"a": 1}'), ("llgtrt_compat", '{\n    "a": 1\n}')):
        assert rendered(dialect, "{{ {'a': 1} | tojson }}") == expected


async def rendered_by(service):
    try:
        return await service.model("m").chats.render(HELLO)
    finally:
        await service.close()


def rendered(dialect, template):
    """What `loraplex compat llgtrt` makes of a template, with the settings of a real server."""
    with tempfile.TemporaryDirectory() as folder:
        model = ModelConfig(path=str(BASE_PATH), tokenizer_config={"chat_template": template})
        server = ServerConfig(state_dir=folder, persist_adapters=False, dialect=dialect)
        config = Config(server=server, models={"m": model})
        service = build_service(config, lambda model: None, RequestMetrics(config.models))
        return asyncio.run(rendered_by(service))


@row("unready")
def _(ours, theirs, backend):
    backend.unready_reason = "it starts"
    response = ours().get("/v1/health/ready")
    assert (response.status_code, response.text) == (
        503,
        "the engine of model 'echo' is restarting: it starts",
    )
    assert theirs().get("/v1/health/ready").status_code == 200
    backend.plant(QueueFullError("full"))
    assert theirs().get("/v1/health/model").status_code == 500
