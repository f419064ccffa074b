"""An error names the field that the client sent, whatever the parameter is called inside."""

from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from starlette.applications import Starlette

from loraplex.core.class_format import ClassFormat
from loraplex.core.errors import LoraplexError, PromptTooLongError, UnsupportedFeatureError
from loraplex.frontends.openai import openai_routes
from support.echo_service import EchoService
from support.served import served

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
COMPARE, EMBEDDINGS, CLASSIFY = "/v1/compare", "/v1/embeddings", "/classify"
RERANK = "/rerank"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "hi"},
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    RESPONSES: {"input": "hi"},
    COMPARE: {"prompt": "hi", "adapters": [None]},
    EMBEDDINGS: {"input": "hi"},
    RERANK: {"query": "hi", "documents": ["hi"]},
    CLASSIFY: {"input": "hi"},
}
TOO_LONG = "the prompt has 2 tokens and max_tokens is 9999"
SCHEMA = {"type": "object"}


@pytest.fixture(scope="module")
def backend() -> EchoService:
    return EchoService()


@pytest.fixture(scope="module")
def http(backend: EchoService) -> Iterator[httpx.Client]:
    app = Starlette()
    app.routes.extend(openai_routes(backend))
    with served(app) as url, httpx.Client(base_url=url) as http:
        yield http


def refused(http: httpx.Client, path: str, fields: dict[str, Any]) -> dict[str, Any]:
    response = http.post(path, json={**BODIES[path], **fields})
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "field"),
    [
        (COMPLETIONS, "max_tokens"),
        (CHAT, "max_tokens"),
        (CHAT, "max_completion_tokens"),
        (RESPONSES, "max_output_tokens"),
        (COMPARE, "max_tokens"),
    ],
)
def test_a_length_that_the_model_has_not(
    http: httpx.Client, backend: EchoService, path: str, field: str, stream: bool
) -> None:
    backend.plant(PromptTooLongError(TOO_LONG, param="max_tokens"))
    error = refused(http, path, {field: 9999, "stream": stream})
    assert error["param"] == field
    assert error["message"] == TOO_LONG.replace("max_tokens", field)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens"),
        (CHAT, {"max_completion_tokens": 5, "min_tokens": 9}, "min_tokens"),
        (CHAT, {"max_tokens": 0}, "max_tokens"),
        (RESPONSES, {"max_output_tokens": 2**31}, "max_output_tokens"),
        (COMPLETIONS, {"top_p_reset_ids": 2**40}, "top_p_reset_ids"),
        (EMBEDDINGS, {"dimensions": 0}, "dimensions"),
        (EMBEDDINGS, {"encoding_format": "bytes"}, "encoding_format"),
        (EMBEDDINGS, {"normalize": "yes"}, "normalize"),
        (EMBEDDINGS, {"prompt_name": "query"}, "prompt_name"),
        (EMBEDDINGS, {"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        (EMBEDDINGS, {"priority": 2**40}, "priority"),
        (RERANK, {"top_n": -1}, "top_n"),
        (RERANK, {"max_tokens_per_doc": 0}, "max_tokens_per_doc"),
        (RERANK, {"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        (RERANK, {"cache_salt": ""}, "cache_salt"),
        (CLASSIFY, {"use_activation": "yes"}, "use_activation"),
        (CLASSIFY, {"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        (CLASSIFY, {"priority": 2**40}, "priority"),
    ],
)
def test_a_value_out_of_range(
    http: httpx.Client, path: str, fields: dict[str, Any], param: str
) -> None:
    error = refused(http, path, fields)
    assert error["param"] == param
    for field in fields:
        assert field in error["message"]


@pytest.mark.parametrize(
    ("error", "param"),
    [
        (PromptTooLongError("the prompt is too long", param="prompt"), "input"),
        (UnsupportedFeatureError("vectors of kind mean are not served", param="kind"), "model"),
        (UnsupportedFeatureError("dimensions are not served", param="dimensions"), "dimensions"),
    ],
)
def test_the_fields_of_vectors(
    http: httpx.Client, backend: EchoService, error: LoraplexError, param: str
) -> None:
    backend.plant(error)
    assert refused(http, EMBEDDINGS, {})["param"] == param


@pytest.mark.parametrize(
    ("body", "param"),
    [({}, "input"), ({"input": None, "messages": [{"role": "user", "content": "a"}]}, "messages")],
)
def test_the_field_of_a_text_that_is_classified(
    http: httpx.Client, backend: EchoService, body: dict[str, Any], param: str
) -> None:
    model = backend.model("echo")
    model.card = msgspec.structs.replace(model.card, classes=ClassFormat(num_labels=2))
    backend.plant(PromptTooLongError("the prompt is too long", param="prompt"))
    assert refused(http, CLASSIFY, body)["param"] == param


def test_the_fields_of_lorax(http: httpx.Client, backend: EchoService) -> None:
    backend.plant(PromptTooLongError(TOO_LONG, param="max_tokens"))
    body = {"inputs": "hi", "parameters": {"max_new_tokens": 9999}}
    response = http.post("/generate", json=body)
    assert response.json()["error"] == TOO_LONG.replace("max_tokens", "max_new_tokens")


CONSTRAINTS: list[tuple[str, dict[str, Any], str]] = [
    (
        COMPLETIONS,
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        "response_format",
    ),
    (COMPLETIONS, {"guided_json": SCHEMA}, "guided_json"),
    (COMPLETIONS, {"guided_regex": "a"}, "guided_regex"),
    (COMPLETIONS, {"guided_choice": ["a"]}, "guided_choice"),
    (COMPLETIONS, {"guided_grammar": 'start: "a"'}, "guided_grammar"),
    (COMPLETIONS, {"json_schema": SCHEMA}, "json_schema"),
    (COMPLETIONS, {"regex": "a"}, "regex"),
    (COMPLETIONS, {"ebnf": 'root ::= "a"'}, "ebnf"),
    (
        CHAT,
        {"structured_outputs": {"regex": None, "json": SCHEMA}},
        "structured_outputs.json",
    ),
    (
        RESPONSES,
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}},
        "text.format",
    ),
    (COMPARE, {"guided_json": SCHEMA}, "guided_json"),
]


@pytest.mark.parametrize(("path", "fields", "param"), CONSTRAINTS)
def test_a_constraint_that_cannot_be_enforced(
    http: httpx.Client, backend: EchoService, path: str, fields: dict[str, Any], param: str
) -> None:
    backend.plant(UnsupportedFeatureError("the JSON schema is not supported", param="grammar"))
    error = refused(http, path, fields)
    assert (error["param"], error["code"]) == (param, "unsupported_feature")
