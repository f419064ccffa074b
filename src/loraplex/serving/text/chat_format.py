"""Format of a model's chat completions, from its settings, template and tokenizer."""

from collections.abc import Mapping
from typing import Final

import msgspec

from loraplex.serving.text.reasoning import TAGS, ReasoningTags, tags_of_template
from loraplex.serving.text.tool_calls.format import ToolCallFormat
from loraplex.serving.text.tool_calls.formats import FORMATS, format_of_template
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

    @property
    def tags(self) -> ReasoningTags | None:
        return TAGS.get(self.reasoning)

    @property
    def call_format(self) -> ToolCallFormat:
        return FORMATS[self.tool_calls]

    def shown_ids(self, *, has_tools: bool) -> tuple[int, ...]:
        """Return the special tokens that must stay in a completion's text for it to be read."""
        tags = self.tags
        markers = (
            *(() if tags is None else tags.markers),
            *(self.call_format.markers if has_tools else ()),
        )
        return tuple(sorted({self.special_ids[m] for m in markers if m in self.special_ids}))


UNKNOWN_FORMAT: Final = ChatFormat()


def chat_format(
    template: str, tokenizer: Tokenizer, *, tool_calls: str = AUTO, reasoning: str = AUTO
) -> ChatFormat:
    """Find the format by the model's settings; `auto` reads its template, which may be empty."""
    if tool_calls == AUTO:
        tool_calls = format_of_template(template).name
    if reasoning == AUTO:
        reasoning = tags_of_template(template)
    found = ChatFormat(
        tool_calls=tool_calls,
        reasoning=reasoning,
        knows_tools=_TOOLS in template,
        writes_calls=_CALLS in template,
    )
    markers = (*found.call_format.markers, *(found.tags.markers if found.tags else ()))
    return msgspec.structs.replace(found, special_ids=_special_ids(markers, tokenizer))


def _special_ids(markers: tuple[str, ...], tokenizer: Tokenizer) -> dict[str, int]:
    ids: Mapping[str, list[int]] = {
        marker: tokenizer.encode(marker, add_special_tokens=False) for marker in markers
    }
    return {
        marker: token_ids[0]
        for marker, token_ids in ids.items()
        if len(token_ids) == 1 and tokenizer.is_special(token_ids[0])
    }
