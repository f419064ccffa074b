"""Calls as JSON objects with a name and arguments, which most families write in some frame."""

import json
from typing import Final

from loraplex.serving.text.text_source import Steps
from loraplex.serving.text.tool_calls.json_text import MalformedError
from loraplex.serving.text.tool_calls.parameters import json_text
from loraplex.serving.text.tool_calls.reader import CallReader

ARGUMENT_KEYS: Final = ("arguments", "parameters")
_MAX_KEYS: Final = 16
"""Keys of a call: its name, its arguments, and others that some models write."""


def read_call(reader: CallReader, *, known_only: bool = False) -> Steps[None]:
    """One object with `name` and `arguments` (or `parameters`), in any order.

    Arguments after the name are given as they come. A call without them has none: `{}`.
    """
    call = _Call(reader, known_only=known_only)
    yield from reader.expect("{")
    for _ in range(_MAX_KEYS):
        yield from reader.take_space()
        key = yield from reader.json_string()
        yield from reader.take_space()
        yield from reader.expect(":")
        yield from reader.take_space()
        yield from call.read_value(key)
        yield from reader.take_space()
        if (yield from reader.expect(",", "}")) == "}":
            call.finish()
            return
    raise MalformedError


def read_calls(
    reader: CallReader, *, known_only: bool = False, is_open: bool = False
) -> Steps[None]:
    """A list of such objects, with the brackets; is_open: the first one was read."""
    if not is_open:
        yield from reader.expect("[")
    yield from reader.take_space()
    while True:
        yield from read_call(reader, known_only=known_only)
        yield from reader.take_space()
        if (yield from reader.expect(",", "]")) == "]":
            reader.settle()
            return
        yield from reader.take_space()


class _Call:
    """What is known of a call while its object is read."""

    def __init__(self, reader: CallReader, *, known_only: bool) -> None:
        self._reader = reader
        self._known_only = known_only
        self._name: str | None = None
        self._early: list[str] | None = None
        """Arguments that came before the name."""
        self._has_arguments = False

    def read_value(self, key: str) -> Steps[None]:
        if key == "name" and self._name is None:
            name = yield from self._reader.json_string()
            self._reader.check_name(name, known_only=self._known_only)
            self._name = name
        elif key in ARGUMENT_KEYS and not self._has_arguments:
            self._has_arguments = True
            yield from self._read_arguments()
        else:
            yield from _other_value(self._reader)

    def _read_arguments(self) -> Steps[None]:
        reader = self._reader
        char = yield from reader.peek()
        if self._name is not None and char == "{":
            reader.begin_call(self._name)
            yield from reader.json_object(reader.arguments)
            return
        if char == "{":
            self._early = []
            yield from reader.json_object(self._early.append)
        elif char == '"':
            self._early = [_object_text((yield from reader.json_string()))]
        else:
            yield from reader.expect("null")
            self._early = ["{}"]

    def finish(self) -> None:
        """Report the call, if that was not done as it came."""
        if self._name is None:
            raise MalformedError
        if self._early is not None or not self._has_arguments:
            self._reader.whole_call(self._name, "".join(self._early or ["{}"]))
        self._reader.settle()


def _object_text(text: str) -> str:
    """Some models write the arguments as a string that is JSON: OpenAI's wire form."""
    try:
        value = json.loads(text)
        exact = json_text(value)
    except (ValueError, RecursionError):
        raise MalformedError from None
    if not isinstance(value, dict):
        raise MalformedError
    return exact if any(map(_is_half_a_character, text)) else text


def _is_half_a_character(char: str) -> bool:
    """A surrogate, which only an escape can have made."""
    return "\ud800" <= char <= "\udfff"


def _other_value(reader: CallReader) -> Steps[None]:
    """An id, a type, or something else that is no part of the call."""
    char = yield from reader.peek()
    if char == '"':
        yield from reader.json_string()
    elif char == "{":
        yield from reader.json_object(lambda _: None)
    elif char.isdigit():
        while (yield from reader.peek()).isdigit():
            reader.take(1)
    else:
        yield from reader.expect("null", "true", "false")
