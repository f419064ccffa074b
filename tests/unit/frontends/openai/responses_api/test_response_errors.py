"""Errors of the chat's parts, in the words of the Responses API."""

import json

import pytest

from loraplex.core.errors import (
    InternalError,
    InvalidParameterError,
    LoraplexError,
    QueueFullError,
    RateLimitedError,
    RowFailedError,
)
from loraplex.frontends.openai.responses_api.errors import (
    StreamErrors,
    error_detail,
    in_own_words,
    response_error,
)


def reported(error: LoraplexError) -> LoraplexError:
    with pytest.raises(type(error)) as caught, in_own_words():
        raise error
    return caught.value


@pytest.mark.parametrize(
    ("said", "ours"),
    [
        ("max_tokens must be 1", "max_output_tokens must be 1"),
        ("max_completion_tokens is 0", "max_output_tokens is 0"),
        ("response_format.type is x", "text.format.type is x"),
        ("tool_choice.function.name is x", "tool_choice.name is x"),
        ("the prompt has 5 tokens", "the prompt has 5 tokens"),
        ("of the messages", "of the messages"),
        ("my_max_tokens", "my_max_tokens"),
        ("messages[2].content[0].text must be a string", "input must be a string"),
    ],
)
def test_words(said: str, ours: str):
    assert reported(InvalidParameterError(said)).message == ours
    assert error_detail(InvalidParameterError(said)).message == ours
    assert response_error(InvalidParameterError(said)).message == ours


@pytest.mark.parametrize(
    ("said", "ours"),
    [
        ("max_tokens", "max_output_tokens"),
        ("max_completion_tokens", "max_output_tokens"),
        ("response_format", "text.format"),
        ("messages", "input"),
        ("messages[2].tool_calls[0].function", "input"),
        ("prompt", "input"),
        ("tools", "tools"),
        (None, None),
    ],
)
def test_params(said: str | None, ours: str | None):
    assert reported(InvalidParameterError("no", param=said)).param == ours
    assert error_detail(InvalidParameterError("no", param=said)).param == ours


def test_a_stream_that_does_not_begin():
    error = InvalidParameterError("fewer max_tokens", param="messages")
    reported = json.loads(bytes(StreamErrors(lambda _: []).response(error).body))["error"]
    assert (reported["message"], reported["param"]) == ("fewer max_output_tokens", "input")


def test_when_to_try_again_stays():
    error = reported(RateLimitedError("fewer max_tokens", retry_after_seconds=7.5))
    assert (error.message, error.retry_after_seconds) == ("fewer max_output_tokens", 7.5)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidParameterError("x"), "invalid_prompt"),
        (QueueFullError("x"), "rate_limit_exceeded"),
        (RowFailedError("x"), "server_error"),
        (InternalError("x"), "server_error"),
    ],
    ids=["request", "capacity", "row", "internal"],
)
def test_codes_of_a_response_that_failed(error: LoraplexError, code: str):
    assert response_error(error).code == code
