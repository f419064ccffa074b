"""Sampling parameters of a request and their limits. The sampler is in `execution`."""

import functools
import itertools
import math
import operator
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from loraplex.core.beam_search import BeamSearch, EarlyStopping
from loraplex.core.errors import InvalidParameterError
from loraplex.core.grammar import Grammar, GrammarKind

MAX_LOGPROBS = 20
MAX_N = 128
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_LENGTH = 4096
MAX_WORDS = 1024
"""Maximum number of stop token sequences, of bad token sequences, and of bad words."""
MAX_WORDS_LENGTH = 65_536
"""Maximum length of all bad words in characters: each is tokenized in three spellings."""
_MAX_BAD_RUNS = 4 * MAX_WORDS
"""The client's own bad token sequences, and three spellings of each bad word."""
MAX_DRAFT_TOKENS = 64
MAX_LOGIT_BIAS = 1e30
"""Maximum absolute bias; a larger one would leave the range of float32."""
_INT32_MAX = 2**31 - 1
_UINT64_MAX = 2**64 - 1


class Range(NamedTuple):
    """Allowed range of a number, including both ends."""

    low: float
    high: float
    is_whole: bool = True
    is_above_low: bool = False
    """Exclude the low end."""
    may_be_absent: bool = False
    """Allow None."""


