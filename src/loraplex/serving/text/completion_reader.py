"""Splits a chat completion, as it arrives, into reasoning, content and calls."""

from typing import Final

import msgspec

from loraplex.core.tools import CallDelta, ToolUse
from loraplex.serving.text.chat_format import ChatFormat
from loraplex.serving.text.reasoning import ReasoningReader
from loraplex.serving.text.tool_calls.reader import CallReader


class CompletionDelta(msgspec.Struct, frozen=True):
    """New parts of a completion."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[CallDelta, ...] = ()
    parts: tuple[str | CallDelta, ...] = ()
    """Content and calls, in their order."""


class CompletionSyntax(msgspec.Struct, frozen=True, kw_only=True):
    """Rules for reading the completions of one request."""

    chat_format: ChatFormat = ChatFormat()
    tool_use: ToolUse | None = None
    """None: nothing may be called."""
    prompt: str = ""
    """The rendered conversation."""
    includes_reasoning: bool = True
    """Else it is left out."""
    separates_reasoning: bool = True
    """Else it is a part of the content, as it was written."""

    @property
    def is_named(self) -> bool:
        return self.tool_use is not None and self.tool_use.is_named

    def reader(self) -> "CompletionReader":
        """One for each sequence."""
        return CompletionReader(self)


class CompletionReader:
    """Reads the text of one sequence. However it is split, the deltas add up to the same."""

    def __init__(self, reading: CompletionSyntax) -> None:
        tags = reading.chat_format.tags if reading.separates_reasoning else None
        self._reasoning = None if tags is None else ReasoningReader(tags, reading.prompt)
        self._includes_reasoning = reading.includes_reasoning
        self._calls: CallReader | None = None
        if reading.tool_use is not None:
            call_format = reading.chat_format.call_format
            self._calls = CallReader(reading.tool_use.tools, call_format.new_id)
            self._steps = call_format.read(self._calls)

    @property
    def num_calls(self) -> int:
        return 0 if self._calls is None else self._calls.num_calls

    def push(self, text: str, *, final: bool = False, is_cut: bool = False) -> CompletionDelta:
        """`final`: with the last text, once; is_cut: a limit ended it, not the model. Only then may
        the arguments of a call end where they are no JSON."""
        reasoning = ""
        if self._reasoning is not None:
            thought, text = self._reasoning.push(text, final=final)
            reasoning = thought if self._includes_reasoning else ""
        if self._calls is None:
            return CompletionDelta(reasoning, text, parts=(text,) if text else ())
        self._calls.feed(text, final=final, is_cut=is_cut)
        next(self._steps, None)
        found = self._calls.found()
        return CompletionDelta(reasoning, found.content, found.calls, found.parts)


ALL_IS_CONTENT: Final = CompletionSyntax()
"""Syntax which takes the whole completion as content."""
