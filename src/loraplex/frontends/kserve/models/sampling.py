"""The inputs of one element -> SamplingParams. Pure.

Where an input is missing, the defaults are those of TensorRT-LLM's runtime: without top_k and
top_p the choice is greedy, the seed is 0, the end token cannot be the first token (min_tokens 1);
beams have a length penalty of 0 and end as soon as there are enough of them. A value that
SamplingParams refuses is reported under the name of its tensor.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from loraplex.core.beam_search import BeamSearch, EarlyStopping
from loraplex.core.errors import InvalidParameterError, InvalidTensorError
from loraplex.core.sampling_params import SamplingParams
from loraplex.frontends.field_names import as_sent
from loraplex.frontends.kserve.models.guided import GUIDE_FIELDS, grammar_of
from loraplex.frontends.kserve.models.inputs import Inputs
from loraplex.frontends.kserve.models.words import Tokenize, bad_words, logit_bias, stop_words
from loraplex.serving.backend import ModelCard

_NO_RESET_ID = -1
_LOOKAHEAD = ("lookahead_window_size", "lookahead_ngram_size", "lookahead_verification_set_size")

_SCALARS: Final[Mapping[str, tuple[str, Callable[[Any], Any]]]] = {
    "max_tokens": ("max_tokens", int),
    "min_tokens": ("min_tokens", int),
    "temperature": ("temperature", float),
    "top_p_decay": ("top_p_decay", float),
    "top_p_min": ("top_p_min", float),
    "repetition_penalty": ("repetition_penalty", float),
    "presence_penalty": ("presence_penalty", float),
    "frequency_penalty": ("frequency_penalty", float),
    "no_repeat_ngram_size": ("no_repeat_ngram_size", int),
    "seed": ("seed", int),
    "n": ("n", int),
    "return_generation_logits": ("return_logits", bool),
    "return_context_logits": ("return_prompt_logits", bool),
}
"""Fields whose one value is a sampling parameter as it is: its name and type there."""

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
    for field in inputs:
        if (scalar := _SCALARS.get(field)) is not None:
            name, kind = scalar
            if (value := inputs.first(field)) is not None:
                values[name] = kind(value)
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
    top_k, top_p = inputs.integer("top_k", 0), inputs.number("top_p", 0.0)
    reset_id = inputs.integer("top_p_reset_id", _NO_RESET_ID)
    return {
        "top_k": 1 if top_k == 0 and top_p <= 0.0 else top_k,
        "top_p": 1.0 if top_p <= 0.0 else top_p,
        "top_p_reset_id": None if reset_id == _NO_RESET_ID else reset_id,
    }


def _log_probs(fields: _Fields) -> dict[str, Any]:
    return {"logprobs": 0 if fields.inputs.flag("returns_log_probs") else None}


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
    width = inputs.integer("beam_width", 1)
    if width == 1:
        return {}
    stops_early = inputs.flag("early_stopping") if "early_stopping" in inputs else True
    beam = BeamSearch(
        width=width,
        length_penalty=inputs.number("length_penalty", 0.0),
        diversity_rate=inputs.number("beam_search_diversity_rate", 0.0),
        early_stopping=EarlyStopping.AT_ONCE if stops_early else EarlyStopping.WHEN_UNLIKELY,
    )
    return {"n": inputs.integer("n", max(width, 1)), "beam": beam}


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
        if inputs.integer(name, 0) < 1:
            raise InvalidTensorError(
                f"input '{name}' is {inputs.integer(name, 0)}; it must be at least 1", param=name
            )
    return {"num_draft_tokens": inputs.integer("lookahead_ngram_size", 1) - 1}


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
