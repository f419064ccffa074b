"""Parts of a chat completion whose text must match them, written as a Grammar's text."""

import msgspec

from loraplex.core.errors import InvalidParameterError
from loraplex.core.grammar import Grammar, GrammarKind
from loraplex.core.tools import ToolMode, ToolUse
from loraplex.serving.text.chat_format import ChatFormat
from loraplex.serving.text.completion_reader import CompletionSyntax
from loraplex.serving.text.reasoning import ReasoningTags


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
    tags = chat_format.tags
    if tags is None or tags.is_closed(prompt):
        return None
    return Reasoning(tags, tags.is_open(prompt))
