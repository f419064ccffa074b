"""Conversion of a request body of `schema` to SamplingParams: pure functions.

`FIELDS` is the table of the common fields. Only those that a client sent are converted.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from loraplex.core.adapter import LoadPolicy
from loraplex.core.beam_search import BeamSearch, EarlyStopping
from loraplex.core.errors import (
    InvalidParameterError,
    TokenOutOfVocabularyError,
)
from loraplex.core.sampling_params import MAX_LOGPROBS, SamplingParams
from loraplex.frontends.openai.schema import (
    ChatBody,
    CompletionBody,
    GenerationBody,
    SamplingBody,
)
from loraplex.frontends.openai.structured import CONSTRAINTS, constraint_field, grammar_of

MAX_LOGIT_BIAS = 100.0
"""Either way, as OpenAI has it: it is as good as a ban."""

_NO_BEAMS: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "beam_width": (1,),
        "length_penalty": (1.0,),
        "early_stopping": (False,),
        "beam_search_diversity_rate": (0.0,),
    }
)
"""Neutral values of beam search fields."""
_SEQUENCES: Final = frozenset({"n", "best_of", "use_beam_search", *_NO_BEAMS})


CHAT_SAMPLING: Final = SamplingParams(max_tokens=None)
"""Sampling of a chat whose body sets nothing."""
COMPARE_SAMPLING: Final = SamplingParams(temperature=0.0)
"""Sampling of a comparison: greedy, so that only the adapters differ."""


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
    if not body.model_fields_set.isdisjoint(_SEQUENCES):
        fields |= _sequences(body)
    return sampling_params(body, fields, vocab_size)


def chat_sampling(body: ChatBody, vocab_size: int) -> SamplingParams:
    fields: dict[str, Any] = {
        "max_tokens": CHAT_SAMPLING.max_tokens if body.max_tokens is None else body.max_tokens,
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
    if not body.model_fields_set.isdisjoint(_SEQUENCES):
        fields |= _sequences(body)
    return sampling_params(body, fields, vocab_size)


def sampling_params(body: SamplingBody, fields: dict[str, Any], vocab_size: int) -> SamplingParams:
    """Make SamplingParams of the common fields, and of `fields` that only this body has."""
    sent = body.model_fields_set
    for field in FIELDS:
        if field.name in sent or field.synonym in sent:
            value = value_of(body, field.name) if field.synonym else getattr(body, field.name)
            if value is not None:
                fields[field.parameter] = (
                    value if field.read is None else field.read(field.name, value, vocab_size)
                )
    if not sent.isdisjoint(CONSTRAINTS):
        fields["grammar"] = grammar_of(body)
    return SamplingParams(**fields)


def value_of(body: SamplingBody, field: str) -> Any:
    """Value of the field or of its synonym; None if neither is given.

    Raises InvalidParameterError if they differ.
    """
    value, other_name = getattr(body, field), SYNONYMS[field]
    other = getattr(body, other_name)
    if value is not None and other is not None and value != other:
        raise InvalidParameterError(
            f"{field} and {other_name} mean the same, and are {value!r} and {other!r}; "
            "give one of them",
            param=other_name,
        )
    return other if value is None else value


def sent_names(body: SamplingBody) -> Mapping[str, str]:
    """Return the fields of this body by the names of our parameters, for errors."""
    names = {"top_p_reset_id": "top_p_reset_ids"}
    if field := constraint_field(body):
        names["grammar"] = field
    if getattr(body, "max_completion_tokens", None) is not None:
        names["max_tokens"] = "max_completion_tokens"
    return names


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


def _texts(_name: str, value: str | Sequence[str], _vocab_size: int) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _token_ids(name: str, token_ids: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise TokenOutOfVocabularyError(
                f"{name} has {token_id}; token ids of this model are 0 to {vocab_size - 1}",
                param=name,
            )
    return tuple(token_ids)


def _allowed(name: str, token_ids: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    if not token_ids:
        raise InvalidParameterError(f"{name} is an empty list: it would allow nothing", param=name)
    return tuple(sorted(set(_token_ids(name, token_ids, vocab_size))))


def _reset_id(_name: str, token_id: int, _vocab_size: int) -> int | None:
    """TensorRT-LLM's -1 is no token."""
    return None if token_id == -1 else token_id


def _logit_bias(
    name: str, biases: Mapping[str, float], vocab_size: int
) -> tuple[tuple[int, float], ...]:
    pairs: dict[int, float] = {}
    for text, bias in biases.items():
        token_id = int(text) if len(text) < 20 and text.isascii() and text.isdecimal() else -1
        if not 0 <= token_id < vocab_size:
            raise TokenOutOfVocabularyError(
                f"{name} has the key {text!r}; keys are the token ids 0 to {vocab_size - 1}",
                param=name,
            )
        if not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:
            raise InvalidParameterError(
                f"{name}: the bias of token {token_id} must be in [{-MAX_LOGIT_BIAS:g}, "
                f"{MAX_LOGIT_BIAS:g}], got {bias}",
                param=name,
            )
        pairs[token_id] = float(bias)
    return tuple(sorted(pairs.items()))


class SamplingField(NamedTuple):
    """A field of bodies that gives one parameter of SamplingParams. A null keeps the default."""

    name: str
    """Its name on the wire: the newest of those that several servers have."""
    parameter: str
    read: Callable[[str, Any, int], Any] | None = None
    """Function from the name, the value and the size of the vocabulary to the parameter's value;
    None: they are equal."""
    synonym: str = ""
    """LoRAX's or SGLang's name of the same field."""


FIELDS: Final = (
    *(
        SamplingField(name, name)
        for name in (
            *("min_tokens", "temperature", "top_p", "top_p_decay", "top_p_min", "top_k", "min_p"),
            *("repetition_penalty", "presence_penalty", "frequency_penalty"),
            *("no_repeat_ngram_size", "num_draft_tokens", "seed", "skip_special_tokens"),
        )
    ),
    SamplingField("include_stop_str_in_output", "include_stop_in_output", synonym="no_stop_trim"),
    SamplingField("ignore_eos", "ignore_eos", synonym="ignore_eos_token"),
    SamplingField("top_p_reset_ids", "top_p_reset_id", _reset_id),
    SamplingField("stop", "stop", _texts),
    SamplingField("stop_token_ids", "stop_token_ids", _token_ids),
    SamplingField("bad_words", "bad_words", _texts),
    SamplingField("allowed_token_ids", "allowed_token_ids", _allowed),
    SamplingField("logit_bias", "logit_bias", _logit_bias),
)

SYNONYMS: Final[Mapping[str, str]] = MappingProxyType(
    {field.name: field.synonym for field in FIELDS if field.synonym} | {"request_id": "rid"}
)
"""Our name (vLLM's): the other one (LoRAX's or SGLang's)."""


def default_fields(
    sampling: SamplingParams, *, add_special_tokens: bool | None = None
) -> dict[str, Any]:
    """Return the default of each common field by its name on the wire, for a route that begins with
    these parameters. None: nothing is applied, or the value depends on the request or a setting."""
    parameters = {"max_tokens": "max_tokens"} | {field.name: field.parameter for field in FIELDS}
    values = {name: getattr(sampling, parameter) for name, parameter in parameters.items()}
    return {name: None if value == () else value for name, value in values.items()} | {
        "add_special_tokens": add_special_tokens,
        "load_lora_weights": LoadPolicy.AUTO.value,
        "priority": 0,
        "timeout_seconds": None,
    }
