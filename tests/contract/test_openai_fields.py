"""Fields of vLLM, SGLang and LoRAX over the wire, and what cannot be said together."""

import json
from collections.abc import Iterator

import httpx
import pytest
from starlette.applications import Starlette

from loraplex.core.grammar import Grammar, GrammarKind
from loraplex.core.request import PromptTruncation, TruncationSide
from loraplex.frontends.openai import openai_fallback_routes, openai_routes
from support.echo_service import EchoService
from support.served import served

HELLO = [{"role": "user", "content": "hello"}]
PREFILL = [*HELLO, {"role": "assistant", "content": "Hel"}]


@pytest.fixture(scope="module")
def backend() -> EchoService:
    backend = EchoService()
    backend.register("fr")
    backend.register("de")
    return backend


@pytest.fixture(scope="module")
def http(backend) -> Iterator[httpx.Client]:
    app = Starlette()
    app.routes.extend(openai_routes(backend))
    app.routes.extend(openai_fallback_routes())
    with served(app) as url, httpx.Client(base_url=url, timeout=60) as http:
        yield http


def complete(http: httpx.Client, headers: dict | None = None, **fields) -> dict:
    body = {"prompt": "hi", "max_tokens": 50} | fields
    return http.post("/v1/completions", json=body, headers=headers).json()


def chat(http: httpx.Client, **fields) -> dict:
    return http.post("/v1/chat/completions", json={"messages": HELLO} | fields).json()


def stream(http: httpx.Client, path: str, **fields) -> list[dict]:
    body = {"prompt": "hi", "messages": HELLO, "max_tokens": 50, "stream": True} | fields
    events = http.post(path, json=body).text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


# ------------------------------------------------------------------ which adapter


@pytest.mark.parametrize(
    ("headers", "fields"),
    [
        ({}, {"model": "fr"}),
        ({}, {"model": "echo:fr"}),
        ({}, {"lora_model": "fr"}),
        ({}, {"adapter_id": "fr"}),
        ({}, {"adapter_id": "fr", "adapter_source": "hub", "api_token": "t"}),
        ({}, {"lora_path": "fr"}),
        ({}, {"lora_path": ["fr"]}),
        ({"X-LoRA-Adapter": "fr"}, {}),
        ({"x-lora-adapter": "fr"}, {"model": "fr", "adapter_id": "fr", "lora_model": "fr"}),
    ],
)
def test_every_way_to_name_an_adapter(http, headers, fields):
    assert complete(http, headers, **fields)["choices"][0]["text"] == "echo+fr: hi"
    body = {"messages": HELLO, "max_tokens": 7} | fields
    response = http.post("/v1/chat/completions", json=body, headers=headers).json()
    assert response["choices"][0]["message"]["content"] == "echo+fr"


@pytest.mark.parametrize(
    ("headers", "fields", "param"),
    [
        ({}, {"model": "fr", "adapter_id": "de"}, "adapter_id"),
        ({}, {"model": "fr", "lora_path": "de"}, "lora_path"),
        ({"x-lora-adapter": "de"}, {"model": "fr"}, "x-lora-adapter"),
        ({"x-lora-adapter": "de"}, {"lora_model": "fr"}, "x-lora-adapter"),
        ({"x-lora-adapter": "de"}, {"adapters": ["fr"]}, "adapters"),
        ({}, {"lora_path": ["fr", None]}, "lora_path"),
        ({}, {"merged_adapters": {"ids": ["fr", "de"]}}, "merged_adapters"),
    ],
)
def test_two_adapters_where_one_can_be_meant(http, headers, fields, param):
    error = complete(http, headers, **fields)["error"]
    assert error["param"] == param


def test_an_adapter_for_each_prompt(http):
    response = complete(http, prompt=["a", "b", "c"], lora_path=["fr", None, "de"])
    assert [choice["text"] for choice in response["choices"]] == [
        "echo+fr: a",
        "echo: b",
        "echo+de: c",
    ]
    assert [adapter["name"] for adapter in response["loraplex"]["adapters"]] == ["fr", "de"]


