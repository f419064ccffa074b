"""The inputs of one element, words and grammars among them -> SamplingParams. Pure.

Where an input is missing, the defaults are those of TensorRT-LLM's runtime: without top_k and
top_p the choice is greedy, the seed is 0, the end token cannot be the first token (min_tokens 1);
beams have a length penalty of 0 and end as soon as there are enough of them. A value that
SamplingParams refuses is reported under the name of its tensor.
"""

import functools
import itertools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from loraplex.core.beam_search import BeamSearch, EarlyStopping
from loraplex.core.errors import (
    InvalidParameterError,
    InvalidTensorError,
    TokenOutOfVocabularyError,
)
from loraplex.core.grammar import Grammar, GrammarKind
from loraplex.core.sampling_params import SamplingParams
from loraplex.frontends.field_names import as_sent
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
    return StopWords(sequences=tuple(_token_words(inputs, "stop_words", card)))


def bad_words(inputs: Inputs, card: ModelCard) -> dict[str, Any]:
    """The field of SamplingParams that forbids them."""
    if inputs.kind.takes_text:
        return {"bad_words": tuple(text for text in inputs.texts("bad_words") if text)}
    return {"bad_token_ids": tuple(_token_words(inputs, "bad_words", card))}


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


def _token_words(inputs: Inputs, field: str, card: ModelCard) -> list[tuple[int, ...]]:
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


_TYPE: Final = "guided_decoding_guide_type"
_GUIDE: Final = "guided_decoding_guide"
GUIDE_FIELDS: Final = (_TYPE, _GUIDE)
_ANY_JSON: Final = Grammar(GrammarKind.JSON_SCHEMA, "{}")

_KINDS: Final[Mapping[str, GrammarKind]] = MappingProxyType(
    {
        "json_schema": GrammarKind.JSON_SCHEMA,
        "regex": GrammarKind.REGEX,
        "ebnf_grammar": GrammarKind.EBNF,
        "lark_grammar": GrammarKind.LARK,
        "choice": GrammarKind.CHOICE,
    }
)
"""The last two are ours; `json` is any JSON and needs no guide."""


def grammar_of(inputs: Inputs) -> Grammar | None:
    """Raises InvalidTensorError for half of the pair, or an unknown type."""
    kind, guide = _one(inputs, _TYPE), _one(inputs, _GUIDE)
    if not kind:
        if guide:
            raise InvalidTensorError(
                f"input '{_GUIDE}' needs '{_TYPE}': json, {', '.join(_KINDS)}", param=_TYPE
            )
        return None
    if kind == "json":
        return _ANY_JSON
    if kind not in _KINDS:
        raise InvalidTensorError(
            f"input '{_TYPE}' is {kind!r}; it must be one of json, {', '.join(_KINDS)}",
            param=_TYPE,
        )
    if not guide:
        raise InvalidTensorError(
            f"input '{_TYPE}' {kind!r} needs the guide itself in '{_GUIDE}'", param=_GUIDE
        )
    return Grammar(_KINDS[kind], guide)


def _one(inputs: Inputs, field: str) -> str:
    return next(iter(inputs.texts(field)), "")


_NO_RESET_ID = -1
_LOOKAHEAD = ("lookahead_window_size", "lookahead_ngram_size", "lookahead_verification_set_size")

_SCALARS: Final[Mapping[str, str]] = {
    name: name
    for name in (
        *("max_tokens", "min_tokens", "temperature", "top_p_decay", "top_p_min"),
        *("repetition_penalty", "presence_penalty", "frequency_penalty", "no_repeat_ngram_size"),
        *("seed", "n"),
    )
} | {
    "return_generation_logits": "return_logits",
    "return_context_logits": "return_prompt_logits",
}
"""Fields whose one value is a sampling parameter as it is: its name there."""

_FIELDS = {
    "stop": "stop_words",
    "stop_token_sequences": "stop_words",
    "bad_token_ids": "bad_words",
    "logit_bias": "embedding_bias",
    "return_logits": "return_generation_logits",
}
"""Where SamplingParams has another word for one of our fields."""


def sampling_params(
    inputs: Inputs,
    card: ModelCard,
    end_id: int | None,
    tokenize: Tokenize,
    *,
    skip_special_tokens: bool = True,
) -> SamplingParams:
    """Only what was sent is read. Raises InvalidTensorError and InvalidParameterError."""
    values: dict[str, Any] = {"max_tokens": 0}
    groups: dict[_Group, None] = {}
    for field in inputs.tensors:
        if (name := _SCALARS.get(field)) is not None:
            if (value := inputs.first(field)) is not None:
                values[name] = value
        elif (group := _GROUPS.get(field)) is not None:
            groups[group] = None
    for group in groups:
        values |= group(_Fields(inputs, card, tokenize))
    ends_at_eos = end_id is not None and end_id == card.eos_token_id
    if end_id is not None and not ends_at_eos:
        values["stop_token_ids"] = (end_id,)
    try:
        return _defaults(not ends_at_eos, skip_special_tokens).changed(values)
    except InvalidParameterError as error:
        parameter = error.param or ""
        name = inputs.kind.input_of(_FIELDS.get(parameter, parameter))
        message = as_sent(error, {parameter: name}).message
        raise InvalidParameterError(f"input '{name}': {message}", param=name) from None


