"""LoRAX's own routes: by hand, and by its client."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette

from loraplex.core.errors import InternalError, QueueFullError
from loraplex.core.grammar import GrammarKind
from loraplex.core.request import PromptTruncation
from loraplex.frontends.openai import openai_routes
from support.echo_service import EchoService
from support.naming import naming
from support.served import served

CLIENTS = Path(sys.prefix) / "clients"
"""Folder of the packages that `make .venv/clients` installs apart from loraplex."""
PROGRAM = Path(__file__).parent / "lorax_program.py"


@pytest.fixture(scope="module")
def backend() -> EchoService:
    backend = EchoService()
    backend.register("fr")
    return backend


@pytest.fixture(scope="module")
def url(backend) -> Iterator[str]:
    app = Starlette()
    app.routes.extend(openai_routes(backend))
    with served(app) as url:
        yield url


@pytest.fixture
def http(url) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=60) as http:
        yield http


def generate(http: httpx.Client, inputs: str = "hi", **parameters) -> dict:
    return http.post("/generate", json={"inputs": inputs, "parameters": parameters}).json()


def test_a_text(http, backend):
    assert generate(http) == {"generated_text": "echo: hi"}
    sampling = backend.requests[-1].sampling
    assert (sampling.is_greedy, sampling.max_tokens) == (True, None)
    assert http.post("/generate", json={"inputs": "hi"}).json()["generated_text"] == "echo: hi"
    assert generate(http, return_full_text=True)["generated_text"] == "hiecho: hi"


def test_an_adapter(http, backend):
    response = generate(http, adapter_id="fr", adapter_source="hub", api_token="secret")
    assert response["generated_text"] == "echo+fr: hi"
    unknown = http.post("/generate", json={"inputs": "hi", "parameters": {"adapter_id": "no"}})
    assert unknown.status_code == 404
    assert unknown.json()["error_type"] == "validation"
    assert re.search(naming("no", "echo", "fr"), unknown.json()["error"])


def test_details(http):
    details = generate(
        http, "é", details=True, decoder_input_details=True, return_k_alternatives=2, seed=3
    )["details"]
    assert (details["finish_reason"], details["prompt_tokens"]) == ("eos_token", 3)
    assert (details["generated_tokens"], details["seed"]) == (len("echo: ") + 3, 3)
    assert [token["id"] for token in details["prefill"]] == [256, *"é".encode()]
    assert details["prefill"][0]["logprob"] is None
    first = details["tokens"][0]
    assert (first["text"], first["special"]) == ("e", False)
    assert [token["text"] for token in first["alternative_tokens"]] == ["e", "f"]


def test_sampling_is_on_if_any_of_it_is_requested(http, backend):
    for parameters in ({"do_sample": True}, {"temperature": 0.5}, {"top_k": 5}, {"top_p": 0.5}):
        generate(http, **parameters)
        assert not backend.requests[-1].sampling.is_greedy


def test_a_stop_text_stays(http):
    response = generate(http, "a b c", stop=[" b"], details=True)
    assert response["generated_text"] == "echo: a b"
    assert response["details"]["finish_reason"] == "stop_sequence"
    assert generate(http, max_new_tokens=3, details=True)["details"]["finish_reason"] == "length"


def test_other_fields(http, backend):
    schema = {"type": "object"}
    response = generate(
        http,
        "abcdef",
        truncate=2,
        best_of=2,
        ignore_eos_token=True,
        max_new_tokens=5,
        repetition_penalty=1.5,
        response_format={"type": "json_object", "schema": schema},
    )
    assert response["generated_text"] == "echo:"
    request = backend.requests[-1]
    assert request.truncation == PromptTruncation(2)
    assert request.sampling.best_of == 2
    assert request.sampling.grammar.kind is GrammarKind.JSON_SCHEMA
    generate(http, apply_chat_template=True)
    assert backend.requests[-1].prompt == "<s>user: hi\nassistant: "
    assert backend.requests[-1].add_special_tokens is False


def test_a_stream_has_an_event_for_each_token(http):
    response = http.post("/generate_stream", json={"inputs": "é"})
    events = [json.loads(e.removeprefix("data: ")) for e in response.text.split("\n\n") if e]
    shown = [event["token"] for event in events if not event["token"]["special"]]
    assert "".join(token["text"] for token in shown) == "echo: é"
    assert len(events) == len(b"echo: ") + 3
    assert all(event["details"] is None for event in events[:-1])
    last = events[-1]
    assert (last["generated_text"], last["token"]["special"]) == ("echo: é", True)
    assert last["details"]["finish_reason"] == "eos_token"


def test_text_that_was_held_back_comes_with_a_token_that_is_shown(http):
    """ "hi" could become "hix": it is sent with the end token, whose own text no client shows."""
    body = {"inputs": "hi", "parameters": {"stop": ["hix"]}}
    response = http.post("/generate_stream", json=body)
    tokens = [
        json.loads(e.removeprefix("data: "))["token"] for e in response.text.split("\n\n") if e
    ]
    assert "".join(token["text"] for token in tokens if not token["special"]) == "echo: hi"


def test_the_root_responds_either_way(http):
    assert http.post("/", json={"inputs": "hi"}).json() == [{"generated_text": "echo: hi"}]
    stream = http.post("/", json={"inputs": "hi", "stream": True})
    assert stream.headers["content-type"].startswith("text/event-stream")


@pytest.mark.parametrize(
    ("body", "status", "named"),
    [
        ({}, 422, ("inputs",)),
        ({"inputs": 5}, 422, ("inputs", 5)),
        ({"inputs": "hi", "parameters": {"max_new_tokens": 0}}, 422, ("max_new_tokens", 1)),
        ({"inputs": "hi", "parameters": {"truncate": 0}}, 422, ("truncate", 1, 0)),
        (
            {"inputs": "hi", "parameters": {"temperature": -1}},
            422,
            ("temperature", "[0, 100]", -1.0),
        ),
        ({"inputs": "hi", "parameters": {"typical_p": 0.5}}, 422, ("typical_p",)),
        (
            {"inputs": "hi", "parameters": {"merged_adapters": {"ids": ["a"]}}},
            422,
            ("merged_adapters", "adapters"),
        ),
        (
            {"inputs": "hi", "parameters": {"adapter_source": "moon"}},
            422,
            ("parameters.adapter_source", "hub", "local", "s3", "pbase", "moon"),
        ),
    ],
)
def test_a_wrong_field(http, body, status, named):
    response = http.post("/generate", json=body)
    assert response.status_code == status
    assert response.json()["error_type"] == "validation"
    assert re.search(naming(*named), response.json()["error"])


def test_other_errors(http, backend):
    backend.plant(QueueFullError("full", retry_after_seconds=2))
    full = http.post("/generate_stream", json={"inputs": "hi"})
    assert (full.status_code, full.headers["retry-after"]) == (429, "2")
    assert full.json() == {"error": "full", "error_type": "overloaded"}
    backend.plant(InternalError("broke"), after_outputs=2)
    stream = http.post("/generate_stream", json={"inputs": "hi"})
    last = stream.text.split("\n\n")[-2].removeprefix("data: ")
    assert json.loads(last) == {"error": "broke", "error_type": "generation"}


def test_the_client_of_lorax(url):
    if not CLIENTS.is_dir():
        pytest.skip("`make .venv/clients` installs the client of LoRAX")
    run = subprocess.run(
        [sys.executable, str(PROGRAM), url],
        env={**os.environ, "PYTHONPATH": str(CLIENTS)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    reported = json.loads(run.stdout.splitlines()[-1])
    assert re.search(naming("temperature", "[0, 100]"), reported.pop("error"))
    assert reported == {
        "whole": "echo+fr: hi",
        "tokens": "echo+fr: hi",
        "finish_reason": "eos_token",
        "stream": "echo: hi",
        "last": "echo: hi",
    }