def test_an_unknown_adapter_in_the_header(http):
    assert complete(http, {"x-lora-adapter": "no"})["error"]["code"] == "adapter_not_found"


# ------------------------------------------------------------------ prompts


@pytest.mark.parametrize(
    ("fields", "truncation", "text"),
    [
        ({"truncate_prompt_tokens": 2}, PromptTruncation(2), "echo: fg"),
        (
            {"truncate_prompt_tokens": 3, "truncation_side": "right"},
            PromptTruncation(3, TruncationSide.RIGHT),
            "echo: ab",
        ),
        ({"truncate_prompt_tokens": -1}, PromptTruncation(None), "echo: abcdefg"),
    ],
)
def test_a_prompt_is_cut(http, backend, fields, truncation, text):
    response = complete(http, prompt="abcdefg", **fields)
    assert response["choices"][0]["text"] == text
    assert backend.requests[-1].truncation == truncation


def test_a_prompt_that_fits_nowhere_is_cut_to_what_fits(http):
    response = complete(http, prompt="x" * 5000, truncate_prompt_tokens=-1, max_tokens=100)
    assert response["usage"]["prompt_tokens"] == 4096 - 100


def test_what_was_cut_is_not_echoed(http):
    response = complete(http, prompt="abcdefg", truncate_prompt_tokens=2, echo=True)
    assert response["choices"][0]["text"] == "fgecho: fg"


@pytest.mark.parametrize("most", [0, -2])
def test_a_prompt_of_no_tokens(http, most):
    assert complete(http, truncate_prompt_tokens=most)["error"]["param"] == "truncate_prompt_tokens"


def test_a_chat_goes_on_with_the_last_message(http, backend):
    response = chat(http, messages=PREFILL, continue_final_message=True)
    assert backend.requests[-1].prompt == "<s>user: hello\nassistant: Hel"
    message = response["choices"][0]["message"]
    assert message == {
        "content": "echo: user: hello\nassistant: Hel",
        "role": "assistant",
        "refusal": None,
    }


def test_echo_gives_the_last_message_back(http):
    fields = {"messages": PREFILL, "continue_final_message": True, "echo": True}
    whole = chat(http, **fields)["choices"][0]["message"]["content"]
    assert whole == "Helecho: user: hello\nassistant: Hel"
    chunks = stream(http, "/v1/chat/completions", **fields)
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == whole
    user = chat(http, messages=HELLO, continue_final_message=True, echo=True)["choices"][0][
        "message"
    ]
    assert (user["role"], user["content"][:8]) == ("user", "helloech")
    other = chat(http, messages=HELLO, echo=True)["choices"][0]["message"]
    assert other["content"].startswith("echo: "), (
        "the last message does not have the role of the output"
    )


def test_a_turn_is_continued_or_begun(http):
    response = chat(http, continue_final_message=True, add_generation_prompt=True)
    assert response["error"]["param"] == "continue_final_message"


def test_documents_are_for_the_template(http, backend):
    chat(http, documents=[{"title": "T", "text": "..."}])
    assert "'title': 'T'" in backend.requests[-1].prompt
    error = chat(http, documents=["x"])["error"]
    assert (error["param"], error["message"][:30]) == (
        "documents[0]",
        "documents[0] must be an object",
    )


def test_a_cache_salt(http, backend):
    complete(http, cache_salt="tenant-7")
    assert backend.requests[-1].cache_salt == "tenant-7"
    for wrong in ("", "x" * 1025):
        assert complete(http, cache_salt=wrong)["error"]["param"] == "cache_salt"


# ------------------------------------------------------------------ what comes back


