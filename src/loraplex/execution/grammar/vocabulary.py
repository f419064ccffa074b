"""What the tokens of a model are to a grammar."""

import dataclasses
from collections.abc import Callable, Sequence

from loraplex.core.grammar import DEFAULT_LIMITS, GrammarLimits


@dataclasses.dataclass(frozen=True)
class GrammarVocabulary:
    """The tokens by id, and how the model's own tokenizer cuts a text into them."""

    tokens: Sequence[bytes]
    """Within a text; empty for an id that stands for nothing."""
    special_ids: frozenset[int]
    """They are no text: a grammar can only name them."""
    encode: Callable[[str], Sequence[int]]
    """Without special tokens around the text."""
    limits: GrammarLimits = DEFAULT_LIMITS
    """Of each grammar over these tokens."""


VocabularySource = Callable[[], GrammarVocabulary]
"""Asked once, when it is needed first. Raises a LoraplexError that says why there is none."""