RANGES: Mapping[str, Range] = MappingProxyType(
    {
        "max_tokens": Range(1, _INT32_MAX, may_be_absent=True),
        "min_tokens": Range(0, _INT32_MAX),
        "n": Range(1, MAX_N),
        "best_of": Range(1, MAX_N),
        "beam_width": Range(1, MAX_N),
        "length_penalty": Range(-10.0, 10.0, is_whole=False),
        "beam_search_diversity_rate": Range(0.0, 100.0, is_whole=False),
        "num_draft_tokens": Range(0, MAX_DRAFT_TOKENS),
        "logprobs": Range(0, MAX_LOGPROBS),
        "prompt_logprobs": Range(0, MAX_LOGPROBS),
        "temperature": Range(0.0, 100.0, is_whole=False),
        "top_k": Range(-1, _INT32_MAX),
        "top_p": Range(0.0, 1.0, is_whole=False, is_above_low=True),
        "top_p_decay": Range(0.0, 1.0, is_whole=False, is_above_low=True),
        "top_p_min": Range(0.0, 1.0, is_whole=False, is_above_low=True),
        "top_p_reset_id": Range(0, _INT32_MAX),
        "min_p": Range(0.0, 1.0, is_whole=False),
        "repetition_penalty": Range(0.0, 100.0, is_whole=False, is_above_low=True),
        "presence_penalty": Range(-2.0, 2.0, is_whole=False),
        "frequency_penalty": Range(-2.0, 2.0, is_whole=False),
        "seed": Range(-(2**63), _UINT64_MAX),
        "no_repeat_ngram_size": Range(0, _INT32_MAX),
    }
)
"""Ranges of the numbers below, by name."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are chosen and when the output ends. The defaults are OpenAI's."""

    max_tokens: int | None = 16
    """Maximum number of new tokens per sequence; None: limited by the model's length only."""
    min_tokens: int = 0
    """Number of new tokens before an end-of-text or stop token may come."""
    n: int = 1
    """Number of sequences to return."""
    best_of: int | None = None
    """Number of sequences to generate; the n with the highest mean log probability are returned.
    None: n."""
    beam: BeamSearch | None = None
    """Beam search; the n best hypotheses are returned."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """0 (or -1) is all tokens."""
    top_p: float = 1.0
    top_p_decay: float = 1.0
    """Factor by which each new token multiplies top_p, down to top_p_min (TensorRT-LLM)."""
    top_p_min: float = 1e-6
    top_p_reset_id: int | None = None
    """Token after which top_p returns to its initial value."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    """Length of token sequences that may not repeat in prompt and output together; 0: any may."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, value added to its logit), each id once, ascending."""
    allowed_token_ids: tuple[int, ...] = ()
    """The only tokens that may be chosen; empty: all."""
    bad_words: tuple[str, ...] = ()
    """Texts that must not occur; serving turns them into bad_token_ids."""
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    """Token sequences that must not occur."""
    grammar: Grammar | None = None
    """Grammar that the output must match."""
    num_draft_tokens: int | None = None
    """Maximum number of draft tokens per step; 0: none; None: the server's setting."""
    seed: int | None = None
    """None: drawn at admission and then fixed, so a replay outputs the same tokens."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stop_token_sequences: tuple[tuple[int, ...], ...] = ()
    """Token sequences that end the output."""
    include_stop_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    """Number of most likely tokens to list with the chosen one; None: no log probabilities."""
    prompt_logprobs: int | None = None
    return_logits: bool = False
    """Return the unprocessed logits of the whole vocabulary for every new token."""
    return_prompt_logits: bool = False
    skip_special_tokens: bool = True

    def validate(self) -> None:
        """Raise InvalidParameterError for the first value out of its range.

        Only values that differ from their defaults are checked: most requests set few.
        """
        values = msgspec.structs.astuple(self)
        differ = map(operator.is_not, values, _DEFAULTS)
        for check, value in itertools.compress(zip(_CHECKS, values, strict=True), differ):
            check(value)
        self._check_together()

    def changed(self, values: Mapping[str, Any]) -> "SamplingParams":
        """Return a copy with other values, by name; only their ranges are checked.

        Raises as `validate`.
        """
        for name, value in values.items():
            default, check = _CHECKED[name]
            if value is not default:
                check(value)
        changed = msgspec.structs.replace(self, **values)
        changed._check_together()
        return changed

    def _check_together(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameterError(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})",
                param="min_tokens",
            )
        if self.best_of is not None:
            _check_number("best_of", Range(self.n, MAX_N), self.best_of)
        if self.beam is not None:
            self._validate_beam(self.beam)

    def _validate_beam(self, beam: BeamSearch) -> None:
        if not isinstance(beam, BeamSearch):
            raise InvalidParameterError(f"beam must be a BeamSearch, got {beam!r}", param="beam")
        _check_number("beam_width", RANGES["beam_width"], beam.width)
        if self.n > beam.width:
            raise InvalidParameterError(
                f"n ({self.n}) must not exceed the beam width ({beam.width})", param="n"
            )
        if self.best_of is not None:
            raise InvalidParameterError("best_of is not for beam search", param="best_of")
        if self.return_logits:
            raise InvalidParameterError(
                "logits of new tokens are not returned with beam search", param="return_logits"
            )
        _check_number("length_penalty", RANGES["length_penalty"], beam.length_penalty)
        _check_number(
            "beam_search_diversity_rate", RANGES["beam_search_diversity_rate"], beam.diversity_rate
        )
        if beam.early_stopping not in tuple(EarlyStopping):
            raise InvalidParameterError(
                f"early_stopping must be one of {', '.join(EarlyStopping)}, got "
                f"{beam.early_stopping!r}",
                param="early_stopping",
            )

    @property
    def num_sequences(self) -> int:
        """Number of sequences that are generated at the same time."""
        if self.beam is not None:
            return self.beam.width
        return self.n if self.best_of is None else self.best_of

    @property
    def is_greedy(self) -> bool:
        return self.temperature < 1e-5 or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


def _check_number(name: str, limits: Range, value: object) -> None:
    low, high, is_whole, is_above_low, may_be_absent = limits
    if value is None and may_be_absent:
        return
    if not isinstance(value, int if is_whole else (int, float)) or isinstance(value, bool):
        kind = "an integer" if is_whole else "a number"
        raise InvalidParameterError(f"{name} must be {kind}, got {value!r}", param=name)
    if not low <= value <= high or (is_above_low and value == low):  # false for NaN
        bracket = "(" if is_above_low else "["
        ends = f"{low}, {high}" if is_whole else f"{low:g}, {high:g}"
        raise InvalidParameterError(f"{name} must be in {bracket}{ends}], got {value}", param=name)


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise InvalidParameterError(f"{name} must be true or false, got {value!r}", param=name)


def _check_with_others(value: object) -> None:
    """Accept a value that `validate` checks against other values."""


def _check_list(name: str, value: object, kind: type, what: str) -> None:
    """Refuse a string, too: as a sequence it would be its characters."""
    if not isinstance(value, tuple | list) or not all(isinstance(item, kind) for item in value):
        raise InvalidParameterError(f"{name} must be a list of {what}, got {value!r}", param=name)


def _check_stop(stop: tuple[str, ...]) -> None:
    _check_texts("stop", "a stop string", stop, MAX_STOP_STRINGS)


def _check_stop_ids(token_ids: tuple[int, ...]) -> None:
    _check_list("stop_token_ids", token_ids, int, "integers")
    if len(token_ids) > MAX_WORDS:
        raise InvalidParameterError(
            f"stop_token_ids has {len(token_ids)} ids; at most {MAX_WORDS} are allowed",
            param="stop_token_ids",
        )


def _check_bad_words(words: tuple[str, ...]) -> None:
    _check_texts("bad_words", "a bad word", words, MAX_WORDS)
    if (length := sum(map(len, words))) > MAX_WORDS_LENGTH:
        raise InvalidParameterError(
            f"bad_words have {length} characters together; at most {MAX_WORDS_LENGTH} are allowed",
            param="bad_words",
        )


def _check_grammar(grammar: Grammar) -> None:
    if not (
        isinstance(grammar, Grammar)
        and isinstance(grammar.kind, GrammarKind)
        and isinstance(grammar.text, str)
    ):
        raise InvalidParameterError(
            f"grammar must be a Grammar of a GrammarKind and a text, got {grammar!r}",
            param="grammar",
        )


def _check_texts(name: str, one: str, texts: tuple[str, ...], most: int) -> None:
    _check_list(name, texts, str, "strings")
    if len(texts) > most:
        raise InvalidParameterError(
            f"{name} has {len(texts)} strings; at most {most} are allowed", param=name
        )
    for text in texts:
        if not 0 < len(text) <= MAX_STOP_STRING_LENGTH:
            raise InvalidParameterError(
                f"{one} must have 1 to {MAX_STOP_STRING_LENGTH} characters, one has {len(text)}",
                param=name,
            )
        if not _is_unicode(text):
            raise InvalidParameterError(
                f"{one} must be valid Unicode, {text!r} has a lone surrogate", param=name
            )


def _check_runs(name: str, runs: tuple[tuple[int, ...], ...], most: int = MAX_WORDS) -> None:
    _check_list(name, runs, tuple, "tuples of token ids")
    if len(runs) > most:
        raise InvalidParameterError(
            f"{name} has {len(runs)} entries; at most {most} are allowed", param=name
        )
    for run in runs:
        if not 0 < len(run) <= MAX_STOP_STRING_LENGTH or not all(type(id_) is int for id_ in run):
            raise InvalidParameterError(
                f"an entry of {name} must be 1 to {MAX_STOP_STRING_LENGTH} token ids", param=name
            )


def _check_logit_bias(pairs: tuple[tuple[int, float], ...]) -> None:
    """Accept minus infinity, which forbids a token."""
    name = "logit_bias"
    _check_list(name, pairs, tuple, "pairs of a token id and a number")
    last = -1
    for pair in pairs:
        if len(pair) != 2:
            raise InvalidParameterError(
                f"{name} must be a list of pairs of a token id and a number, got {pair!r}",
                param=name,
            )
        token_id, bias = pair
        if type(token_id) is not int or token_id <= last:
            raise InvalidParameterError(
                f"{name} must have each token id once, ascending; {token_id!r} comes after {last}",
                param=name,
            )
        last = token_id
        is_number = isinstance(bias, int | float)
        if not is_number or not (bias == -math.inf or abs(bias) <= MAX_LOGIT_BIAS):
            raise InvalidParameterError(
                f"{name}: the bias of token {token_id} must be in [-1e30, 1e30] or minus "
                f"infinity, got {bias!r}",
                param=name,
            )


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


_CHECKS_BY_NAME: Mapping[str, Callable[[Any], None]] = {
    **{name: functools.partial(_check_number, name, limits) for name, limits in RANGES.items()},
    "best_of": _check_with_others,
    "beam": _check_with_others,
    "logit_bias": _check_logit_bias,
    "allowed_token_ids": functools.partial(
        _check_list, "allowed_token_ids", kind=int, what="integers"
    ),
    "bad_words": _check_bad_words,
    "bad_token_ids": functools.partial(_check_runs, "bad_token_ids", most=_MAX_BAD_RUNS),
    "grammar": _check_grammar,
    "stop": _check_stop,
    "stop_token_ids": _check_stop_ids,
    "stop_token_sequences": functools.partial(_check_runs, "stop_token_sequences"),
    "include_stop_in_output": functools.partial(_check_flag, "include_stop_in_output"),
    "ignore_eos": functools.partial(_check_flag, "ignore_eos"),
    "return_logits": functools.partial(_check_flag, "return_logits"),
    "return_prompt_logits": functools.partial(_check_flag, "return_prompt_logits"),
    "skip_special_tokens": functools.partial(_check_flag, "skip_special_tokens"),
}
_FIELDS = msgspec.structs.fields(SamplingParams)
_DEFAULTS = tuple(field.default for field in _FIELDS)
_CHECKS = tuple(_CHECKS_BY_NAME[field.name] for field in _FIELDS)
_CHECKED = {field.name: (field.default, _CHECKS_BY_NAME[field.name]) for field in _FIELDS}
