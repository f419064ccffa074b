"""A value of a megabyte does not come back in an error, nor go to the log, on any wire."""

import logging
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc
from starlette.applications import Starlette
from tritonclient.utils import InferenceServerException

from loraplex.core.errors import MAX_MESSAGE, MAX_QUOTED, AdapterNotFoundError
from loraplex.frontends.openai import openai_fallback_routes, openai_routes
from support.echo_service import EchoService
from support.served import served
from support.served_triton import ServedTriton

LONG = "x" * (1 << 20)
SPACED = "a name " * (1 << 17)
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
EMBEDDINGS, CLASSIFY = "/v1/embeddings", "/classify"
USER = [{"role": "user", "content": "hi"}]


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def bodies(value: str) -> list[tuple[str, dict[str, Any]]]:
    """(path, body) of requests that are refused for this value."""
    return [
        (COMPLETIONS, {"model": value, "prompt": "hi"}),
        (COMPLETIONS, {"prompt": "hi", "lora_model": value}),
        (COMPLETIONS, {"prompt": "hi", "adapters": [value]}),
        (COMPLETIONS, {"prompt": "hi", "adapters": [{"name": "fr", value: 1}]}),
        (COMPLETIONS, {"prompt": "hi", "adapters": [{"digest": value}]}),
        (COMPLETIONS, {"prompt": "hi", "temperature": value}),
        (COMPLETIONS, {"prompt": "hi", "request_id": value}),
        (COMPLETIONS, {"prompt": "hi", "load_lora_weights": value}),
        (COMPLETIONS, {"prompt": "hi", "logit_bias": {value: 1}}),
        (COMPLETIONS, {"prompt": "hi", "response_format": {"type": value}}),
        (COMPLETIONS, {"prompt": "hi", "structured_outputs": {value: 1}}),
        (COMPLETIONS, {"prompt": "hi", value: 1}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": value}]}]}),
        (CHAT, {"messages": USER, "tools": [tool(value)]}),
        (CHAT, {"messages": USER, "tools": [{"type": value}]}),
        (CHAT, {"messages": USER, "tools": [tool("f")], "tool_choice": value}),
        (CHAT, {"messages": USER, "tools": [tool("f")], "tool_choice": tool(value)}),
        (RESPONSES, {"input": "hi", "model": value}),
        (RESPONSES, {"input": "hi", "previous_response_id": value}),
        (RESPONSES, {"input": "hi", "include": [value]}),
        (RESPONSES, {"input": [{"type": value}]}),
        (RESPONSES, {"input": "hi", "metadata": {value: "x"}}),
        (RESPONSES, {"input": "hi", "text": {"format": {"type": value}}}),
        (EMBEDDINGS, {"input": "hi", "model": value}),
        (EMBEDDINGS, {"input": "hi", "adapters": [value]}),
        (EMBEDDINGS, {"input": "hi", "prompt_name": value}),
        (EMBEDDINGS, {"input": "hi", "encoding_format": value}),
        (EMBEDDINGS, {"input": "hi", "dimensions": value}),
        (EMBEDDINGS, {"input": "hi", "request_id": value}),
        (EMBEDDINGS, {"input": {value: 1}}),
        ("/pooling", {"input": "hi", "task": value}),
        ("/embed", {"inputs": "hi", "prompt_name": value}),
        ("/v2/embed", {"texts": ["hi"], "input_type": value}),
        ("/v2/embed", {"texts": ["hi"], "embedding_types": [value]}),
        ("/score", {"queries": value, "documents": "hi", "model": "no"}),
        ("/rerank", {"query": value, "documents": ["hi"]}),
        ("/rerank", {"query": "hi", "documents": [{value: "hi"}]}),
        ("/rerank", {"query": "hi", "documents": ["hi"], value: 1}),
        ("/rerank", {"query": "hi", "texts": ["hi"], "truncation_direction": value}),
        (EMBEDDINGS, {"input": "hi", value: 1}),
        (CLASSIFY, {"input": "hi", "model": value}),
        (CLASSIFY, {"input": "hi", "adapters": [value]}),
        (CLASSIFY, {"input": "hi", "use_activation": value}),
        (CLASSIFY, {"messages": [{"role": value, "content": "hi"}]}),
        (CLASSIFY, {"messages": value}),
        (CLASSIFY, {"input": "hi", "request_id": value}),
        (CLASSIFY, {"input": "hi", value: 1}),
        ("/v1/compare", {"prompt": "hi", "adapters": [value]}),
        ("/tokenize", {"prompt": "hi", "model": value}),
        ("/v1/adapters", {"name": value, "path": "/nowhere"}),
        ("/v1/load_lora_adapter", {"lora_name": value, "lora_path": "/nowhere"}),
        ("/generate", {"inputs": "hi", "parameters": {"adapter_id": value}}),
    ]


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    app = Starlette()
    backend = EchoService()
    app.routes.extend([*openai_routes(backend), *openai_fallback_routes()])
    with served(app) as url, httpx.Client(base_url=url) as http:
        yield http


@pytest.mark.parametrize(("value", "most"), [(LONG, 8 * MAX_QUOTED), (SPACED, MAX_MESSAGE + 1024)])
def test_over_http(
    http: httpx.Client, caplog: pytest.LogCaptureFixture, value: str, most: int
) -> None:
    with caplog.at_level(logging.DEBUG):
        for path, body in bodies(value):
            response = http.post(path, json=body)
            assert 400 <= response.status_code < 500, (path, list(body))
            assert len(response.text) < most, (path, list(body))
    assert max((len(record.getMessage()) for record in caplog.records), default=0) < most


def test_a_name_of_a_model_has_200_characters(http: httpx.Client) -> None:
    for value in (LONG, SPACED):
        response = http.post(COMPLETIONS, json={"model": value, "prompt": "hi"})
        assert response.status_code == 404
        assert value[:100] in response.text
        assert len(response.json()["error"]["message"]) < MAX_QUOTED + 100


def test_a_path(http: httpx.Client) -> None:
    for path in ("/v1/files/", "/v1/nothing/", "/v1/responses/", "/v1/adapters/"):
        response = http.get(path + "x" * 4000)
        assert response.status_code == 404
        assert len(response.text) < 8 * MAX_QUOTED


def test_the_beginning_and_the_end_of_a_value_stay() -> None:
    error = AdapterNotFoundError(f"there is no adapter '{LONG}y'; there are: a, b", param=LONG)
    assert error.message.startswith("there is no adapter 'xxx")
    assert error.message.endswith("xxxy'; there are: a, b")
    assert len(str(error)) < MAX_QUOTED + 50
    assert len(error.param or "") == MAX_QUOTED


def test_over_grpc_and_tritons_http(triton: ServedTriton) -> None:
    text = np.array([["hi"]], dtype=object)
    with tritonclient.grpc.InferenceServerClient(triton.grpc) as client:
        for model, tensor, parameters in (
            (LONG, "text_input", {}),
            ("ensemble", LONG, {}),
            ("ensemble", "text_input", {"adapters": LONG}),
        ):
            given = tritonclient.grpc.InferInput(tensor, [1, 1], "BYTES")
            given.set_data_from_numpy(text)
            with pytest.raises(InferenceServerException) as caught:
                client.infer(model, [given], parameters=parameters)
            assert len(caught.value.message()) < 8 * MAX_QUOTED
    with httpx.Client(base_url=f"http://{triton.http}") as http:
        unknown = {"name": LONG[: 1 << 15], "datatype": "BYTES", "shape": [1, 1], "data": ["hi"]}
        response = http.post("/v2/models/ensemble/infer", json={"inputs": [unknown]})
        assert response.status_code == 400
        assert len(response.text) < 8 * MAX_QUOTED
