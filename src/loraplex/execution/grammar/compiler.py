"""Compilation of a grammar's text to matchers at its start, with the tokens of one model.

The only module of the engine that needs llguidance when it is imported.
"""

import collections
import dataclasses
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Final

import llguidance
import msgspec

from loraplex.core.errors import UnsupportedFeatureError
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


logger = logging.getLogger(__name__)

_MAX_PROTOTYPES: Final = 64
"""Compiled grammars that are kept: a sequence starts with a copy of one."""
_END_OF_GRAMMAR: Final = b"<end of grammar>"
_MAX_ENCODED_BYTES: Final = 1024
_NUM_UNSURE_TOKENS: Final = 16
"""Tokens at a cut which could be others if the text went on."""
_SENTINEL: Final = "\x02"
"""Put before a text so that a tokenizer which adds a space to a text's start adds it there."""


class GrammarCompiler:
    """Any number of threads may call it."""

    def __init__(self, vocab_size: int, source: VocabularySource | None) -> None:
        """Takes about a second per 50,000 tokens. Raises why the model has no vocabulary."""
        if source is None:
            raise UnsupportedFeatureError(
                "this model has no tokenizer, so its output cannot be kept to a grammar",
                param="grammar",
            )
        vocabulary = source()
        self._limits = llguidance.LLParserLimits(
            verbose_errors=False, **msgspec.structs.asdict(vocabulary.limits)
        )
        self._tokenizer = build_tokenizer(vocabulary, vocab_size)
        self._lock = threading.Lock()
        self._prototypes: collections.OrderedDict[str, llguidance.LLMatcher] = (
            collections.OrderedDict()
        )

    def matcher(self, text: str) -> llguidance.LLMatcher:
        """Return a matcher. It may be in an error state, which it reports itself."""
        with self._lock:
            prototype = self._prototypes.get(text)
        if prototype is None:
            prototype = llguidance.LLMatcher(
                self._tokenizer, text, log_level=0, limits=self._limits
            )
        with self._lock:
            self._prototypes[text] = prototype
            self._prototypes.move_to_end(text)
            if len(self._prototypes) > _MAX_PROTOTYPES:
                self._prototypes.popitem(last=False)
        return prototype.deep_copy()


def build_tokenizer(vocabulary: GrammarVocabulary, vocab_size: int) -> llguidance.LLTokenizer:
    """The tokenizer of a model with so many ids, and one more: `vocab_size` is the end of a text.

    That id is no token of the model, so what ends a sequence can differ by request: its bit in a
    mask shows whether the grammar may end.
    """
    return llguidance.LLTokenizer(
        _TokenTable(vocabulary, vocab_size),  # type: ignore[arg-type]
        n_vocab=vocab_size + 1,
        eos_token=vocab_size,
    )


class _TokenTable:
    """Tokenizer interface of llguidance; the names are its own (TokenizerWrapper)."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: GrammarVocabulary, vocab_size: int) -> None:
        known = [bytes(token) for token in vocabulary.tokens[:vocab_size]]
        missing = [b""] * (vocab_size - len(known))
        self.tokens = [*known, *missing, _END_OF_GRAMMAR]
        self.eos_token_id = vocab_size
        self.special_token_ids = [
            *sorted(token_id for token_id in vocabulary.special_ids if token_id < vocab_size),
            vocab_size,
        ]
        self._special_ids = frozenset(self.special_token_ids)
        self._encode = vocabulary.encode
        self._id_of = {
            token: token_id
            for token_id, token in reversed(list(enumerate(self.tokens)))
            if token and token_id not in self._special_ids
        }
        self._longest = max(map(len, self._id_of), default=0)

    def __call__(self, text: str | bytes) -> list[int]:
        """The tokens that the model would most likely write this text with.

        They spell it exactly: else the mask of a forced text would leave the grammar. Of a long
        one (a client's constant) it is the start: llguidance calls it at every token.
        """
        data = text.encode() if isinstance(text, str) else bytes(text)
        if len(data) > _MAX_ENCODED_BYTES:
            start = data[:_MAX_ENCODED_BYTES].decode(errors="ignore").encode()
            return self._encoded(start)[:-_NUM_UNSURE_TOKENS]
        return self._encoded(data)

    def _encoded(self, data: bytes) -> list[int]:
        for prefix in ("", _SENTINEL):
            token_ids = self._encoded_after(prefix, data)
            if token_ids is not None:
                return token_ids
        return self._longest_matches(data)

    def _encoded_after(self, prefix: str, data: bytes) -> list[int] | None:
        """None if the model's tokenizer does not spell the text after this prefix."""
        try:
            encoded = list(self._encode(prefix + data.decode()))
        except UnicodeDecodeError:
            return None
        except Exception:  # a foreign tokenizer's; llguidance would end the row with its traceback
            logger.warning("the model's tokenizer cannot encode a part of an output", exc_info=True)
            return None
        if any(i in self._special_ids or i > self.eos_token_id for i in encoded):
            return None
        before = b""
        for index, token_id in enumerate(encoded):
            if before.endswith(prefix.encode()):
                rest = encoded[index:]
                return rest if b"".join(self.tokens[i] for i in rest) == data else None
            before += self.tokens[token_id]
        return None

    def _longest_matches(self, data: bytes) -> list[int]:
        """Tokens of the longest prefix that the vocabulary can spell."""
        token_ids: list[int] = []
        at = 0
        while at < len(data):
            for size in range(min(self._longest, len(data) - at), 0, -1):
                token_id = self._id_of.get(data[at : at + size])
                if token_id is not None:
                    token_ids.append(token_id)
                    at += size
                    break
            else:
                break
        return token_ids
