"""Bad input to the OpenAI routes, row by row, and docs/errors-openai.md, which shows these rows.

To bring the page up to date after a change here: `python tests/contract/test_openai_bad_inputs.py`.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from starlette.applications import Starlette

from loraplex.core import errors
from loraplex.frontends.body_limits import JsonLimits
from loraplex.frontends.openai import OpenAIOptions, openai_fallback_routes, openai_routes
from loraplex.frontends.openai.errors import WIRE_ERRORS
from support.echo_service import EchoService
from support.served import served

DOC = Path(__file__).parents[2] / "docs" / "errors-openai.md"

COMPLETIONS = "POST /v1/completions"
CHAT = "POST /v1/chat/completions"
COMPARE = "POST /v1/compare"
RESPONSES = "POST /v1/responses"
USER = [{"role": "user", "content": "hi"}]
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
TOOL = {"type": "function", "function": {"name": "f"}}


class Row(NamedTuple):
    """A request and the error it must get; `text` is a part of the message."""

    what: str
    route: str
    body: Any
    status: int
    code: str
    param: str | None
    text: str


ROWS = (
    Row("not JSON", COMPLETIONS, "hello", 400, "invalid_request", None, "not valid JSON"),
    Row("cut JSON", COMPLETIONS, '{"prompt": "a', 400, "invalid_request", None, "EOF while"),
    Row("no body", COMPLETIONS, "", 400, "invalid_request", None, "the body is empty"),
    Row(
        "byte order mark",
        COMPLETIONS,
        '\ufeff{"prompt": "a"}',
        400,
        "invalid_request",
        None,
        "byte order mark",
    ),
    Row(
        "a field twice",
        COMPLETIONS,
        '{"prompt": "a", "prompt": "b"}',
        400,
        "invalid_request",
        "prompt",
        "the field 'prompt' twice",
    ),
    Row(
        "JSON too deep",
        COMPLETIONS,
        '{"prompt": "a", "x": ' + "[" * 500 + "]" * 500 + "}",
        400,
        "invalid_request",
        None,
        "recursion limit",
    ),
    Row(
        "a number too large",
        COMPLETIONS,
        '{"prompt": "a", "seed": 1e999}',
        400,
        "invalid_parameter",
        "seed",
        "must be an integer",
    ),
    Row("not an object", COMPLETIONS, [1], 400, "invalid_request", None, "got [1]"),
    Row("no prompt", COMPLETIONS, {}, 400, "invalid_parameter", "prompt", "prompt is required"),
    Row(
        "prompt of a wrong type",
        COMPLETIONS,
        {"prompt": 5},
        400,
        "invalid_parameter",
        "prompt",
        "must be a string, a list of strings, a list of token ids or a list of such lists, got 5",
    ),
    Row(
        "no prompts",
        COMPLETIONS,
        {"prompt": []},
        400,
        "invalid_parameter",
        "prompt",
        "empty list",
    ),
    Row(
        "empty token ids",
        COMPLETIONS,
        {"prompt": [[]]},
        400,
        "invalid_request",
        "prompt",
        "the prompt is empty",
    ),
    Row(
        "empty prompt, and nothing put in front",
        COMPLETIONS,
        {"prompt": "", "add_special_tokens": False},
        400,
        "invalid_request",
        "prompt",
        "the prompt is empty",
    ),
    Row(
        "too many prompts",
        COMPLETIONS,
        {"prompt": ["a"] * 9},
        400,
        "invalid_parameter",
        "prompt",
        "9 prompts; at most 8",
    ),
    Row(
        "token id out of the vocabulary",
        COMPLETIONS,
        {"prompt": [1, 259]},
        400,
        "token_out_of_vocabulary",
        "prompt",
        "0 to 258",
    ),
    Row(
        "negative token id",
        COMPLETIONS,
        {"prompt": [-1]},
        400,
        "token_out_of_vocabulary",
        "prompt",
        "token id -1",
    ),
    Row(
        "prompt too long",
        COMPLETIONS,
        {"prompt": "x" * 64},
        400,
        "context_length_exceeded",
        "prompt",
        "65 tokens",
    ),
    Row(
        "unknown model",
        COMPLETIONS,
        {"model": "gpt-0", "prompt": "a"},
        404,
        "model_not_found",
        "model",
        "there are: 'echo', 'fr'",
    ),
    Row(
        "unknown lora_model",
        COMPLETIONS,
        {"lora_model": "no", "prompt": "a"},
        404,
        "adapter_not_found",
        "lora_model",
        "adapter 'no' not found",
    ),
    Row(
        "two adapters",
        COMPLETIONS,
        {"model": "fr", "lora_model": "de", "prompt": "a"},
        400,
        "invalid_parameter",
        "lora_model",
        "name two adapters",
    ),
    Row(
        "model names an adapter, adapters too",
        COMPLETIONS,
        {"model": "fr", "adapters": ["fr"], "prompt": "a"},
        400,
        "invalid_parameter",
        "adapters",
        "model names an adapter, and so does adapters",
    ),
    Row(
        "adapters as an object",
        COMPLETIONS,
        {"adapters": {"name": "fr"}, "prompt": "a"},
        400,
        "invalid_parameter",
        "adapters",
        "must be a list",
    ),
    Row(
        "misspelt scale",
        COMPLETIONS,
        {"adapters": [{"name": "fr", "sclae": 0.5}], "prompt": "a"},
        400,
        "invalid_parameter",
        "adapters[0].sclae",
        "has no field 'sclae'; known: name, task_id, digest, scale",
    ),
    Row(
        "an adapter without a name",
        COMPLETIONS,
        {"adapters": ["fr", {"scale": 0.5}], "prompt": "a"},
        400,
        "invalid_parameter",
        "adapters[1]",
        "must have one of name, task_id and digest, got none",
    ),
    Row(
        "unknown adapter among several",
        COMPLETIONS,
        {"adapters": ["fr", "no"], "prompt": "a"},
        404,
        "adapter_not_found",
        "adapters",
        "adapter 'no' not found",
    ),
    Row(
        "scale out of its range",
        COMPLETIONS,
        {"adapters": [{"name": "fr", "scale": 1000}], "prompt": "a"},
        400,
        "invalid_parameter",
        "adapters",
        "an adapter's scale must be in [-100, 100], got 1000",
    ),
    Row(
        "too many adapters",
        COMPLETIONS,
        {"adapters": ["fr"] * 17, "prompt": "a"},
        400,
        "invalid_parameter",
        "adapters",
        "adapters has 17 entries; at most 16",
    ),
    Row(
        "lora_scale without an adapter",
        COMPLETIONS,
        {"lora_scale": 0.5, "prompt": "a"},
        400,
        "invalid_parameter",
        "lora_scale",
        "lora_scale needs an adapter",
    ),
    Row(
        "lora_scale together with adapters",
        COMPLETIONS,
        {"lora_scale": 0.5, "adapters": ["fr"], "prompt": "a"},
        400,
        "invalid_parameter",
        "lora_scale",
        "each one has its scale",
    ),
    Row(
        "adapter_id and model disagree",
        COMPLETIONS,
        {"prompt": "a", "model": "fr", "adapter_id": "de"},
        400,
        "invalid_parameter",
        "adapter_id",
        "model 'fr' and adapter_id 'de' name two adapters",
    ),
    Row(
        "lora_path for other prompts",
        COMPLETIONS,
        {"prompt": ["a", "b"], "lora_path": ["fr"]},
        400,
        "invalid_parameter",
        "lora_path",
        "lora_path has 1 entries for 2 prompts",
    ),
    Row(
        "LoRAX's merge",
        COMPLETIONS,
        {"prompt": "a", "merged_adapters": {"ids": ["fr"], "weights": [1]}},
        400,
        "unsupported_feature",
        "merged_adapters",
        "use adapters, each with a scale",
    ),
    Row(
        "model of a wrong type",
        COMPLETIONS,
        {"model": 1, "prompt": "a"},
        400,
        "invalid_parameter",
        "model",
        "model must be a string, got 1",
    ),
    Row(
        "max_tokens 0",
        COMPLETIONS,
        {"prompt": "a", "max_tokens": 0},
        400,
        "invalid_parameter",
        "max_tokens",
        "at least 1",
    ),
    Row(
        "min_tokens over max_tokens",
        COMPLETIONS,
        {"prompt": "a", "max_tokens": 1, "min_tokens": 2},
        400,
        "invalid_parameter",
        "min_tokens",
        "must not exceed max_tokens (1)",
    ),
    Row(
        "a number as a string",
        COMPLETIONS,
        {"prompt": "a", "max_tokens": "5"},
        400,
        "invalid_parameter",
        "max_tokens",
        'must be an integer, got "5"',
    ),
    Row(
        "negative temperature",
        COMPLETIONS,
        {"prompt": "a", "temperature": -1},
        400,
        "invalid_parameter",
        "temperature",
        "must be in [0, 100], got -1",
    ),
    Row(
        "temperature NaN",
        COMPLETIONS,
        '{"prompt": "a", "temperature": NaN}',
        400,
        "invalid_request",
        None,
        "has NaN, which is not a number",
    ),
    Row(
        "top_p 0",
        COMPLETIONS,
        {"prompt": "a", "top_p": 0},
        400,
        "invalid_parameter",
        "top_p",
        "must be in (0, 1]",
    ),
    Row(
        "presence_penalty 3",
        COMPLETIONS,
        {"prompt": "a", "presence_penalty": 3},
        400,
        "invalid_parameter",
        "presence_penalty",
        "must be in [-2, 2]",
    ),
    Row("n 0", COMPLETIONS, {"prompt": "a", "n": 0}, 400, "invalid_parameter", "n", "[1, 128]"),
    Row(
        "best_of below n",
        COMPLETIONS,
        {"prompt": "a", "n": 3, "best_of": 2},
        400,
        "invalid_parameter",
        "best_of",
        "best_of must be in [3, 128], got 2",
    ),
    Row(
        "more outputs than beams",
        COMPLETIONS,
        {"prompt": "a", "n": 3, "beam_width": 2, "use_beam_search": True},
        400,
        "invalid_parameter",
        "n",
        "n (3) must not exceed the beam width (2)",
    ),
    Row(
        "length_penalty without beams",
        COMPLETIONS,
        {"prompt": "a", "length_penalty": 2},
        400,
        "invalid_parameter",
        "length_penalty",
        "length_penalty needs use_beam_search: true",
    ),
    Row(
        "logprobs as true",
        COMPLETIONS,
        {"prompt": "a", "logprobs": True},
        400,
        "invalid_parameter",
        "logprobs",
        "must be an integer, got true",
    ),
    Row(
        "too many logprobs",
        COMPLETIONS,
        {"prompt": "a", "logprobs": 21},
        400,
        "invalid_parameter",
        "logprobs",
        "must be in [0, 20], got 21",
    ),
    Row(
        "empty stop string",
        COMPLETIONS,
        {"prompt": "a", "stop": ["x", ""]},
        400,
        "invalid_parameter",
        "stop",
        "1 to 4096 characters",
    ),
    Row(
        "stop token out of the vocabulary",
        COMPLETIONS,
        {"prompt": "a", "stop_token_ids": [9999]},
        400,
        "token_out_of_vocabulary",
        "stop_token_ids",
        "0 to 258",
    ),
    Row(
        "seed over 64 bits",
        COMPLETIONS,
        {"prompt": "a", "seed": 2**64},
        400,
        "invalid_parameter",
        "seed",
        "seed must be in",
    ),
    Row(
        "stream_options without stream",
        COMPLETIONS,
        {"prompt": "a", "stream_options": {"include_usage": True}},
        400,
        "invalid_parameter",
        "stream_options",
        "only for stream: true",
    ),
    Row(
        "a prompt cut to nothing",
        COMPLETIONS,
        {"prompt": "a", "truncate_prompt_tokens": 0},
        400,
        "invalid_parameter",
        "truncate_prompt_tokens",
        "must be at least 1, or -1",
    ),
    Row(
        "an empty cache_salt",
        COMPLETIONS,
        {"prompt": "a", "cache_salt": ""},
        400,
        "invalid_parameter",
        "cache_salt",
        "must have 1 to 1024 characters",
    ),
    Row(
        "synonyms that disagree",
        COMPLETIONS,
        {"prompt": "a", "ignore_eos": True, "ignore_eos_token": False},
        400,
        "invalid_parameter",
        "ignore_eos_token",
        "mean the same, and are True and False",
    ),
    Row(
        "logit_bias of no token",
        COMPLETIONS,
        {"prompt": "a", "logit_bias": {"five": 1}},
        400,
        "token_out_of_vocabulary",
        "logit_bias",
        "logit_bias has the key 'five'; keys are the token ids 0 to 258",
    ),
    Row(
        "logit_bias too strong",
        COMPLETIONS,
        {"prompt": "a", "logit_bias": {"5": -101}},
        400,
        "invalid_parameter",
        "logit_bias",
        "the bias of token 5 must be in [-100, 100], got -101",
    ),
    Row(
        "nothing allowed",
        COMPLETIONS,
        {"prompt": "a", "allowed_token_ids": []},
        400,
        "invalid_parameter",
        "allowed_token_ids",
        "it would allow nothing",
    ),
    Row(
        "bad_words that are no texts",
        COMPLETIONS,
        {"prompt": "a", "bad_words": [5]},
        400,
        "invalid_parameter",
        "bad_words",
        "must be a string or a list of strings",
    ),
    Row(
        "guided_json that is no JSON",
        COMPLETIONS,
        {"prompt": "a", "guided_json": "{"},
        400,
        "invalid_parameter",
        "guided_json",
        "guided_json is not JSON",
    ),
    Row(
        "two grammars",
        COMPLETIONS,
        {"prompt": "a", "guided_regex": "a", "response_format": {"type": "json_object"}},
        400,
        "invalid_parameter",
        "guided_regex",
        "response_format and guided_regex both constrain the output",
    ),
    Row(
        "structured_outputs that are not served",
        COMPLETIONS,
        {"prompt": "a", "structured_outputs": {"structural_tag": "x"}},
        400,
        "unsupported_feature",
        "structured_outputs.structural_tag",
        "known: json, json_object, regex, choice, grammar",
    ),
    Row(
        "too many drafts",
        COMPLETIONS,
        {"prompt": "a", "num_draft_tokens": 65},
        400,
        "invalid_parameter",
        "num_draft_tokens",
        "num_draft_tokens must be in [0, 64], got 65",
    ),
    Row(
        "suffix",
        COMPLETIONS,
        {"prompt": "a", "suffix": "b"},
        400,
        "unsupported_feature",
        "suffix",
        "suffix is not supported",
    ),
    Row(
        "a bad value in a stream: a status, not an event",
        COMPLETIONS,
        {"prompt": "x" * 64, "stream": True},
        400,
        "context_length_exceeded",
        "prompt",
        "65 tokens",
    ),
    Row(
        "body over the limit",
        COMPLETIONS,
        {"prompt": "x" * 3000},
        413,
        "payload_too_large",
        None,
        "must not exceed 2000 bytes",
    ),
    Row("no messages", CHAT, {}, 400, "invalid_parameter", "messages", "messages is required"),
    Row(
        "empty messages",
        CHAT,
        {"messages": []},
        400,
        "invalid_parameter",
        "messages",
        "at least one message",
    ),
    Row(
        "messages as a string",
        CHAT,
        {"messages": "hi"},
        400,
        "invalid_parameter",
        "messages",
        'must be a list of messages, got "hi"',
    ),
    Row(
        "message without role",
        CHAT,
        {"messages": [{"content": "hi"}]},
        400,
        "invalid_parameter",
        "messages[0].role",
        "is required",
    ),
    Row(
        "role that the template does not know",
        CHAT,
        {"messages": [{"role": "wizard", "content": "hi"}]},
        400,
        "invalid_request",
        "messages[0].role",
        "wizard",
    ),
    Row(
        "image",
        CHAT,
        {"messages": IMAGE},
        400,
        "unsupported_feature",
        "messages[0].content[0]",
        "only 'text' parts",
    ),
    Row(
        "both token limits",
        CHAT,
        {"messages": USER, "max_tokens": 1, "max_completion_tokens": 1},
        400,
        "invalid_parameter",
        "max_completion_tokens",
        "not both",
    ),
    Row(
        "top_logprobs without logprobs",
        CHAT,
        {"messages": USER, "top_logprobs": 1},
        400,
        "invalid_parameter",
        "top_logprobs",
        "needs logprobs: true",
    ),
    Row(
        "tools in a completion",
        COMPLETIONS,
        {"prompt": "a", "tools": [TOOL]},
        400,
        "unsupported_feature",
        "tools",
        "they are for /v1/chat/completions",
    ),
    Row(
        "functions",
        CHAT,
        {"messages": USER, "functions": [{"name": "f"}]},
        400,
        "unsupported_feature",
        "functions",
        "use tools",
    ),
    Row(
        "response_format of another type",
        CHAT,
        {"messages": USER, "response_format": {"type": "xml"}},
        400,
        "invalid_parameter",
        "response_format",
        "response_format.type must be one of text, json_object, json_schema",
    ),
    Row(
        "response_format without its schema",
        CHAT,
        {"messages": USER, "response_format": {"type": "json_schema"}},
        400,
        "invalid_parameter",
        "response_format",
        "must be an object with the schema in 'schema'",
    ),
    Row(
        "adapter without source",
        "POST /v1/adapters",
        {"name": "x"},
        400,
        "invalid_parameter",
        "source",
        "source is required",
    ),
    Row(
        "adapter that exists",
        "POST /v1/adapters",
        {"name": "fr", "path": "/x"},
        409,
        "adapter_exists",
        "name",
        "adapter 'fr' already exists",
    ),
    Row(
        "unloading an unknown adapter",
        "POST /v1/unload_lora_adapter",
        {"lora_name": "no"},
        404,
        "adapter_not_found",
        "lora_name",
        "'no' cannot be found",
    ),
    Row(
        "deleting a base model",
        "DELETE /v1/adapters/echo",
        None,
        404,
        "adapter_not_found",
        "name",
        "is a base model",
    ),
    Row(
        "prompt and messages",
        "POST /tokenize",
        {"prompt": "a", "messages": USER},
        400,
        "invalid_parameter",
        "prompt",
        "either prompt or messages",
    ),
    Row(
        "token ids of a wrong type",
        "POST /detokenize",
        {"tokens": ["a"]},
        400,
        "invalid_parameter",
        "tokens[0]",
        'must be an integer, got "a"',
    ),
    Row(
        "a token id that no model has",
        "POST /detokenize",
        {"tokens": [104, 99999]},
        400,
        "token_out_of_vocabulary",
        "tokens[1]",
        "token id 99999 is out of the vocabulary of model 'echo'",
    ),
    Row(
        "nothing to compare",
        COMPARE,
        {"prompt": "a", "adapters": []},
        400,
        "invalid_parameter",
        "adapters",
        "must have 1 to 8 entries, one for each output, null for the base model; got 0",
    ),
    Row(
        "comparison without adapters",
        COMPARE,
        {"prompt": "a"},
        400,
        "invalid_parameter",
        "adapters",
        "adapters is required",
    ),
    Row(
        "comparison of prompts",
        COMPARE,
        {"prompt": ["a", "b"], "adapters": ["fr"]},
        400,
        "invalid_parameter",
        "prompt",
        "2 prompts; at most 1",
    ),
    Row(
        "comparison without a prompt",
        COMPARE,
        {"adapters": ["fr"]},
        400,
        "invalid_parameter",
        "prompt",
        "give either prompt or messages",
    ),
    Row(
        "comparison with an adapter as model",
        COMPARE,
        {"model": "fr", "prompt": "a", "adapters": [None]},
        400,
        "invalid_parameter",
        "model",
        "must be a base model",
    ),
    Row(
        "comparison with an unknown field",
        COMPARE,
        {"prompt": "a", "adapters": [None], "n": 2},
        400,
        "invalid_parameter",
        "n",
        "there is no field 'n'",
    ),
    Row(
        "comparison of a malformed entry",
        COMPARE,
        {"prompt": "a", "adapters": [None, ["fr", 5]]},
        400,
        "invalid_parameter",
        "adapters[1][1]",
        "must be an adapter's name or an object with name and scale, got 5",
    ),
    Row(
        "comparison of a prompt that is too long",
        COMPARE,
        {"prompt": "x" * 64, "adapters": [None, "fr"]},
        400,
        "context_length_exceeded",
        "prompt",
        "65 tokens",
    ),
    Row(
        "too many logprobs to compare",
        COMPARE,
        {"prompt": "a", "adapters": [None], "logprobs": 21},
        400,
        "invalid_parameter",
        "logprobs",
        "must be in [0, 20], got 21",
    ),
    Row(
        "details of an unknown model",
        "GET /v1/models/no",
        None,
        404,
        "model_not_found",
        "model",
        "no",
    ),
    Row(
        "a route that is not served",
        "POST /v1/moderations",
        {"input": "a"},
        404,
        "unsupported_route",
        None,
        "this server generates text",
    ),
    Row("unknown route", "GET /v1/engines", None, 404, "route_not_found", None, "/v1/engines"),
    Row("wrong method", "GET /v1/completions", None, 405, "method_not_allowed", None, "POST"),
    Row(
        "image in a response's input",
        RESPONSES,
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        400,
        "unsupported_feature",
        "input[0].content[0].type",
        "only text is served",
    ),
    Row(
        "tool of an unknown type",
        RESPONSES,
        {"input": "a", "tools": [{"type": "browse"}]},
        400,
        "unsupported_feature",
        "tools[0].type",
        "only 'function' is served",
    ),
    Row(
        "output of a call that is not there",
        RESPONSES,
        {"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]},
        400,
        "invalid_parameter",
        "input",
        "no such call",
    ),
    Row(
        "response in the background",
        RESPONSES,
        {"input": "a", "background": True},
        400,
        "unsupported_feature",
        "background",
        "use stream",
    ),
    Row(
        "unknown previous response",
        RESPONSES,
        {"input": "a", "previous_response_id": "resp_1"},
        404,
        "response_not_found",
        "previous_response_id",
        "there is no response 'resp_1'",
    ),
    Row(
        "unknown response",
        "GET /v1/responses/resp_1",
        None,
        404,
        "response_not_found",
        None,
        "there is no response 'resp_1'",
    ),
)


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    backend = EchoService(max_model_len=64)
    backend.register("fr")
    app = Starlette()
    options = OpenAIOptions(json=JsonLimits(max_bytes=2000, max_values=100_000), max_prompts=8)
    app.routes.extend(openai_routes(backend, options))
    app.routes.extend(openai_fallback_routes())
    with served(app) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.what)
def test_bad_input(http: httpx.Client, row: Row):
    method, path = row.route.split()
    body = row.body if isinstance(row.body, str | None) else json.dumps(row.body)
    headers = {} if body is None else {"content-type": "application/json"}
    response = http.request(method, path, content=body, headers=headers)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (
        row.status,
        row.code,
        row.param,
    )
    assert row.text in error["message"]
    assert error["type"] == "invalid_request_error"
    assert error.keys() == {"message", "type", "param", "code"}


def test_a_form_is_not_json(http: httpx.Client):
    response = http.post("/v1/completions", data={"prompt": "a"})
    assert response.status_code == 400
    assert "Content-Type: application/json" in response.json()["error"]["message"]


def error_table() -> str:
    """Every error that a client can see, as a Markdown table."""
    lines = ["| code | HTTP status | type |", "| --- | --- | --- |"]
    for leaf in errors.leaves():
        wire = WIRE_ERRORS[leaf]
        lines.append(f"| `{wire.code or leaf.code}` | {wire.status} | `{wire.type}` |")
    return "\n".join(lines)


def bad_input_table() -> str:
    """ROWS as a Markdown table."""
    lines = [
        "| what is wrong | route | status | `code` | `param` | part of the message |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in ROWS:
        param = f"`{row.param}`" if row.param else "null"
        lines.append(
            f"| {row.what} | `{row.route}` | {row.status} | `{row.code}` | {param} | {row.text} |"
        )
    return "\n".join(lines)


TABLES = {"errors": error_table, "bad inputs": bad_input_table}


def with_tables(page: str) -> str:
    """The page with every table between its two marks written anew."""
    for name, table in TABLES.items():
        begin, end = f"<!-- begin: {name} -->", f"<!-- end: {name} -->"
        pattern = re.compile(f"{re.escape(begin)}.*{re.escape(end)}", re.DOTALL)
        new = f"{begin}\n{table()}\n{end}"
        page, num_found = pattern.subn(lambda _, new=new: new, page)
        assert num_found == 1, f"the page must hold the marks of {name!r} once"
    return page


def test_the_documentation_shows_these_rows():
    page = DOC.read_text(encoding="utf-8")
    assert page == with_tables(page)


if __name__ == "__main__":
    DOC.write_text(with_tables(DOC.read_text(encoding="utf-8")), encoding="utf-8")
