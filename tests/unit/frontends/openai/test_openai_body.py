import asyncio
import json
import sys

import pytest
from starlette.requests import Request

from loraplex.core.errors import InvalidParameterError, InvalidRequestError, PayloadTooLargeError
from loraplex.frontends.openai.body import parse_body, read_body
from loraplex.frontends.openai.schema import ChatBody, CompletionBody, DetokenizeBody
from support.naming import naming, refused

JSON = {"content-type": "application/json"}


def http_request(chunks: list[bytes], headers: dict[str, str]) -> tuple[Request, list[bytes]]:
    """Request and its chunks that have not been read yet."""
    left = list(chunks)

    async def receive():
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "method": "POST", "headers": raw}, receive), left


async def test_body_is_read_whole():
    request, _ = http_request([b'{"a"', b": 1}"], JSON)
    assert await read_body(request, 8) == b'{"a": 1}'


@pytest.mark.parametrize("headers", [JSON | {"content-length": "99"}, JSON])
async def test_a_long_body_is_discarded_only_so_far(headers):
    request, left = http_request([b"x" * 5] * 9, headers)
    with pytest.raises(PayloadTooLargeError, match="8 bytes"):
        await read_body(request, 8)
    num_read = 9 - len(left)
    assert num_read == (2 if "content-length" in headers else 4)


async def test_a_client_that_expects_continue_gets_it_before_it_sends():
    headers = JSON | {"content-length": "9", "expect": "100-continue"}
    request, left = http_request([b"x" * 9], headers)
    with pytest.raises(PayloadTooLargeError):
        await read_body(request, 8)
    assert left == [b"x" * 9]


async def test_a_client_that_stops_sending_is_not_waited_for(monkeypatch):
    monkeypatch.setattr("loraplex.frontends.openai.body.DISCARD_SECONDS", 0.01)

    async def receive():
        await asyncio.Event().wait()

    headers = [(b"content-type", b"application/json"), (b"content-length", b"9")]
    request = Request({"type": "http", "method": "POST", "headers": headers}, receive)
    with pytest.raises(PayloadTooLargeError):
        await read_body(request, 8)


def test_other_threads_may_run_at_each_message_and_part_that_is_parsed():
    """pydantic holds the interpreter's lock but where it calls Python; the event loop waits."""
    chat = {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}] * 4000}
    body, num_calls = json.dumps(chat).encode(), 0

    def count(_frame, event, _argument):
        nonlocal num_calls
        num_calls += event == "call"

    sys.setprofile(count)
    try:
        ChatBody.model_validate_json(body)
    finally:
        sys.setprofile(None)
    assert num_calls >= 2 * 4000


@pytest.mark.parametrize(
    ("schema", "body", "named"),
    [
        (ChatBody, {"messages": [{"role": "", "content": ""}] * 8193}, ("messages", 8192)),
        (CompletionBody, {"prompt": [[1]] * 4097}, ("prompt", 4096)),
        (
            CompletionBody,
            {"prompt": "", "logit_bias": {str(number): 1 for number in range(8193)}},
            ("logit_bias", 8192),
        ),
    ],
)
def test_long_fields(schema, body, named):
    with pytest.raises(InvalidParameterError, match=naming(*named)):
        parse_body(schema, json.dumps(body).encode())


@pytest.mark.parametrize("content_type", ["application/json; charset=utf-8", "Application/JSON"])
async def test_json_content_types(content_type):
    request, _ = http_request([b"{}"], {"content-type": content_type})
    assert await read_body(request, 8) == b"{}"


