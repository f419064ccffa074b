"""What agents send to every server: tools of OpenAI's own types, fields for OpenAI's dashboard."""

import logging
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from loraplex.frontends.openai import openai_routes
from support.echo_service import EchoService
from support.naming import naming
from support.served import served

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
USER = [{"role": "user", "content": "hi"}]
PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}}
OTHER_TOOLS: list[dict[str, Any]] = [
    {"type": "web_search", "external_web_access": False},
    {"type": "web_search_2025_08_26"},
    {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}},
    {"type": "local_shell"},
    {"type": "namespace", "name": "mcp", "tools": [{"type": "function", "name": "f"}]},
]
FLAT = {"type": "function", "name": "shell", "parameters": PARAMETERS, "strict": False}
NESTED = {"type": "function", "function": {"name": "shell", "parameters": PARAMETERS}}
NOTES = [
    f"tools[{index}] of type {tool['type']} is left out: only functions are served"
    for index, tool in enumerate(OTHER_TOOLS)
]
CODEX = {
    "model": "echo",
    "instructions": "You are Codex.",
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]}
    ],
    "tools": [*OTHER_TOOLS, FLAT],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": None,
    "store": False,
    "stream": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "k",
    "client_metadata": {"x-codex-installation-id": "i"},
}
"""A request of Codex CLI."""


@pytest.fixture(scope="module")
def backend() -> EchoService:
    return EchoService()


@pytest.fixture(scope="module")
def http(backend: EchoService) -> Iterator[httpx.Client]:
    app = Starlette()
    app.routes.extend(openai_routes(backend))
    with served(app) as url, httpx.Client(base_url=url) as http:
        yield http


def test_codex(http: httpx.Client, backend: EchoService, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "loraplex"):
        response = http.post(RESPONSES, json=CODEX)
    assert response.status_code == 200, response.text
    body = response.json()
    assert [tool["name"] for tool in body["tools"]] == ["shell"]
    assert body["loraplex"]["notes"] == NOTES
    assert [tool["function"]["name"] for tool in backend.renderings[-1]["tools"]] == ["shell"]
    assert set(NOTES) <= {record.message for record in caplog.records}


def test_a_chat(http: httpx.Client, backend: EchoService) -> None:
    body = {"messages": USER, "tools": [*OTHER_TOOLS, NESTED], "client_metadata": {"a": "b"}}
    response = http.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    assert response.json()["loraplex"]["notes"] == NOTES
    assert backend.renderings[-1]["tools"] == [NESTED]
    stream = {**body, "stream": True, "stream_options": {"include_usage": True}}
    assert NOTES[0] in http.post(CHAT, json=stream).text


def test_nothing_is_noted_where_nothing_is_left_out(http: httpx.Client) -> None:
    response = http.post(CHAT, json={"messages": USER, "tools": [NESTED]})
    assert "notes" not in response.json()["loraplex"]


def test_no_other_tool(http: httpx.Client, backend: EchoService) -> None:
    response = http.post(CHAT, json={"messages": USER, "tools": OTHER_TOOLS})
    assert response.status_code == 200, response.text
    assert backend.renderings[-1]["tools"] is None
    required = {"messages": USER, "tools": OTHER_TOOLS, "tool_choice": "required"}
    error = http.post(CHAT, json=required).json()["error"]
    assert error["param"] == "tool_choice"


FAULTS: list[tuple[str, dict[str, Any], str, list[str]]] = [
    (
        RESPONSES,
        {
            "input": "a",
            "conversation": "c",
            "max_outputs": 1,
            "temprature": 1,
            "tools": [{"type": "browse"}, {"type": "function", "name": "a b"}, FLAT],
        },
        "max_outputs",
        ["max_outputs", "temprature", "conversation", "tools[0].type", "tools[1].name"],
    ),
    (
        COMPLETIONS,
        {"prompt": "a", "suffix": "b", "logits_processors": ["c"], "max_token": 1},
        "max_token",
        ["suffix", "logits_processors", "max_token"],
    ),
    (
        CHAT,
        {"messages": USER, "tools": [*OTHER_TOOLS, {"type": "browse"}, {"type": "function"}]},
        "tools[5].type",
        ["tools[5].type", "tools[6].function"],
    ),
    (
        CHAT,
        {"messages": "a", "temperature": "hot", "stop": 5},
        "temperature",
        ["messages", "temperature", "stop"],
    ),
]


@pytest.mark.parametrize(("path", "body", "param", "named"), FAULTS)
def test_all_faults_are_in_one_error(
    http: httpx.Client, path: str, body: dict[str, Any], param: str, named: list[str]
) -> None:
    response = http.post(path, json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    for name in named:
        assert name in error["message"]
    assert re.search(naming(len(named), 1), error["message"])
    assert error["param"] == param


def test_faults_are_bounded(http: httpx.Client) -> None:
    body = {"prompt": "a", **{f"field_{n}": 1 for n in range(500)}}
    message = http.post(COMPLETIONS, json=body).json()["error"]["message"]
    assert "(10) " in message
    assert "(11) " not in message
