"""The generate extension and the edges of HTTP, with a plain HTTP client over sockets.

The backend is an EchoService: the output for "hi" is "echo: hi".
"""

import gzip
import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from loraplex.core.errors import InternalError, QueueFullError
from support.echo_service import EchoService
from support.eventually import eventually
from support.served_triton import ServedTriton


@pytest.fixture
def backend() -> EchoService:
    backend = EchoService(("echo", "other/echo"))
    backend.register("sheep", task_id=0)
    return backend


@pytest.fixture
def http(triton: ServedTriton) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{triton.http}/v2/models/ensemble", timeout=60) as http:
        yield http


def test_generate(http):
    body = {"text_input": "hi", "max_tokens": 50, "bad_words": "", "stop_words": "", "id": "x"}
    response = http.post("/generate", json=body).json()
    assert response.pop("text_output") == "hiecho: hi"
    assert response == {
        "id": "x",
        "model_name": "ensemble",
        "model_version": "1",
        "sequence_id": 0,
        "sequence_start": False,
        "sequence_end": False,
    }


def test_generate_reports_the_adapter_and_reads_nested_parameters(http):
    inner = {"max_tokens": 50, "lora_task_id": 0, "return_log_probs": True, "whatever": 1}
    response = http.post("/generate", json={"text_input": "hi", "parameters": inner}).json()
    assert response["text_output"] == "hiecho+sheep: hi"
    assert response["adapter"] == "sheep"
    assert len(response["output_log_probs"]) == 14


def test_generate_does_not_stream(http):
    response = http.post("/generate", json={"text_input": "a", "max_tokens": 1, "stream": True})
    assert response.status_code == 400
    # Triton's text.
    assert response.json()["error"].startswith("generate expects model to produce exactly 1 resp")


def events(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_generate_stream(http):
    body = {"text_input": "hé", "max_tokens": 50, "stream": True}
    with http.stream("POST", "/generate_stream", json=body) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        texts = [event["text_output"] for event in events(response)]
    assert "".join(texts) == "echo: hé"
    assert len(texts) > 2
    with http.stream("POST", "/generate_stream", json={**body, "stream": False}) as response:
        assert [event["text_output"] for event in events(response)] == ["héecho: hé"]


@pytest.mark.parametrize(("after_outputs", "status"), [(0, 500), (2, 200)])
def test_an_error_in_a_stream(backend, http, after_outputs, status):
    backend.plant(InternalError("broken"), after_outputs=after_outputs)
    body = {"text_input": "hi", "max_tokens": 50, "stream": True}
    with http.stream("POST", "/generate_stream", json=body) as response:
        assert response.status_code == status
        assert events(response)[-1] == {"error": "broken"}


def test_an_error_before_a_stream_is_plain_json(backend, http):
    backend.plant(QueueFullError("full", retry_after_seconds=2))
    response = http.post("/generate_stream", json={"text_input": "hi", "max_tokens": 5})
    assert response.status_code == 503
    assert response.json()["error"].endswith("full")
    assert response.headers["retry-after"] == "2"


@pytest.mark.parametrize("action", ["infer", "generate", "generate_stream"])
def test_a_client_that_goes_aborts_its_request(backend, triton, action):
    backend.delay_seconds = 0.01
    body = {"text_input": "hi", "max_tokens": 1000, "end_id": -1, "stream": action != "generate"}
    if action == "infer":
        rows = {
            "text_input": ("BYTES", "hi"),
            "max_tokens": ("INT32", 4000),
            "end_id": ("INT32", -1),
        }
        inputs = [
            {"name": name, "datatype": datatype, "shape": [1, 1], "data": [value]}
            for name, (datatype, value) in rows.items()
        ]
        body = {"inputs": inputs}
    content = json.dumps(body).encode()
    host, port = triton.http.split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST /v2/models/ensemble/{action} HTTP/1.1\r\nHost: x\r\n"
        connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        assert eventually(lambda: len(backend.requests) == 1)
    assert eventually(lambda: len(backend.aborted) == 1)
    assert backend.finished == []


def test_unknown_paths_and_methods(triton):
    with httpx.Client(base_url=f"http://{triton.http}", timeout=60) as http:
        missing = http.get("/v2/nothing/here")
        assert (missing.status_code, missing.json()) == (404, {"error": "Not Found"})
        wrong = http.get("/v2/models/ensemble/infer")
        assert (wrong.status_code, wrong.json()) == (405, {"error": "Method Not Allowed"})
        assert http.get("/v2/models/other/echo").json()["name"] == "other/echo"


def test_a_bomb_is_not_unpacked(triton):
    bomb = gzip.compress(b" " * (2**20 + 1))
    response = httpx.post(
        f"http://{triton.http}/v2/models/ensemble/infer",
        content=bomb,
        headers={"Content-Encoding": "gzip"},
        timeout=60,
    )
    assert response.status_code == 413
