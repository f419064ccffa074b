"""Conversion of a request body of `schema` to SamplingParams: pure functions.

Where fields come from several systems, the newest name of each is taken: OpenAI's, vLLM's,
llgtrt's and TensorRT-LLM's.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from loraplex.core.beam_search import BeamSearch, EarlyStopping
from loraplex.core.errors import (
    InvalidParameterError,
    TokenOutOfVocabularyError,
)
from loraplex.core.sampling_params import MAX_LOGPROBS, SamplingParams
from loraplex.frontends.field_names import named_as_sent
from loraplex.frontends.openai.schema import (
    ChatBody,
    CompletionBody,
    GenerationBody,
    SamplingBody,
)
from loraplex.frontends.openai.structured import grammar_of
from loraplex.frontends.openai.synonyms import sent_names, value_of

MAX_LOGIT_BIAS = 100.0
"""Either way, as OpenAI has it: it is as good as a ban."""

_SAMPLING_FIELDS = {
    "min_tokens": "min_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_p_decay": "top_p_decay",
    "top_p_min": "top_p_min",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "no_repeat_ngram_size": "no_repeat_ngram_size",
    "num_draft_tokens": "num_draft_tokens",
    "seed": "seed",
    "include_stop_str_in_output": "include_stop_in_output",
    "ignore_eos": "ignore_eos",
    "skip_special_tokens": "skip_special_tokens",
}
"""Name on the wire: name in SamplingParams. A null keeps the default."""

_NO_BEAMS: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "beam_width": (1,),
        "length_penalty": (1.0,),
        "early_stopping": (False,),
        "beam_search_diversity_rate": (0.0,),
    }
)
"""Neutral values of beam search fields."""


def completion_sampling(body: CompletionBody, vocab_size: int) -> SamplingParams:
    if body.max_tokens == 0:
        raise InvalidParameterError(
            "max_tokens must be at least 1; to score a prompt, request 1 token with echo and "
            "logprobs",
            param="max_tokens",
        )
    fields: dict[str, Any] = {"logprobs": body.logprobs}
    if body.max_tokens is not None:
        fields["max_tokens"] = body.max_tokens
    fields["prompt_logprobs"] = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        fields["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    return sampling_params(body, fields | _sequences(body), vocab_size)


def chat_sampling(body: ChatBody, vocab_size: int) -> SamplingParams:
    fields: dict[str, Any] = {
        "max_tokens": body.max_tokens,
        "prompt_logprobs": body.prompt_logprobs,
    }
    if body.max_completion_tokens is not None:
        fields["max_tokens"] = body.max_completion_tokens
    num_top = body.top_logprobs or 0
    if not 0 <= num_top <= MAX_LOGPROBS:
        raise InvalidParameterError(
            f"top_logprobs must be in [0, {MAX_LOGPROBS}], got {num_top}", param="top_logprobs"
        )
    if body.logprobs:
        fields["logprobs"] = num_top
    elif num_top:
        raise InvalidParameterError("top_logprobs needs logprobs: true", param="top_logprobs")
    return sampling_params(body, fields | _sequences(body), vocab_size)


def sampling_params(body: SamplingBody, fields: dict[str, Any], vocab_size: int) -> SamplingParams:
    """Make SamplingParams of the common fields, and of `fields` that only this body has."""
    given = {name: value_of(body, wire_name) for wire_name, name in _SAMPLING_FIELDS.items()}
    fields |= {name: value for name, value in given.items() if value is not None}
    if body.top_p_reset_ids not in (None, -1):  # TensorRT-LLM's -1 is no token
        fields["top_p_reset_id"] = body.top_p_reset_ids
    sampling = SamplingParams(
        stop=_texts(body.stop),
        stop_token_ids=_token_ids("stop_token_ids", body.stop_token_ids, vocab_size),
        bad_words=_texts(body.bad_words),
        allowed_token_ids=_allowed(body.allowed_token_ids, vocab_size),
        logit_bias=_logit_bias(body.logit_bias or {}, vocab_size),
        grammar=grammar_of(body),
        **fields,
    )
    with named_as_sent(sent_names(body)):
        sampling.validate()
    return sampling


def _sequences(body: GenerationBody) -> dict[str, Any]:
    """Number of outputs to generate, how, and how many of them are returned."""
    n = 1 if body.n is None else body.n
    if body.use_beam_search:
        return {"n": n, **_beams(body, n)}
    for name, harmless in _NO_BEAMS.items():
        if getattr(body, name) not in (None, *harmless):
            raise InvalidParameterError(f"{name} needs use_beam_search: true", param=name)
    return {"n": n, "best_of": None if body.best_of == n else body.best_of}


def _beams(body: GenerationBody, n: int) -> dict[str, Any]:
    width = body.beam_width if body.beam_width is not None else body.best_of
    if body.best_of not in (None, width):
        raise InvalidParameterError(
            f"beam_width ({width}) and best_of ({body.best_of}) are both the number of beams; "
            "give one of them",
            param="best_of",
        )
    fields: dict[str, Any] = {
        "length_penalty": body.length_penalty,
        "diversity_rate": body.beam_search_diversity_rate,
        "early_stopping": _EARLY_STOPPING.get(body.early_stopping),
    }
    given = {name: value for name, value in fields.items() if value is not None}
    return {"beam": BeamSearch(width=n if width is None else width, **given)}


_EARLY_STOPPING = {
    True: EarlyStopping.AT_ONCE,
    False: EarlyStopping.WHEN_UNLIKELY,
    "never": EarlyStopping.NEVER,
}


def _texts(value: str | Sequence[str] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(value)


def _token_ids(name: str, token_ids: Sequence[int] | None, vocab_size: int) -> tuple[int, ...]:
    for token_id in token_ids or ():
        if not 0 <= token_id < vocab_size:
            raise TokenOutOfVocabularyError(
                f"{name} has {token_id}; token ids of this model are 0 to {vocab_size - 1}",
                param=name,
            )
    return tuple(token_ids or ())


def _allowed(token_ids: Sequence[int] | None, vocab_size: int) -> tuple[int, ...]:
    if token_ids is not None and not token_ids:
        raise InvalidParameterError(
            "allowed_token_ids is an empty list: it would allow nothing", param="allowed_token_ids"
        )
    return tuple(sorted(set(_token_ids("allowed_token_ids", token_ids, vocab_size))))


def _logit_bias(biases: dict[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    pairs: dict[int, float] = {}
    for text, bias in biases.items():
        token_id = int(text) if len(text) < 20 and text.isascii() and text.isdecimal() else -1
        if not 0 <= token_id < vocab_size:
            raise TokenOutOfVocabularyError(
                f"logit_bias has the key {text!r}; keys are the token ids 0 to {vocab_size - 1}",
                param="logit_bias",
            )
        if not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:
            raise InvalidParameterError(
                f"logit_bias: the bias of token {token_id} must be in [{-MAX_LOGIT_BIAS:g}, "
                f"{MAX_LOGIT_BIAS:g}], got {bias}",
                param="logit_bias",
            )
        pairs[token_id] = float(bias)
    return tuple(sorted(pairs.items()))
