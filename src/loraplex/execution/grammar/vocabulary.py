"""What the tokens of a model are to a grammar."""

import dataclasses
from collections.abc import Callable, Sequence

from loraplex.core.grammar import DEFAULT_LIMITS, GrammarLimits


@dataclasses.dataclass(frozen=True)
class GrammarVocabulary:
    """The tokens by id, and how the model's own tokenizer cuts a text into them."""

    tokens: Sequence[bytes]
    """Bytes of each id within a text; empty for an unused id."""
    special_ids: frozenset[int]
    """They are no text: a grammar can only name them."""
    encode: Callable[[str], Sequence[int]]
    """Encoder without special tokens around the text."""
    limits: GrammarLimits = DEFAULT_LIMITS
    """Limits of each grammar over these tokens."""


VocabularySource = Callable[[], GrammarVocabulary]
"""Called once, when first needed. Raises a LoraplexError with the reason if there is none."""
