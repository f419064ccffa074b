"""Format of a model's chat completions, from its settings, template and tokenizer: how they are
split into reasoning, content and calls, and the grammar of those whose text must match one."""

from collections.abc import Mapping
from typing import Final

import msgspec

from loraplex.core.errors import InvalidParameterError
from loraplex.core.grammar import Grammar, GrammarKind
from loraplex.core.tools import CallDelta, ToolMode, ToolUse
from loraplex.serving.text.reasoning import (
    TAGS,
    ReasoningReader,
    ReasoningTags,
    tags_of_template,
)
from loraplex.serving.text.tool_calls.formats import FORMATS, format_of_template
from loraplex.serving.text.tool_calls.reader import CallReader
from loraplex.text.tokenizer import Tokenizer

AUTO = "auto"
NONE = "none"
_TOOLS = "tools"
"""The variable of a chat template."""
_CALLS = "tool_calls"
"""The key of a message."""


class ChatFormat(msgspec.Struct, frozen=True, kw_only=True):
    """Format of one model's chat completions."""

    tool_calls: str = "generic"
    """A key of tool_calls.formats.FORMATS."""
    reasoning: str = NONE
    """A key of reasoning.TAGS, or none: it is a part of the content."""
    knows_tools: bool = True
    """The chat template writes the tools that a request brings."""
    writes_calls: bool = True
    """The chat template writes the calls and results of earlier turns."""
    special_ids: dict[str, int] = {}
    """Markers that are special tokens of the tokenizer, and so no text unless it shows them."""

    shown_ids: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    """Special tokens that must stay in a completion's text for it to be read: for a request without
    tools, and for one with tools."""

    @property
    def separates_reasoning(self) -> bool:
        return self.reasoning in TAGS


UNKNOWN_FORMAT: Final = ChatFormat()


def chat_format(
    template: str, tokenizer: Tokenizer, *, tool_calls: str = AUTO, reasoning: str = AUTO
) -> ChatFormat:
    """Find the format by the model's settings; `auto` reads its template, which may be empty."""
    if tool_calls == AUTO:
        tool_calls = format_of_template(template).name
    if reasoning == AUTO:
        reasoning = tags_of_template(template)
    tags = TAGS.get(reasoning)
    of_reasoning = _special_ids(() if tags is None else tags.markers, tokenizer)
    special_ids = _special_ids(FORMATS[tool_calls].markers, tokenizer) | of_reasoning
    return ChatFormat(
        tool_calls=tool_calls,
        reasoning=reasoning,
        knows_tools=_TOOLS in template,
        writes_calls=_CALLS in template,
        special_ids=special_ids,
        shown_ids=(tuple(sorted({*of_reasoning.values()})), tuple(sorted({*special_ids.values()}))),
    )


def _special_ids(markers: tuple[str, ...], tokenizer: Tokenizer) -> dict[str, int]:
    ids: Mapping[str, list[int]] = {
        marker: tokenizer.encode(marker, add_special_tokens=False) for marker in markers
    }
    return {
        marker: token_ids[0]
        for marker, token_ids in ids.items()
        if len(token_ids) == 1 and tokenizer.is_special(token_ids[0])
    }


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

    @property
    def is_all_content(self) -> bool:
        """Whether every completion is content as it is written."""
        separates = self.separates_reasoning and self.chat_format.separates_reasoning
        return self.tool_use is None and not separates

    def reader(self) -> "CompletionReader":
        """One for each sequence."""
        return CompletionReader(self)


class CompletionReader:
    """Reads the text of one sequence. However it is split, the deltas add up to the same."""

    def __init__(self, reading: CompletionSyntax) -> None:
        call_format = FORMATS[reading.chat_format.tool_calls]
        tags = TAGS.get(reading.chat_format.reasoning) if reading.separates_reasoning else None
        ends = () if reading.tool_use is None else call_format.syntax.ends_reasoning
        self._reasoning = None if tags is None else ReasoningReader(tags, reading.prompt, ends)
        self._includes_reasoning = reading.includes_reasoning
        self._calls: CallReader | None = None
        if reading.tool_use is not None:
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


class Reasoning(msgspec.Struct, frozen=True):
    """Reasoning before the content."""

    tags: ReasoningTags
    is_open: bool
    """Whether the prompt has begun it; otherwise the completion may."""


class CompletionGrammar(msgspec.Struct, frozen=True, kw_only=True):
    """Parts of a completion in order, each of which may be absent."""

    reasoning: Reasoning | None = None
    tool_calls: str = ""
    """The family that writes them."""
    tool_use: ToolUse | None = None
    content: Grammar | None = None
    """Grammar of a completion without calls; None: any text."""
    special_ids: dict[str, int] = {}
    """Ids of the markers that are special tokens."""


def completion_grammar(reading: CompletionSyntax, content: Grammar | None) -> Grammar | None:
    """Return the grammar of a completion, or None if any text will do.

    `content` is the grammar of a completion without calls.
    """
    chat_format, tool_use = reading.chat_format, reading.tool_use
    needs_calls = tool_use is not None and tool_use.needs_grammar
    if not needs_calls and content is None:
        return None
    reasoning = _reasoning(chat_format, reading.prompt)
    if tool_use is None and reasoning is None:
        return content
    is_required = tool_use is not None and tool_use.mode is ToolMode.REQUIRED
    parts = CompletionGrammar(
        reasoning=reasoning,
        tool_calls=chat_format.tool_calls,
        tool_use=tool_use,
        content=None if is_required else content,
        special_ids=chat_format.special_ids,
    )
    return Grammar(GrammarKind.MESSAGE, msgspec.json.encode(parts).decode())


def read_completion_grammar(text: str) -> CompletionGrammar:
    """Raises InvalidParameterError for a text that completion_grammar did not make."""
    try:
        return msgspec.json.decode(text, type=CompletionGrammar)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidParameterError(
            f"the grammar of a message is not valid: {error}", param="grammar"
        ) from error


def _reasoning(chat_format: ChatFormat, prompt: str) -> Reasoning | None:
    tags = TAGS.get(chat_format.reasoning)
    if tags is None or tags.is_closed(prompt):
        return None
    return Reasoning(tags, tags.is_open(prompt))
