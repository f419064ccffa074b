"""What a chat answer may consist of, where its text has to be held to it: as a Grammar's text."""

import msgspec

from loraplex.core.errors import InvalidParameterError
from loraplex.core.grammar import Grammar, GrammarKind
from loraplex.core.tools import ToolMode, ToolUse
from loraplex.serving.text.chat_format import ChatFormat
from loraplex.serving.text.completion_reader import CompletionSyntax
from loraplex.serving.text.reasoning import ReasoningTags


class Reasoning(msgspec.Struct, frozen=True):
    """Before the answer."""

    tags: ReasoningTags
    is_open: bool
    """The prompt has begun it; else the answer may."""


class CompletionGrammar(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of an answer, one after the other, each of which may be absent."""

    reasoning: Reasoning | None = None
    tool_calls: str = ""
    """The family that writes them."""
    tool_use: ToolUse | None = None
    content: Grammar | None = None
    """Of an answer without calls; None: any text."""
    special_ids: dict[str, int] = {}
    """Of the markers that are special tokens."""


def completion_grammar(reading: CompletionSyntax, content: Grammar | None) -> Grammar | None:
    """The grammar of an answer; None: any text will do. content: of one without calls."""
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
            f"the grammar of an answer is not one: {error}", param="grammar"
        ) from error


def _reasoning(chat_format: ChatFormat, prompt: str) -> Reasoning | None:
    tags = chat_format.tags
    if tags is None or tags.is_closed(prompt):
        return None
    return Reasoning(tags, tags.is_open(prompt))
