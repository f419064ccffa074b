"""Text of a completion as a family's code reads it, and the calls found in it."""

import itertools
import json
import secrets
import string
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from loraplex.core.tools import CallDelta, FunctionTool
from loraplex.serving.text.text_source import WHITE_SPACE, Steps, TextSource
from loraplex.serving.text.tool_calls.json_text import CutError, JsonScanner, MalformedError

MAX_NAME_CHARACTERS: Final = 256
_NAME_CHARACTERS: Final = frozenset(string.ascii_letters + string.digits + "_-.")


class Found(NamedTuple):
    """What some more text brought."""

    content: str
    calls: tuple[CallDelta, ...]
    parts: tuple[str | CallDelta, ...]
    """Both, in their order."""


def call_id() -> str:
    """Return an id that looks like those of OpenAI."""
    return f"call_{secrets.token_hex(12)}"


class CallReader(TextSource):
    """A completion and what is found in it: content and calls.

    Text that belongs to a call is *taken* first; once the call is known to be one it is accounted
    for, else it is content after all. So no text is lost but white space around calls, what frames
    them, and what a cut output has after its last call. A call that breaks after it
    began ends there: what was read of it stays a call, what follows is content.
    """

    def __init__(
        self, tools: Sequence[FunctionTool] = (), new_id: Callable[[], str] = call_id
    ) -> None:
        super().__init__()
        self.tools = {tool.name: tool for tool in tools}
        self.num_calls = 0
        self._new_id = new_id
        self._taken: list[str] = []
        self._has_content = False
        self._is_behind_call = False
        """No content has come since the last call."""
        self._space = ""
        """White space of content, until it is known whether content follows."""
        self._parts: list[str | CallDelta] = []

    def found(self) -> Found:
        """Return what is new since the last call."""
        parts, self._parts = self._parts, []
        return Found(
            content="".join(part for part in parts if isinstance(part, str)),
            calls=_joined([part for part in parts if isinstance(part, CallDelta)]),
            parts=_in_order(parts),
        )

    # ---------------------------------------------------------------- content

    def content(self, text: str) -> None:
        stripped = text.rstrip(WHITE_SPACE)
        if stripped:
            is_after_call = self.num_calls > 0 and not self._has_content
            held = self._space + stripped
            self._parts.append(held.lstrip(WHITE_SPACE) if is_after_call else held)
            self._space = text[len(stripped) :]
            self._has_content = True
            self._is_behind_call = False
        else:
            self._space += text

    def content_until(self, markers: Sequence[str]) -> Steps[str | None]:
        """Everything before the next marker is content; the marker is taken. None: no more."""
        marker = yield from self.pieces_until(markers, self.content)
        if marker is None:
            rest = self.advance(len(self.unread))
            # After a call, the beginning of a marker is that of another: the output was cut.
            self.content("" if self._is_behind_call else rest)
            self.end()
        else:
            self.take(len(marker))
        return marker

    def end(self) -> None:
        """End the completion: white space after its content belongs to the content."""
        if self.num_calls == 0 and self._space:
            self._parts.append(self._space)
        self._space = ""

    # ---------------------------------------------------------------- what may be a call

    def attempt(self, steps: Steps[None]) -> Steps[None]:
        """Read a call, or several; what turns out to be none is content."""
        try:
            yield from steps
        except CutError:
            if self._is_behind_call:
                self.settle()  # of a call, or another one, too little to be worth reading
        except MalformedError:
            pass
        self.content("".join(self._taken))
        self.settle()

    def settle(self) -> None:
        """What was taken is the frame of calls: accounted for."""
        self._taken = []

    def take(self, count: int) -> str:
        text = self.advance(count)
        self._taken.append(text)
        return text

    def take_space(self) -> Steps[None]:
        self._taken.append((yield from self.white_space()))

    def expect(self, *choices: str) -> Steps[str]:
        """Take one of the texts, or raise MalformedError and take nothing."""
        text = yield from self.starts_with(choices)
        if text is None:
            if self._is_final and any(choice.startswith(self.unread) for choice in choices):
                self.take(len(self.unread))
                raise CutError
            raise MalformedError
        return self.take(len(text))

    def until(self, *markers: str) -> Steps[tuple[str, str]]:
        """Take (the text before a marker, the marker)."""
        before: list[str] = []

        def keep(text: str) -> None:
            before.append(text)
            self._taken.append(text)

        marker = yield from self.pieces_until(markers, keep)
        if marker is None:
            self.take(len(self.unread))
            raise CutError
        self.take(len(marker))
        return "".join(before), marker

    def name(self, *, known_only: bool = False) -> Steps[str]:
        """Take the name of a function, as long as it goes."""
        name = ""
        while (char := (yield from self.peek())) and char in _NAME_CHARACTERS:
            name += self.take(1)
            if len(name) > MAX_NAME_CHARACTERS:
                raise MalformedError
        if not char:
            raise CutError
        self.check_name(name, known_only=known_only)
        return name

    def check_name(self, name: str, *, known_only: bool = False) -> None:
        is_right = 0 < len(name) <= MAX_NAME_CHARACTERS and _NAME_CHARACTERS.issuperset(name)
        if not is_right or (known_only and name not in self.tools):
            raise MalformedError

    def json_object(self, give: Callable[[str], None]) -> Steps[None]:
        """Take an object, and give its text as it comes."""
        scanner = JsonScanner()
        while not scanner.is_complete:
            if not (yield from self.peek()):
                raise CutError
            text, end = scanner.scan(self._text, self._at)
            if text:
                self.take(end - self._at)
                give(text)
            if self._at < len(self._text) and not scanner.is_complete:
                raise MalformedError

    def json_string(self) -> Steps[str]:
        """Take a string, all of it."""
        text = '{"":'
        scanner = JsonScanner()
        for char in text:
            scanner.feed(char)
        if (yield from self.peek()) != '"':
            raise CutError if self.is_over else MalformedError
        while not (yield from self._string_ends(scanner, text)):
            text += scanner.feed(self._text[self._at])
            self.take(1)
        return str(json.loads(text + "}")[""])

    def _string_ends(self, scanner: JsonScanner, text: str) -> Steps[bool]:
        if len(text) > len('{"":"') and scanner.is_between:
            return True
        if not (yield from self.peek()):
            raise CutError
        return False

    # ---------------------------------------------------------------- calls

    def begin_call(self, name: str, own_id: str | None = None) -> None:
        """Report the call. `own_id` is the one that the model wrote."""
        delta = CallDelta(index=self.num_calls, call_id=own_id or self._new_id(), name=name)
        self._parts.append(delta)
        self.num_calls += 1
        self._space = ""
        self._is_behind_call = True
        self.settle()

    def arguments(self, text: str) -> None:
        """A piece of those of the call that began last."""
        if text:
            self._parts.append(CallDelta(index=self.num_calls - 1, arguments=text))
            self.settle()

    def whole_call(self, name: str, arguments: str, own_id: str | None = None) -> None:
        self.begin_call(name, own_id)
        self.arguments(arguments)


def _joined(deltas: Sequence[CallDelta]) -> tuple[CallDelta, ...]:
    """One for each call: clients take two for one call in one chunk for two calls."""
    return tuple(
        CallDelta(
            index=index,
            call_id=parts[0].call_id,
            name=parts[0].name,
            arguments="".join(part.arguments for part in parts),
        )
        for index, group in itertools.groupby(deltas, key=lambda part: part.index)
        for parts in [list(group)]
    )


def _in_order(parts: Sequence[str | CallDelta]) -> tuple[str | CallDelta, ...]:
    """What belongs to one run of content, or to one call, is one."""
    ordered: list[str | CallDelta] = []
    for is_content, group in itertools.groupby(parts, key=lambda part: isinstance(part, str)):
        run = list(group)
        if is_content:
            ordered.append("".join(part for part in run if isinstance(part, str)))
        else:
            ordered.extend(_joined([part for part in run if isinstance(part, CallDelta)]))
    return tuple(ordered)