@functools.cache
def _defaults(ignore_eos: bool, skip_special_tokens: bool) -> SamplingParams:
    """Defaults of TensorRT-LLM's runtime, which has none for max_tokens."""
    return SamplingParams(
        min_tokens=1,
        top_k=1,
        seed=0,
        ignore_eos=ignore_eos,
        skip_special_tokens=skip_special_tokens,
    )


class _Fields(NamedTuple):
    inputs: Inputs
    card: ModelCard
    tokenize: Tokenize


def _choice(fields: _Fields) -> dict[str, Any]:
    """Greedy unless top_k or top_p is given."""
    inputs = fields.inputs
    top_k, top_p = inputs.first("top_k", 0), inputs.first("top_p", 0.0)
    reset_id = inputs.first("top_p_reset_id", _NO_RESET_ID)
    return {
        "top_k": 1 if top_k == 0 and top_p <= 0.0 else top_k,
        "top_p": 1.0 if top_p <= 0.0 else top_p,
        "top_p_reset_id": None if reset_id == _NO_RESET_ID else reset_id,
    }


def _log_probs(fields: _Fields) -> dict[str, Any]:
    return {"logprobs": 0 if fields.inputs.first("returns_log_probs") else None}


def _words(fields: _Fields) -> dict[str, Any]:
    stop = stop_words(fields.inputs, fields.card)
    return {
        "stop": stop.texts,
        "stop_token_sequences": stop.sequences,
        "include_stop_in_output": stop.has_any,
        "logit_bias": logit_bias(fields.inputs, fields.card, fields.tokenize),
        **bad_words(fields.inputs, fields.card),
    }


def _grammar(fields: _Fields) -> dict[str, Any]:
    return {"grammar": grammar_of(fields.inputs)}


def _beam(fields: _Fields) -> dict[str, Any]:
    """All beams are returned unless num_return_sequences limits them."""
    inputs = fields.inputs
    width = inputs.first("beam_width", 1)
    if width == 1:
        return {}
    stops_early = inputs.first("early_stopping", default="early_stopping" not in inputs.tensors)
    beam = BeamSearch(
        width=width,
        length_penalty=inputs.first("length_penalty", 0.0),
        diversity_rate=inputs.first("beam_search_diversity_rate", 0.0),
        early_stopping=EarlyStopping.AT_ONCE if stops_early else EarlyStopping.WHEN_UNLIKELY,
    )
    return {"n": inputs.first("n", max(width, 1)), "beam": beam}


def _draft_tokens(fields: _Fields) -> dict[str, Any]:
    """Draft tokens: the client's number, or that of lookahead's n-grams (all but the first).

    TensorRT-LLM drafts by Jacobi iteration, loraplex by prompt lookup: neither changes a token.
    """
    inputs = fields.inputs
    sent = [name for name in _LOOKAHEAD if inputs.array(name) is not None]
    if not sent:
        return {"num_draft_tokens": inputs.first("num_draft_tokens")}
    if len(sent) < len(_LOOKAHEAD):
        missing = next(name for name in _LOOKAHEAD if name not in sent)
        raise InvalidTensorError(
            f"lookahead decoding needs all of {', '.join(_LOOKAHEAD)}; input '{missing}' is "
            "missing",
            param=missing,
        )
    for name in _LOOKAHEAD:
        if inputs.first(name, 0) < 1:
            raise InvalidTensorError(
                f"input '{name}' is {inputs.first(name, 0)}; it must be at least 1", param=name
            )
    return {"num_draft_tokens": inputs.first("lookahead_ngram_size", 1) - 1}


_Group = Callable[[_Fields], dict[str, Any]]

_GROUPS: Final[Mapping[str, _Group]] = {
    **dict.fromkeys(("top_k", "top_p", "top_p_reset_id"), _choice),
    "returns_log_probs": _log_probs,
    **dict.fromkeys(
        (
            *("stop_words", "bad_words"),
            *("embedding_bias", "embedding_bias_words", "embedding_bias_weights"),
        ),
        _words,
    ),
    **dict.fromkeys(GUIDE_FIELDS, _grammar),
    "beam_width": _beam,
    **dict.fromkeys((*_LOOKAHEAD, "num_draft_tokens"), _draft_tokens),
}
"""Fields that make sampling parameters together, or otherwise than by their value alone."""