def test_token_ids_of_a_completion(http):
    [choice] = complete(http, return_token_ids=True)["choices"]
    assert choice["prompt_token_ids"] == [256, *b"hi"]
    assert bytes(choice["token_ids"][:-1]).decode() == "echo: hi"
    chunks = stream(http, "/v1/completions", return_token_ids=True)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert choices[0]["prompt_token_ids"] == [256, *b"hi"]
    assert all("prompt_token_ids" not in choice for choice in choices[1:])
    assert [i for one in choices for i in one["token_ids"]] == choice["token_ids"]
    assert "token_ids" not in complete(http)["choices"][0]


def test_token_ids_and_prompt_of_a_chat(http):
    fields = {"return_token_ids": True, "return_prompt_text": True}
    response = chat(http, **fields)
    prompt = "<s>user: hello\nassistant: "
    assert response["prompt_text"] == prompt
    assert bytes(response["prompt_token_ids"][1:]).decode() == prompt.removeprefix("<s>")
    chunks = stream(http, "/v1/chat/completions", **fields)
    assert chunks[0]["prompt_text"] == prompt
    assert chunks[0]["prompt_token_ids"] == response["prompt_token_ids"]
    assert all("prompt_text" not in chunk for chunk in chunks[1:])
    reported = [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", [])]
    assert reported == response["choices"][0]["token_ids"]


def test_tokens_as_ids(http):
    [choice] = complete(http, logprobs=1, return_tokens_as_token_ids=True)["choices"]
    assert choice["logprobs"]["tokens"][0] == f"token_id:{ord('e')}"
    assert list(choice["logprobs"]["top_logprobs"][0]) == [f"token_id:{ord('e')}"]
    response = chat(http, logprobs=True, top_logprobs=2, return_tokens_as_token_ids=True)
    first = response["choices"][0]["logprobs"]["content"][0]
    assert (first["token"], first["bytes"]) == (f"token_id:{ord('e')}", [ord("e")])
    assert first["top_logprobs"][1]["token"] == f"token_id:{ord('f')}"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_usage_in_every_chunk(http, path):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = stream(http, path, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]
    without = stream(http, path, stream_options={"continuous_usage_stats": True})
    assert all("usage" not in chunk for chunk in without)


def test_finish_reasons(http):
    assert complete(http, stop=[" h"])["choices"][0]["stop_reason"] == " h"
    assert complete(http, stop_token_ids=[ord("h")])["choices"][0]["stop_reason"] == ord("h")
    assert "stop_reason" not in complete(http)["choices"][0]


@pytest.mark.parametrize("field", ["request_id", "rid"])
def test_the_body_names_the_request(http, backend, field):
    response = http.post("/v1/completions", json={"prompt": "hi", field: "mine-2"})
    assert response.json()["id"] == "cmpl-mine-2"
    assert response.headers["x-request-id"] == "mine-2"
    assert backend.requests[-1].client_request_id == "mine-2"
    header = {"x-request-id": "theirs"}
    reported = http.post("/v1/completions", json={"prompt": "hi", field: "mine-2"}, headers=header)
    assert reported.headers["x-request-id"] == "theirs"


@pytest.mark.parametrize("wrong", ["x" * 257, "a\nb", "é"])
def test_an_id_that_no_header_can_hold(http, wrong):
    response = http.post("/v1/completions", json={"prompt": "hi", "request_id": wrong})
    assert response.status_code == 400
    assert "request_id" in response.json()["error"]["message"]


# ------------------------------------------------------------------ grammars and synonyms


OBJECT = {"type": "object"}


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"regex": "a+"}, Grammar(GrammarKind.REGEX, "a+")),
        ({"ebnf": 'root ::= "a"'}, Grammar(GrammarKind.EBNF, 'root ::= "a"')),
        (
            {"json_schema": json.dumps(OBJECT)},
            Grammar(GrammarKind.JSON_SCHEMA, json.dumps(OBJECT)),
        ),
        (
            {"response_format": {"type": "json_object", "schema": OBJECT | {"title": "t"}}},
            Grammar(GrammarKind.JSON_SCHEMA, json.dumps(OBJECT | {"title": "t"})),
        ),
        (
            {
                "guided_grammar": 'start: "a"',
                "structured_outputs": {"grammar": 'start: "a"'},
                "guided_decoding_backend": "guidance",
            },
            Grammar(GrammarKind.LARK, 'start: "a"'),
        ),
    ],
)
def test_a_grammar_as_others_say_it(http, backend, fields, grammar):
    assert "choices" in complete(http, **fields)
    assert backend.requests[-1].sampling.grammar == grammar


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"ignore_eos_token": True, "max_tokens": 3}, "ignore_eos"),
        ({"no_stop_trim": True}, "include_stop_in_output"),
    ],
)
def test_synonyms(http, backend, fields, name):
    assert "choices" in complete(http, **fields)
    assert getattr(backend.requests[-1].sampling, name) is True