@pytest.mark.parametrize("headers", [{}, {"content-type": "text/plain"}])
async def test_other_content_types_are_refused(headers):
    request, _ = http_request([b"{}"], headers)
    with pytest.raises(InvalidRequestError, match="application/json"):
        await read_body(request, 8)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b"", ("empty",)),
        (b" \n", ("empty",)),
        (b'\xef\xbb\xbf{"prompt": "a"}', ("byte order mark", "UTF-8")),
        ('{"prompt": "a"}'.encode("utf-16"), ("JSON", "line 1 column 1")),
        (b'{"prompt": "\xff"}', ("JSON", "line 1 column 13")),
        (b'{"prompt": "a", "prompt": "b"}', ("'prompt'", "twice")),
        (b'{"prompt": "a", "x": {"y": [{"z": 1, "z": 1}]}}', ("'z'", "twice")),
        (b'{"prompt": "a", "x": NaN}', ("NaN",)),
        (b'{"prompt": "a", "x": -Infinity}', ("-Infinity",)),
        (b'{"prompt": "a", "x": 1e999}', ("1e999",)),
        (b'{"prompt": "a", "x": %s}' % (b"9" * 5000), ("JSON", "range", "line 1")),
        (b'{"prompt": "a", "x": %s%s}' % (b"[" * 20_000, b"]" * 20_000), ("recursion limit",)),
        (b"{", ("JSON", "EOF", "line 1 column 1")),
        (b"\xff", ("JSON", "line 1 column 1")),
        (b"[" * 1000, ("recursion limit",)),
        (b'{"prompt": "\\ud800"}', ("JSON", "line 1 column 19")),
        (b"[1]", ("JSON object", "[1]")),
        (b"null", ("JSON object", "null")),
    ],
)
def test_what_is_no_json_object(body, named):
    with pytest.raises(InvalidRequestError, match=naming(*named)):
        parse_body(CompletionBody, body)


@pytest.mark.parametrize(
    ("schema", "body", "param", "got"),
    [
        (CompletionBody, b"{}", "prompt", None),
        (CompletionBody, b'{"prompt": 5}', "prompt", "5"),
        (CompletionBody, b'{"prompt": ["a", 1]}', "prompt", '["a", 1]'),
        (CompletionBody, b'{"prompt": [[1], ["a"]]}', "prompt", '[[1], ["a"]]'),
        (CompletionBody, b'{"prompt": [true]}', "prompt", "[true]"),
        (CompletionBody, b'{"prompt": "a", "n": "2"}', "n", '"2"'),
        (CompletionBody, b'{"prompt": "a", "n": 1.5}', "n", "1.5"),
        (CompletionBody, b'{"prompt": "a", "n": true}', "n", "true"),
        (CompletionBody, b'{"prompt": "a", "temperature": "hot"}', "temperature", '"hot"'),
        (
            CompletionBody,
            b'{"prompt": "a", "stop": {"x": "%s"}}' % (b"y" * 100),
            "stop",
            "an object",
        ),
        (
            CompletionBody,
            b'{"prompt": "a", "stream_options": {"include_usage": 1}}',
            "stream_options.include_usage",
            "1",
        ),
        (
            CompletionBody,
            b'{"prompt": "a", "load_lora_weights": "maybe"}',
            "load_lora_weights",
            "'auto', 'always' or 'never', got \"maybe\"",
        ),
        (ChatBody, b'{"messages": "hi"}', "messages", '"hi"'),
        (ChatBody, b'{"messages": ["hi"]}', "messages[0]", '"hi"'),
        (ChatBody, b'{"messages": [{"content": "hi"}]}', "messages[0].role", None),
        (
            ChatBody,
            b'{"messages": [{"role": "user", "content": [1]}]}',
            "messages[0].content",
            "[1]",
        ),
        (DetokenizeBody, b'{"tokens": [1, "a"]}', "tokens[1]", '"a"'),
    ],
)
def test_a_wrong_field_is_named_with_its_value(schema, body, param, got):
    with refused(InvalidParameterError, param, *([] if got is None else [got]), param=param):
        parse_body(schema, body)


def test_null_is_absent_and_unknown_fields_are_kept_aside():
    body = parse_body(CompletionBody, b'{"prompt": "a", "n": null, "stop": null, "novel": 1}')
    assert body.n is body.stop is None
    assert body.model_extra == {"novel": 1}


@pytest.mark.parametrize(
    ("json", "prompt"),
    [
        (b'"a"', "a"),
        (b'["a", "b"]', ["a", "b"]),
        (b"[1, 2]", [1, 2]),
        (b"[[1], [2, 3]]", [[1], [2, 3]]),
        (b"[]", []),
    ],
)
def test_the_four_shapes_of_prompt(json, prompt):
    assert parse_body(CompletionBody, b'{"prompt": ' + json + b"}").prompt == prompt
