"""Formats in which families of models write calls."""

import json
from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol

from loraplex.core.tools import FunctionTool
from loraplex.serving.text.text_source import Steps
from loraplex.serving.text.tool_calls.lark import Lark
from loraplex.serving.text.tool_calls.reader import CallReader, call_id

ANY_OBJECT: Final[dict[str, Any]] = {"type": "object"}


class CallSyntax(NamedTuple):
    """Syntax of a completion that is all calls, which the grammar enforces."""

    trigger: str
    """What calls begin with and content does not hold; empty: see `first`."""
    before: str
    between: str
    after: str
    call: Callable[[Lark, FunctionTool], str]
    """The expression of one call, whose arguments match the tool's schema."""
    other_triggers: tuple[str, ...] = ()
    """What is read as the beginning of calls, too, so content does not hold it."""
    first: str = ""
    """Characters that no content begins with; without a trigger only."""
    marked: "CallSyntax | None" = None
    """Syntax where content may begin with those characters; without a trigger only."""
    ends_reasoning: tuple[str, ...] = ()
    """Beginnings of calls at which reasoning ends: these models often leave its end tag out."""


class ToolCallFormat(Protocol):
    """One way of writing calls. Stateless."""

    @property
    def name(self) -> str:
        """Value of the setting tool_call_parser."""
        ...

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that some tokenizers have as special tokens."""
        ...

    @property
    def syntax(self) -> CallSyntax: ...

    def recognises(self, template: str) -> bool:
        """Whether a chat template writes calls like this."""
        ...

    def new_id(self) -> str:
        """The id of a call that has none of its own."""
        ...

    def read(self, reader: CallReader) -> Steps[None]:
        """Read a completion to its end."""
        ...


class OurIds:
    """Return no id: calls of the format have none, or its templates take any."""

    def new_id(self) -> str:
        return call_id()


def read_marked(
    reader: CallReader,
    starts: tuple[str, ...],
    read_one: Callable[[CallReader], Steps[None]],
    frame: tuple[str, ...] = (),
) -> Steps[None]:
    """Calls anywhere in the content, each after one or more of the markers.

    frame: the other markers around calls.
    """

    def read(reader: CallReader) -> Steps[None]:
        while (yield from reader.optional(*starts)) is not None:
            pass
        yield from read_one(reader)

    while (yield from reader.content_until(starts, frame)) is not None:
        yield from reader.attempt(read(reader))


def read_named_arguments(
    reader: CallReader, name: str, own_id: str | None = None, *, markers: tuple[str, ...]
) -> Steps[None]:
    """Read the object after a name, which makes it a call."""
    reader.check_name(name)
    yield from reader.take_space()
    yield from reader.json_object(
        reader.arguments, lambda: reader.begin_call(name, own_id), markers=markers
    )


def read_whole(reader: CallReader, calls: Steps[None], frame: tuple[str, ...] = ()) -> Steps[None]:
    """Read a completion that is all calls, or all content. frame: markers around calls."""
    yield from reader.attempt(calls)
    yield from rest_is_content(reader, frame)


def rest_is_content(reader: CallReader, frame: tuple[str, ...] = ()) -> Steps[None]:
    yield from reader.content_until((), frame)


def arguments_schema(tool: FunctionTool) -> dict[str, Any]:
    """Require arguments to be an object, whatever the client's schema requires."""
    return {**tool.parameters, "type": "object"}


def json_call(key: str) -> Callable[[Lark, FunctionTool], str]:
    """A call as an object of a name and, under that key, arguments."""

    def call(lark: Lark, tool: FunctionTool) -> str:
        head = f'{{"name": {json.dumps(tool.name)}, "{key}": '
        return f"{lark.text(head)} {lark.json(arguments_schema(tool))} {lark.text('}')}"

    return call
