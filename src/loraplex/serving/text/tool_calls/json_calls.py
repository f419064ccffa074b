"""Calls as JSON objects with a name and arguments, which most families write in some frame."""

import json
from typing import Any, Final

from loraplex.serving.text.text_source import Steps
from loraplex.serving.text.tool_calls.json_text import CutError, MalformedError, repaired_json
from loraplex.serving.text.tool_calls.parameters import json_text
from loraplex.serving.text.tool_calls.reader import CallReader

ARGUMENT_KEYS: Final = ("arguments", "parameters")
_MAX_KEYS: Final = 16
"""Keys of a call: its name, its arguments, and others that some models write."""


def read_call(
    reader: CallReader,
    *,
    known_only: bool = False,
    markers: tuple[str, ...] = (),
    outer: str = "",
) -> Steps[None]:
    """One object with `name` and `arguments` (or `parameters`), in any order.

    Arguments after the name are given as they come. A call without them has none: `{}`. markers and
    outer: see RepairingReader.
    """
    call = _Call(reader, known_only=known_only, markers=markers, outer=f"{outer}}}")
    yield from reader.expect("{")
    try:
        yield from _read_members(reader, call)
    except MalformedError as error:
        if not (reader.is_cut and isinstance(error, CutError)):
            call.finish_broken()
        raise
    call.finish()


def _read_members(reader: CallReader, call: "_Call") -> Steps[None]:
    for _ in range(_MAX_KEYS):
        yield from reader.take_space()
        key = yield from reader.json_string()
        yield from reader.take_space()
        yield from reader.expect(":")
        yield from reader.take_space()
        yield from call.read_value(key)
        yield from reader.take_space()
        if (yield from reader.expect(",", "}")) == "}":
            return
        if (yield from reader.optional("}")) is not None:
            return
    raise MalformedError


def read_calls(
    reader: CallReader,
    *,
    known_only: bool = False,
    is_open: bool = False,
    markers: tuple[str, ...] = (),
) -> Steps[None]:
    """A list of such objects, with the brackets; is_open: the first one was read."""
    if not is_open:
        yield from reader.expect("[")
    yield from reader.take_space()
    while True:
        yield from read_call(reader, known_only=known_only, markers=markers, outer="]")
        yield from reader.take_space()
        if (yield from reader.peek()) != "{":  # else a comma is missing
            is_end = (yield from reader.expect(",", "]")) == "]"
            if is_end or (yield from reader.optional("]")) is not None:
                reader.settle()
                return
            yield from reader.take_space()
        reader.settle()


class _Call:
    """What is known of a call while its object is read."""

    def __init__(
        self, reader: CallReader, *, known_only: bool, markers: tuple[str, ...], outer: str
    ) -> None:
        self._reader = reader
        self._known_only = known_only
        self._markers = markers
        self._outer = outer
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
        else:  # an id, a type, or something else that is no part of the call
            yield from self._reader.json_value(markers=self._markers, outer=self._outer)

    def _read_arguments(self) -> Steps[None]:
        reader, name = self._reader, self._name
        context: Any = {"markers": self._markers, "outer": self._outer}
        char = yield from reader.peek()
        if name is not None and char == "{":
            yield from reader.json_object(
                reader.arguments, lambda: reader.begin_call(name), **context
            )
        elif char == "{":
            early: list[str] = []
            yield from reader.json_object(early.append, **context)
            self._early = early
        elif char in ('"', "'"):
            self._early = [_object_text((yield from reader.json_string(is_name=False, **context)))]
        elif (yield from reader.json_value(**context)).strip() == "null":
            self._early = ["{}"]
        else:
            raise MalformedError

    def finish(self) -> None:
        """Report the call, if that was not done as it came."""
        if self._name is None:
            raise MalformedError
        if self._early is not None or not self._has_arguments:
            self._reader.whole_call(self._name, "".join(self._early or ["{}"]))
        self._reader.settle()

    def finish_broken(self) -> None:
        """Report the call if its name and arguments are known, though its object does not end."""
        if self._name is not None and self._early is not None:
            self._reader.whole_call(self._name, "".join(self._early))


def _object_text(text: str) -> str:
    """Some models write the arguments as a string that is JSON: OpenAI's wire form."""
    try:
        value = json.loads(text)
        exact = json_text(value)
    except (ValueError, RecursionError):
        repaired = repaired_json(text) if text.lstrip().startswith("{") else None
        if repaired is None:
            raise MalformedError from None
        return repaired
    if not isinstance(value, dict):
        raise MalformedError
    return exact if any(map(_is_half_a_character, text)) else text


def _is_half_a_character(char: str) -> bool:
    """A surrogate, which only an escape can have made."""
    return "\ud800" <= char <= "\udfff"
