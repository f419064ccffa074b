"""What a client may ask of the sampler. Pure data and its limits; the sampler is in execution."""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from loraplex.core.beam_search import BeamSearch, EarlyStopping
from loraplex.core.errors import InvalidParameterError
from loraplex.core.grammar import Grammar, GrammarKind

MAX_LOGPROBS = 20
MAX_N = 128
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_LENGTH = 4096
MAX_WORDS = 1024
"""Runs of tokens that end the output, or that are not to come; and texts that are not to come."""
MAX_WORDS_LENGTH = 65_536
"""Characters of all bad words: each is tokenized in three spellings."""
_MAX_BAD_RUNS = 4 * MAX_WORDS
"""A client's own, and the spellings of its words."""
MAX_DRAFT_TOKENS = 64
MAX_LOGIT_BIAS = 1e30
"""Either way; more is no float32."""
_INT32_MAX = 2**31 - 1
_UINT64_MAX = 2**64 - 1


class Range(NamedTuple):
    """Of a number; ends are in it."""

    low: float
    high: float
    is_whole: bool = True
    is_above_low: bool = False
    """The low end is not in it."""


RANGES: Mapping[str, Range] = MappingProxyType(
    {
        "max_tokens": Range(1, _INT32_MAX),
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
"""By name, of the numbers below."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to choose and when to stop. The defaults are OpenAI's: temperature 1, all tokens."""

    max_tokens: int | None = 16
    """New tokens per sequence; None: as many as the model's length allows."""
    min_tokens: int = 0
    """No end-of-text or stop token before this many new tokens."""
    n: int = 1
    """Sequences that come back."""
    best_of: int | None = None
    """Sequences that are made; the n with the highest mean log probability come back. None: n."""
    beam: BeamSearch | None = None
    """Beam search; the n best hypotheses come back."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """0 (or -1) is all tokens."""
    top_p: float = 1.0
    top_p_decay: float = 1.0
    """Each new token multiplies top_p with this, down to top_p_min (TensorRT-LLM)."""
    top_p_min: float = 1e-6
    top_p_reset_id: int | None = None
    """After this token, top_p is again what it was at first."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    """No run of so many tokens comes twice, in prompt and output together; 0: it may."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit), each id once, ascending."""
    allowed_token_ids: tuple[int, ...] = ()
    """Only these are chosen; empty: all may be."""
    bad_words: tuple[str, ...] = ()
    """Texts that are not to come; admission makes them bad_token_ids."""
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    """Runs of tokens that are not to come."""
    grammar: Grammar | None = None
    """What the output must match."""
    num_draft_tokens: int | None = None
    """Guessed ahead at most, from what the text repeats; 0: none; None: the server's setting."""
    seed: int | None = None
    """None: drawn at admission and then fixed, so a replay gives the same tokens."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stop_token_sequences: tuple[tuple[int, ...], ...] = ()
    """Runs of tokens that end the output."""
    include_stop_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    """None: none; 0: of the chosen token; k: also of the k most likely."""
    prompt_logprobs: int | None = None
    return_logits: bool = False
    """Of every new token: the whole vocabulary's, before anything is done to them."""
    return_prompt_logits: bool = False
    skip_special_tokens: bool = True

    def validate(self) -> None:
        """Raise InvalidParameterError for the first value out of its range."""
        if self.max_tokens is not None:
            _check("max_tokens", self.max_tokens)
        _check("min_tokens", self.min_tokens)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameterError(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})",
                param="min_tokens",
            )
        self._validate_counts()
        self._validate_draws()
        self._validate_flags()
        self._validate_stops()
        self._validate_bans()

    def _validate_counts(self) -> None:
        _check("n", self.n)
        if self.best_of is not None:
            _check_int("best_of", self.best_of, self.n, MAX_N)
        if self.beam is not None:
            self._validate_beam(self.beam)
        if self.num_draft_tokens is not None:
            _check("num_draft_tokens", self.num_draft_tokens)
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None:
                _check(name, count)

    def _validate_beam(self, beam: BeamSearch) -> None:
        if not isinstance(beam, BeamSearch):
            raise InvalidParameterError(f"beam must be a BeamSearch, got {beam!r}", param="beam")
        _check("beam_width", beam.width)
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
        _check("length_penalty", beam.length_penalty)
        _check("beam_search_diversity_rate", beam.diversity_rate)
        if beam.early_stopping not in tuple(EarlyStopping):
            raise InvalidParameterError(
                f"early_stopping must be one of {', '.join(EarlyStopping)}, got "
                f"{beam.early_stopping!r}",
                param="early_stopping",
            )

    def _validate_draws(self) -> None:
        _check("temperature", self.temperature)
        _check("top_k", self.top_k)
        _check("top_p", self.top_p)
        _check("top_p_decay", self.top_p_decay)
        _check("top_p_min", self.top_p_min)
        if self.top_p_reset_id is not None:
            _check("top_p_reset_id", self.top_p_reset_id)
        _check("min_p", self.min_p)
        _check("repetition_penalty", self.repetition_penalty)
        _check("presence_penalty", self.presence_penalty)
        _check("frequency_penalty", self.frequency_penalty)
        if self.seed is not None:
            _check("seed", self.seed)

    def _validate_flags(self) -> None:
        for name, flag in (
            ("include_stop_in_output", self.include_stop_in_output),
            ("ignore_eos", self.ignore_eos),
            ("return_logits", self.return_logits),
            ("return_prompt_logits", self.return_prompt_logits),
            ("skip_special_tokens", self.skip_special_tokens),
        ):
            if not isinstance(flag, bool):
                raise InvalidParameterError(
                    f"{name} must be true or false, got {flag!r}", param=name
                )

    def _validate_stops(self) -> None:
        _check_texts("stop", "a stop string", self.stop, MAX_STOP_STRINGS)
        _check_list("stop_token_ids", self.stop_token_ids, int, "integers")
        if len(self.stop_token_ids) > MAX_WORDS:
            raise InvalidParameterError(
                f"stop_token_ids has {len(self.stop_token_ids)} ids; at most {MAX_WORDS} are "
                "allowed",
                param="stop_token_ids",
            )
        _check_runs("stop_token_sequences", self.stop_token_sequences)

    def _validate_bans(self) -> None:
        _check("no_repeat_ngram_size", self.no_repeat_ngram_size)
        _check_texts("bad_words", "a bad word", self.bad_words, MAX_WORDS)
        if (length := sum(map(len, self.bad_words))) > MAX_WORDS_LENGTH:
            raise InvalidParameterError(
                f"bad_words have {length} characters together; at most {MAX_WORDS_LENGTH} are "
                "allowed",
                param="bad_words",
            )
        _check_runs("bad_token_ids", self.bad_token_ids, _MAX_BAD_RUNS)
        _check_list("allowed_token_ids", self.allowed_token_ids, int, "integers")
        _check_logit_bias(self.logit_bias)
        grammar = self.grammar
        if grammar is None:
            return
        if not (
            isinstance(grammar, Grammar)
            and isinstance(grammar.kind, GrammarKind)
            and isinstance(grammar.text, str)
        ):
            raise InvalidParameterError(
                f"grammar must be a Grammar of a GrammarKind and a text, got {grammar!r}",
                param="grammar",
            )

    @property
    def num_sequences(self) -> int:
        """How many are made at the same time."""
        if self.beam is not None:
            return self.beam.width
        return self.n if self.best_of is None else self.best_of

    @property
    def num_told(self) -> int:
        """Of how many the engine tells: of a search only the hypotheses that come back."""
        return self.n if self.beam is not None else self.num_sequences

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


def _check(name: str, value: object) -> None:
    low, high, is_whole, is_above_low = RANGES[name]
    if is_whole:
        _check_int(name, value, int(low), int(high))
    else:
        _check_float(name, value, low, high, open_low=is_above_low)


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidParameterError(f"{name} must be an integer, got {value!r}", param=name)
    if not low <= value <= high:
        raise InvalidParameterError(f"{name} must be in [{low}, {high}], got {value}", param=name)


def _check_float(
    name: str, value: object, low: float, high: float, *, open_low: bool = False
) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise InvalidParameterError(f"{name} must be a number, got {value!r}", param=name)
    if not low <= value <= high or (open_low and value == low):  # false for NaN
        bracket = "(" if open_low else "["
        raise InvalidParameterError(
            f"{name} must be in {bracket}{low:g}, {high:g}], got {value}", param=name
        )


def _check_list(name: str, value: object, kind: type, what: str) -> None:
    """A string is refused, too: as a sequence it would be its characters."""
    if not isinstance(value, tuple | list) or not all(isinstance(item, kind) for item in value):
        raise InvalidParameterError(f"{name} must be a list of {what}, got {value!r}", param=name)


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
    """Minus infinity is taken: it forbids a token."""
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
