"""The tokens of a model folder as the engine's grammars see them."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from loraplex.core.config import ModelConfig
from loraplex.execution.grammar.vocabulary import GrammarVocabulary, VocabularySource
from loraplex.text.tokenizer import Tokenizer, load_tokenizer


def vocabulary_source(model: ModelConfig) -> VocabularySource:
    """Reads the model's tokenizer when it is asked; raises ConfigError then."""

    def read() -> GrammarVocabulary:
        tokenizer = load_tokenizer(Path(model.tokenizer or model.path), model.tokenizer_config)
        return dataclasses.replace(vocabulary_of(tokenizer), limits=model.grammar_limits)

    return read


def vocabulary_of(tokenizer: Tokenizer) -> GrammarVocabulary:
    """The very bytes that serving makes text of, whatever kind of tokenizer it is."""
    ids = range(tokenizer.vocab_size)
    return GrammarVocabulary(
        tokens=tuple(tokenizer.token_bytes(token_id) for token_id in ids),
        special_ids=frozenset(token_id for token_id in ids if tokenizer.is_special(token_id)),
        encode=_without_special_tokens(tokenizer),
    )


def _without_special_tokens(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    return lambda text: tokenizer.encode(text, add_special_tokens=False)
