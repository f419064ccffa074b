"""Text of a completion as a family's code reads it, and the calls found in it."""

import itertools
import json
import secrets
import string
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from loraplex.core.tools import CallDelta, FunctionTool
from loraplex.serving.text.text_source import WHITE_SPACE, Steps, TextSource
from loraplex.serving.text.tool_calls.json_text import (
    CutError,
    MalformedError,
    RepairingReader,
)

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
    them, and what a cut output has after its last call. A call that breaks after it began ends
    there, and is whole all the same: only a limit's cut leaves arguments that are no JSON.
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
        self._is_framed = False
        """The last text that began like a call was one: what is left of its frame is no content."""
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

    def content_until(self, markers: Sequence[str], frame: Sequence[str] = ()) -> Steps[str | None]:
        """Everything before the next marker is content; the marker is taken. None: no more.

        frame: other markers of calls, which are content too unless they are left over of one.
        """
        while (marker := (yield from self.pieces_until((*markers, *frame), self.content))) in frame:
            text = self.advance(len(marker or ""))
            if self._is_framed:
                self._space = ""
            else:
                self.content(text)
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
        num_calls = self.num_calls
        try:
            yield from steps
        except CutError:
            if self._is_behind_call:
                self.settle()  # of a call, or another one, too little to be worth reading
        except MalformedError:
            pass
        self.content("".join(self._taken))
        self.settle()
        self._is_framed = self.num_calls > num_calls
        if self._is_behind_call:
            yield from self._skip_brackets()

    def _skip_brackets(self) -> Steps[None]:
        """Read brackets that close more than the call had opened."""
        while True:
            char, ahead = yield from self.visible(0)
            if not char or char not in "]}":
                return
            self.advance(ahead + 1)

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
            if self._is_final:
                self._check_cut(self.unread, choices)
            raise MalformedError
        return self.take(len(text))

    def _check_cut(self, rest: str, choices: Sequence[str]) -> None:
        """Take all that is left if it may be the beginning of a choice, and raise CutError."""
        if any(choice.startswith(rest) for choice in choices):
            self.take(len(self.unread))
            raise CutError

    def optional(self, *choices: str, may_end: bool = False) -> Steps[str | None]:
        """Take one of the texts if it is there, and white space before it. may_end: its beginning
        at the end of the text is text, unless the output was cut."""
        _, ahead = yield from self.visible(0)
        text = yield from self.starts_with(choices, ahead)
        if text is not None:
            self.take(ahead + len(text))
        elif self._is_final and self.unread[ahead:] and (self.is_cut or not may_end):
            self._check_cut(self.unread[ahead:], choices)
        return text

    def until(
        self, *markers: str, before: Sequence[str] = (), may_end: bool = False
    ) -> Steps[tuple[str, str]]:
        """Take (the text before a marker, the marker).

        before: markers that are not taken. may_end: the text may end without any, and the marker is
        empty then, unless the output was cut.
        """
        taken: list[str] = []

        def keep(text: str) -> None:
            taken.append(text)
            self._taken.append(text)

        marker = yield from self.pieces_until((*markers, *before), keep)
        if marker is None:
            keep(self.advance(len(self.unread)))
            if not may_end or self.is_cut:
                raise CutError
        elif marker in markers:
            self.take(len(marker))
        return "".join(taken), marker or ""

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

    def json_object(
        self,
        give: Callable[[str], None],
        begin: Callable[[], None] = lambda: None,
        *,
        markers: tuple[str, ...] = (),
        outer: str = "",
    ) -> Steps[None]:
        """Take an object, and give its text as it comes, repaired. See RepairingReader."""
        yield from RepairingReader(
            self, self.take, give, begin=begin, markers=markers, outer=outer
        ).read_object()

    def json_value(self, *, markers: tuple[str, ...] = (), outer: str = "") -> Steps[str]:
        """Take a value, all of it."""
        given: list[str] = []
        yield from RepairingReader(
            self, self.take, given.append, markers=markers, outer=outer
        ).read_value()
        return "".join(given)

    def json_string(
        self, *, is_name: bool = True, markers: tuple[str, ...] = (), outer: str = ""
    ) -> Steps[str]:
        """Take a string, all of it."""
        given: list[str] = []
        yield from RepairingReader(
            self, self.take, given.append, markers=markers, outer=outer
        ).read_string(is_name=is_name)
        return str(json.loads("".join(given)))

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
