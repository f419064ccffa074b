"""Stop words, bad words, and words with a bias. Pure."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

from loraplex.core.errors import InvalidTensorError, TokenOutOfVocabularyError
from loraplex.frontends.kserve.models.inputs import Inputs
from loraplex.frontends.kserve.tensors import Array
from loraplex.serving.backend import ModelCard

Tokenize = Callable[[str], list[int]]
"""Tokenizer without special tokens."""


class StopWords(NamedTuple):
    """Stop conditions of a completion, by how they are found."""

    texts: tuple[str, ...] = ()
    sequences: tuple[tuple[int, ...], ...] = ()

    @property
    def has_any(self) -> bool:
        return bool(self.texts or self.sequences)


def stop_words(inputs: Inputs, card: ModelCard) -> StopWords:
    """Stop words as text, whichever tokens spell it, or as exact token sequences."""
    if inputs.kind.takes_text:
        return StopWords(texts=tuple(text for text in inputs.texts("stop_words") if text))
    return StopWords(sequences=tuple(_words(inputs, "stop_words", card)))


def bad_words(inputs: Inputs, card: ModelCard) -> dict[str, Any]:
    """The field of SamplingParams that forbids them."""
    if inputs.kind.takes_text:
        return {"bad_words": tuple(text for text in inputs.texts("bad_words") if text)}
    return {"bad_token_ids": tuple(_words(inputs, "bad_words", card))}


def logit_bias(
    inputs: Inputs, card: ModelCard, tokenize: Tokenize
) -> tuple[tuple[int, float], ...]:
    """Token biases of a vector over the vocabulary, or of words: each token gets the weight."""
    if inputs.kind.takes_text:
        return word_biases(inputs, tokenize)
    array = inputs.array("embedding_bias")
    if array is None or not array.any():
        return ()
    if array.size != card.vocab_size:
        raise InvalidTensorError(
            f"input 'embedding_bias' has {array.size} numbers; the vocabulary has "
            f"{card.vocab_size}",
            param="embedding_bias",
        )
    return tuple((i, float(bias)) for i, bias in enumerate(array.flat) if bias != 0.0)


def word_biases(inputs: Inputs, tokenize: Tokenize) -> tuple[tuple[int, float], ...]:
    """(token id, sum of the weights of its words), ascending, without zeros."""
    words = inputs.texts("embedding_bias_words")
    array = inputs.array("embedding_bias_weights")
    weights = [] if array is None else [float(weight) for weight in array.flat]
    if len(words) != len(weights):
        field = inputs.kind.input_of("embedding_bias_weights")
        raise InvalidTensorError(
            f"input '{inputs.kind.input_of('embedding_bias_words')}' has {len(words)} words and "
            f"'{field}' {len(weights)} weights; there must be one weight for each word",
            param=field,
        )
    biases: dict[int, float] = {}
    for word, weight in zip(words, weights, strict=True):
        for token_id in tokenize(word) if word else ():
            biases[token_id] = biases.get(token_id, 0.0) + weight
    return tuple(sorted((id_, bias) for id_, bias in biases.items() if bias != 0.0))


def _words(inputs: Inputs, field: str, card: ModelCard) -> list[tuple[int, ...]]:
    array = inputs.array(field)
    if array is None:
        return []
    name = inputs.kind.input_of(field)
    words = split_words(name, array)
    for token_id in itertools.chain.from_iterable(words):
        if not 0 <= token_id < card.vocab_size:
            raise TokenOutOfVocabularyError(
                f"input '{name}' has the token id {token_id}; those of this model are 0 to "
                f"{card.vocab_size - 1}",
                param=name,
            )
    return words


def split_words(name: str, array: Array) -> list[tuple[int, ...]]:
    """The words of a [2, n] word list: row 0 their token ids, row 1 where each word ends.

    The ends are cumulative and padded with -1; the ids are padded with 0.
    """
    token_ids, ends = array.tolist()
    words = []
    start = 0
    for end in ends:
        if end == -1:
            break
        if not start < end <= len(token_ids):
            raise InvalidTensorError(
                f"input '{name}': row 1 must hold increasing word ends in [1, {len(token_ids)}], "
                f"padded with -1; got {ends}",
                param=name,
            )
        words.append(tuple(token_ids[start:end]))
        start = end
    return words
