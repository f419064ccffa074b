"""Reasoning of a model: the text between tags before its completion."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import msgspec

from loraplex.serving.text.text_source import WHITE_SPACE, Steps, TextSource


class ReasoningTags(msgspec.Struct, frozen=True):
    """How a family of models marks its reasoning."""

    start: str
    end: str

    @property
    def markers(self) -> tuple[str, ...]:
        return self.start, self.end

    def is_open(self, prompt: str) -> bool:
        """The prompt has begun it: a chat template wrote the first tag."""
        return prompt.rstrip(WHITE_SPACE).endswith(self.start)

    def is_closed(self, prompt: str) -> bool:
        """Text in the prompt for no reasoning: a pair of tags with nothing between them."""
        return prompt.rstrip(WHITE_SPACE).endswith(self.end)


TAGS: Final[Mapping[str, ReasoningTags]] = MappingProxyType(
    {
        "think": ReasoningTags("<think>", "</think>"),
        "mistral": ReasoningTags("[THINK]", "[/THINK]"),
    }
)
"""Tags by the name of the setting reasoning_parser."""


def tags_of_template(template: str) -> str:
    """Their name in TAGS; `none` where the template has no such tags."""
    known = (name for name, tags in TAGS.items() if tags.end in template)
    return next(known, "none")


class ReasoningReader:
    """Splits a completion into its reasoning, if it begins with some, and the rest.

    Tags, and white space next to them, are in neither.
    """

    def __init__(self, tags: ReasoningTags, prompt: str, ends: tuple[str, ...] = ()) -> None:
        """ends: texts other than the tag that end it, and belong to the rest."""
        self._tags = tags
        self._ends = ends
        self._source = TextSource()
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._space = ""
        self._steps = self._read(prompt)
        self._is_done = False

    def push(self, text: str, *, final: bool = False) -> tuple[str, str]:
        """Return the new reasoning and the new content."""
        self._source.feed(text, final=final)
        if not self._is_done:
            self._is_done = next(self._steps, True) is True
        if self._is_done:
            self._content.append(self._source.advance(len(self._source.unread)))
        new = "".join(self._reasoning), "".join(self._content)
        self._reasoning, self._content = [], []
        return new

    def _read(self, prompt: str) -> Steps[None]:
        source = self._source
        if not self._tags.is_open(prompt):
            space = yield from source.white_space()
            is_there = None
            if not self._tags.is_closed(prompt):
                is_there = yield from source.starts_with((self._tags.start,))
            if is_there is None:
                self._content.append(space)
                return
            source.advance(len(self._tags.start))
        yield from source.white_space()
        marker = yield from source.pieces_until((self._tags.end, *self._ends), self._keep)
        if marker is None:
            self._keep(source.advance(len(source.unread)))
        elif marker == self._tags.end:
            source.advance(len(marker))
            yield from source.white_space()

    def _keep(self, text: str) -> None:
        """White space waits: at the end it is none of the reasoning."""
        stripped = text.rstrip(WHITE_SPACE)
        if stripped:
            self._reasoning.append(self._space + stripped)
            self._space = text[len(stripped) :]
        else:
            self._space += text
