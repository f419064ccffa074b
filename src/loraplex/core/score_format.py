"""How a model scores a query and a document, as its folder states: front ends and the library
apply it.
"""

import enum
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Self

import msgspec

from loraplex.core.errors import ConfigError

_PLACE: Final = re.compile(r"\{(instruction|query|document)\}")


class ScoreKind(enum.StrEnum):
    """What the score of a pair is."""

    VECTORS = "vectors"
    """The cosine of the vectors of the two texts."""
    HEAD = "head"
    """The one value of a classification head after both texts."""
    TOKENS = "tokens"
    """The logit of a token after both texts, or how much it exceeds that of another."""


class PairTemplate(msgspec.Struct, frozen=True):
    """The prompt of a pair: text with the places {instruction}, {query} and {document}."""

    parts: tuple[str, ...]
    """Texts and names of places in turn; the first and the last are texts."""

    @classmethod
    def of(cls, text: str, place: re.Pattern[str] = _PLACE) -> Self:
        """Read a template. place: what stands for a place, with its name as the only group.

        Raises ConfigError if it does not have the query, and the document once.
        """
        template = cls(tuple(place.split(text)))
        places = template.parts[1::2]
        if "query" not in places or places.count("document") != 1:
            raise ConfigError(
                "the template of a pair must have the query, and the document once; it has "
                f"{', '.join(places) or 'neither'}"
            )
        return template

    @property
    def takes_instruction(self) -> bool:
        return "instruction" in self.parts[1::2]

    def around(self, query: str, instruction: str) -> tuple[str, str]:
        """Return what stands before the document of a query, and after it."""
        values = {"query": query, "instruction": instruction}
        texts, places = list(self.parts[::2]), self.parts[1::2]
        at = places.index("document")
        before = zip(texts, (values[place] for place in places[:at]), strict=False)
        after = zip((values[place] for place in places[at + 1 :]), texts[at + 2 :], strict=True)
        flat = itertools.chain.from_iterable
        return "".join([*flat(before), texts[at]]), "".join([texts[at + 1], *flat(after)])


QWEN3_RERANKER: Final = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    "the Instruct provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\n'  # language: quoted
    "<|im_start|>user\n<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
"""Prompt of Qwen3-Reranker, from its model card."""
QWEN3_INSTRUCTION: Final = (
    "Given a web search query, retrieve relevant passages that answer the query"  # language: quoted
)


class ScoreFormat(msgspec.Struct, frozen=True, kw_only=True):
    """Format of one model's scores. The default is that of a model whose folder states nothing."""

    kind: ScoreKind = ScoreKind.HEAD
    token_ids: tuple[int, ...] = ()
    """TOKENS: the token of a match, and perhaps the one that it must exceed."""
    template: PairTemplate | None = None
    """Prompt of a pair; None: see renders."""
    renders: bool = False
    """Whether the chat template makes the prompt; else the tokenizer joins the two texts."""
    template_options: Mapping[str, Any] = {}
    """Variables of the chat template."""
    instruction: str = ""
    """What the model is to look for, if a request does not state it."""
    is_probability: bool = True
    """Whether a score is the sigmoid of what the model yields."""
    problem: str = ""
    """Why pairs cannot be scored; empty: they can."""
    wants_head: bool = False
    """Whether an adapter that has a head solves the problem."""

    def score(self, values: Sequence[float], *, is_raw: bool = False) -> float:
        """Return the score of what the model yields for a pair. is_raw: without the sigmoid."""
        value = values[0] - sum(values[1:])
        return value if is_raw or not self.is_probability else sigmoid(value)


def sigmoid(value: float) -> float:
    """Return 1 / (1 + e^-value), without overflow."""
    if value >= 0:
        return 1 / (1 + math.exp(-value))
    power = math.exp(value)
    return power / (1 + power)