def test_synonyms_that_disagree(http):
    error = complete(http, ignore_eos=True, ignore_eos_token=False)["error"]
    assert (error["param"], error["code"]) == ("ignore_eos_token", "invalid_parameter")


# ------------------------------------------------------------------ limits


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ["a"] * 257}, "prompt"),
        ({"prompt": ["a"] * 64, "n": 65}, "n"),
        ({"stop": ["a"] * 65}, "stop"),
        ({"stop": "a" * 4097}, "stop"),
        ({"stop_token_ids": [5] * 1025}, "stop_token_ids"),
    ],
)
def test_limits_of_a_completion(http, fields, param):
    assert complete(http, **fields)["error"]["param"] == param


def test_limits_of_a_chat(http):
    assert chat(http, messages=HELLO * 8193)["error"]["param"] == "messages"


# ------------------------------------------------------------------ routes


def test_tokenize_has_all_of_vllms_fields(http):
    body = {"prompt": "hé", "return_token_strs": True}
    assert http.post("/tokenize", json=body).json() == {
        "count": 4,
        "max_model_len": 4096,
        "tokens": [256, *"hé".encode()],
        "token_strs": ["<s>", "h", "\ufffd", "\ufffd"],
    }
    body = {"messages": PREFILL, "continue_final_message": True}
    tokens = http.post("/tokenize", json=body).json()["tokens"]
    assert bytes(tokens[1:]).decode() == "user: hello\nassistant: Hel"
    refused = http.post("/tokenize", json={"prompt": "a", "chat_template": "{{ x }}"})
    assert refused.json()["error"]["code"] == "unsupported_feature"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/moderations"),
        ("POST", "/v1/images/generations"),
        ("GET", "/v1/files/file-1/content"),
        ("POST", "/embed_sparse"),
        ("POST", "/v1/embed"),
    ],
)
def test_a_route_that_is_not_served(http, method, path):
    response = http.request(method, path, json={})
    assert response.status_code == 404
    error = response.json()["error"]
    assert error["code"] == "unsupported_route"
    assert path in error["message"]


def test_head_and_options(http):
    head = http.head("/v1/models")
    assert (head.status_code, head.content) == (200, b"")
    assert int(head.headers["content-length"]) > 0
    assert http.head("/v1/models/no").status_code == 404
    options = http.options("/v1/models")
    assert (options.status_code, options.headers["allow"]) == (204, "GET, HEAD, OPTIONS")
    assert http.options("/v1/completions").headers["allow"] == "OPTIONS, POST"
    refused = http.put("/v1/completions", json={})
    assert (refused.status_code, refused.headers["allow"]) == (405, "OPTIONS, POST")


def test_probes(http, backend):
    assert [http.get(path).status_code for path in ("/health", "/ping", "/version")] == [200] * 3
    assert http.post("/ping").status_code == 200
    assert set(http.get("/version").json()) == {"version"}
    backend.unready_reason = "it starts"
    try:
        response = http.get("/health")
        assert response.status_code == 503
        assert response.json()["error"]["message"].endswith("restarting: it starts")
    finally:
        backend.unready_reason = ""
