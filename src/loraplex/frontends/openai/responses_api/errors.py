"""Errors of the Responses API: OpenAI's, in the words of this API, and at the end of a stream."""

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import msgspec
from starlette.responses import Response

from loraplex.core.errors import CapacityError, LoraplexError, RequestError
from loraplex.frontends.field_names import as_sent
from loraplex.frontends.openai.errors import (
    ErrorDetail,
    OpenAIErrors,
    error_body,
)
from loraplex.frontends.openai.responses_api import objects as wire

_NAMES: Final = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "messages": "input",
    "prompt": "input",
    "tool_choice.function.name": "tool_choice.name",
}
"""A field of a chat: the field that has it here."""
_MESSAGE: Final = re.compile(r"\bmessages\[\d+\][\w.\[\]]*")
"""A place in the chat's messages, of which an input has other numbers: turns are several items."""


@contextlib.contextmanager
def in_own_words() -> Iterator[None]:
    """Let what parts of the chat raise name the fields as they are called here."""
    try:
        yield
    except LoraplexError as error:
        raise _in_own_words(error) from None


class StreamErrors(OpenAIErrors):
    """Errors of one streamed response. failure: the last events of its stream."""

    def __init__(self, failure: Callable[[LoraplexError], Iterable[msgspec.Struct]]) -> None:
        self._failure = failure

    def response(self, error: LoraplexError) -> Response:
        return super().response(_in_own_words(error))

    def events(self, error: LoraplexError) -> Iterable[msgspec.Struct]:
        return self._failure(error)

    @property
    def event_type(self) -> type[msgspec.Struct]:
        return wire.ErrorEvent


def error_detail(error: LoraplexError) -> ErrorDetail:
    return error_body(_in_own_words(error)).error


def response_error(error: LoraplexError) -> wire.ResponseError:
    """Error with one of OpenAI's few codes for a failed response."""
    code = "server_error"
    if isinstance(error, RequestError):
        code = "invalid_prompt"
    elif isinstance(error, CapacityError):
        code = "rate_limit_exceeded"
    return wire.ResponseError(code, error_detail(error).message)


def _in_own_words(error: LoraplexError) -> LoraplexError:
    """The same error, which names the fields of a chat as they are called here."""
    places = _MESSAGE.findall(f"{error.message} {error.param}")
    return as_sent(error, {**_NAMES, **dict.fromkeys(places, "input")})
