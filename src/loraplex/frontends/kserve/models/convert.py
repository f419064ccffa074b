"""Conversion of one element of a batch to a GenerateRequest and the form of its outputs. Pure.

Where an input is missing, the defaults are those of TensorRT-LLM's runtime: without top_k and
top_p the choice is greedy, the seed is 0, the end token cannot be the first token (min_tokens 1);
beams have a length penalty of 0 and end as soon as there are enough of them. A value that
SamplingParams refuses is reported under the name of its tensor.
"""

import functools
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import msgspec

from loraplex.adapters.staging import RequestTensor
from loraplex.core.adapter import AdapterChoice, ByTaskId
from loraplex.core.beam_search import BeamSearch, EarlyStopping
from loraplex.core.errors import (
    InvalidParameterError,
    InvalidTensorError,
    TokenOutOfVocabularyError,
)
from loraplex.core.grammar import Grammar, GrammarKind
from loraplex.core.request import BINARY_LOGIT_BYTES, REPEATED_BYTES, GenerateRequest, RequestId
from loraplex.core.retention import DEFAULT_PRIORITY, KVRetention, TokenRangeRetention
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.task import Generate
from loraplex.frontends.adapter_choices import read_choices
from loraplex.frontends.field_names import as_sent
from loraplex.frontends.kserve.messages import Parameter
from loraplex.frontends.kserve.models.inputs import Inputs
from loraplex.frontends.kserve.models.triton_model import ModelOptions, TritonModel
from loraplex.frontends.kserve.tensors import Array, Tensor
from loraplex.serving.backend import ModelCard

NO_END_ID = -1
NO_LIMIT = -1
"""Value of a retention's open end, and of one without expiry."""


class RequestHead(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Fields of a GenerateRequest that do not depend on tensors."""

    request_id: RequestId
    model: str
    client_request_id: str = ""
    timeout_seconds: float | None = None
    priority: int = 0
    logit_bytes: int = BINARY_LOGIT_BYTES


class InlineAdapter(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """An adapter that came with the request; task_id is what the client calls it, if anything."""

    task_id: int | None
    weights: RequestTensor
    config: RequestTensor


class TritonGeneration(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Request for the backend, and the outputs that its client requested."""

    request: GenerateRequest
    """Its `adapters` are empty for an inline adapter until the backend has a key for it."""
    inline_adapter: InlineAdapter | None = None
    end_token_ids: frozenset[int] = frozenset()
    """Tokens of the request which end the completion and are never part of it."""
    leaves_out_ends: bool = False
    """End tokens of the model and of adapters, too, are no part of a completion that they end."""
    is_streamed: bool = False
    excludes_input: bool = False
    returns_log_probs: bool = False
    returns_context_logits: bool = False
    returns_generation_logits: bool = False
    returns_perf_metrics: bool = False
    returns_num_input_tokens: bool = False
    returns_num_output_tokens: bool = False
    block_size: int = 16
    """Tokens in one KV block."""
    returned: frozenset[str] = frozenset()
    """Names of the outputs that a request to a model of the vLLM backend wishes for."""
    token_text: Callable[[int], str] | None = None
    """Text of a token that is returned with its log probability; None: not returned."""
    show_prompt: Callable[[Sequence[int]], str] | None = None
    """Text of the prompt's tokens at the start of the completion; None: as it was sent."""
    accumulates_text: bool = False
    """A streamed piece has the whole text so far."""
    sends_all_outputs: bool = False
    """See ModelOptions.sends_all_outputs."""
    context_logits_datatype: str = "FP32"
    generation_logits_datatype: str = "FP32"
    comes_together: bool = False
    """All its sequences stand in every response."""
    pooled_output: str = ""
    """Output that has the value of the prompt; empty: the request generates."""

    @property
    def num_sequences(self) -> int:
        """Number of sequences in the responses."""
        return 1 if self.pooled_output else self.request.sampling.n


def convert(
    inputs: Inputs,
    model: TritonModel,
    head: RequestHead,
    parameters: Mapping[str, Parameter],
) -> TritonGeneration:
    """Raises InvalidTensorError, InvalidParameterError and what the tokenizer raises.

    The parameter `adapters` is a JSON text (see frontends.adapter_choices).
    """
    card, options, texts = model.card, model.options, model.texts
    end_id = _end_id(inputs, card, ends_by_default=options.ends_by_default)
    sampling = sampling_params(
        *(inputs, card, end_id, texts.encode),
        skip_special_tokens=options.skips_special_tokens,
    )
    inline_adapter, choices = request_adapters(inputs, parameters.get("adapters", ""), options)
    sent = inputs.tensors
    wishes: dict[str, Any] = {
        field: inputs.first(field, default=False) for field in sent if field in _WISHES
    }
    wishes.setdefault("excludes_input", options.excludes_input)
    repeats_prompt = not (wishes["excludes_input"] or wishes.get("is_streamed"))
    request = GenerateRequest(
        **msgspec.structs.asdict(head),
        prompt=prompt_of(inputs, card, options),
        decoder_prompt=_decoder_prompt(inputs, card),
        task=Generate(sampling),
        adapters=choices,
        add_special_tokens=options.adds_special_tokens,
        retention=None if _RETENTION.isdisjoint(sent) else _retention(inputs),
        repeated_bytes=REPEATED_BYTES * repeats_prompt,
    )
    return TritonGeneration(
        request=request,
        inline_adapter=inline_adapter,
        end_token_ids=frozenset(() if end_id is None else (end_id,)),
        # A grammar ends with one of them, whether or not the request has an end.
        leaves_out_ends=not sampling.ignore_eos or sampling.grammar is not None,
        returns_context_logits=sampling.return_prompt_logits,
        returns_generation_logits=sampling.return_logits,
        block_size=card.kv_block_size,
        # All sequences of a request repeat one prompt.
        show_prompt=functools.lru_cache(1)(
            texts.decode if options.skips_special_tokens else texts.decode_all
        ),
        accumulates_text=options.accumulates_tokens and sampling.beam is None,
        sends_all_outputs=options.sends_all_outputs,
        context_logits_datatype=options.logits_datatype,
        generation_logits_datatype=options.generation_logits_datatype or options.logits_datatype,
        comes_together=sampling.beam is not None,
        **wishes,
    )


_WISHES = frozenset(
    {
        "is_streamed",
        "excludes_input",
        "returns_log_probs",
        "returns_perf_metrics",
        "returns_num_input_tokens",
        "returns_num_output_tokens",
    }
)
"""Fields that are flags of a TritonGeneration, under the same names."""


_ADAPTER = frozenset({"lora_task_id", "lora_weights", "lora_config"})


def request_adapters(
    inputs: Inputs, parameter: Parameter, options: ModelOptions
) -> tuple[InlineAdapter | None, tuple[AdapterChoice, ...]]:
    """Return an inline adapter, and the adapters of the parameter or of lora_task_id.

    TensorRT-LLM's error text has lora_keys, the old name of lora_config.
    """
    choices = read_adapters(parameter) if parameter != "" else ()
    weights, config, task_id = None, None, None
    if not _ADAPTER.isdisjoint(inputs.tensors):
        weights, config = inputs.tensor("lora_weights"), inputs.tensor("lora_config")
        task_id = inputs.first("lora_task_id")
    if (weights is None) is not (config is None):
        missing = "lora_weights" if weights is None else "lora_config"
        raise InvalidTensorError(
            "Request for LoRA inference must have both lora_weights and lora_keys; input "
            f"'{missing}' is missing or empty",
            param=missing,
        )
    sent = "lora_weights" if task_id is None else "lora_task_id"
    if choices and not (weights is None and task_id is None):
        raise InvalidParameterError(
            f"the parameter 'adapters' and the input '{sent}' both name an adapter; put all "
            "of them into 'adapters'",
            param="adapters",
        )
    inline_adapter = None
    if weights is not None and config is not None:
        tensors = _request_tensor(weights), _request_tensor(config)
        inline_adapter = InlineAdapter(task_id=task_id, weights=tensors[0], config=tensors[1])
    elif task_id is not None:
        choices = (AdapterChoice(ByTaskId(task_id)),)
    if (inline_adapter is not None or choices) and not options.lora_enabled:
        raise InvalidParameterError(
            "LoRA is not enabled for this model: its engine was built without a LoRA plugin; build "
            "it with --lora_plugin, or leave the lora_ inputs out",
            param="lora_task_id",
        )
    return inline_adapter, choices


def read_adapters(parameter: Parameter) -> tuple[AdapterChoice, ...]:
    """Adapters in the request parameter `adapters`; none if it is empty."""
    if parameter == "":
        return ()
    try:
        return read_choices(json.loads(str(parameter)))
    except (ValueError, RecursionError) as error:
        raise InvalidParameterError(
            f"the parameter 'adapters' must be a JSON text, as '[{{\"name\": \"fr\"}}]': {error}",
            param="adapters",
        ) from None


def _request_tensor(tensor: Tensor) -> RequestTensor:
    """A view of the tensor's bytes, not a copy."""
    return RequestTensor(tensor.datatype, tensor.shape, memoryview(tensor.data))


# ---------------------------------------------------------------- the prompt


def prompt_of(inputs: Inputs, card: ModelCard, options: ModelOptions) -> str | tuple[int, ...]:
    """Return the text, or the token ids. Raises InvalidTensorError if it is empty."""
    if inputs.kind.takes_text:
        text = "".join(inputs.texts("text_input"))
        if not text:
            raise InvalidTensorError(
                "input 'text_input' is empty; it must hold at least one character",
                param="text_input",
            )
        return text
    ids = _prompt_ids(inputs)
    if options.clamps_token_ids:
        ids = tuple(min(max(token_id, 0), card.vocab_size - 1) for token_id in ids)
    return ids


def _prompt_ids(inputs: Inputs) -> tuple[int, ...]:
    """input_ids up to input_lengths: what follows is padding. Clients of the original send lengths
    beyond the ids, too, as it reads them only where it cuts a batch's padding.
    """
    array = inputs.array("input_ids")
    if array is None:
        raise InvalidTensorError(
            "input 'input_ids' is empty; it must hold at least one token id", param="input_ids"
        )
    length = inputs.first("input_lengths", array.size)
    if length < 1:
        raise InvalidTensorError(
            f"input 'input_lengths' is {length}; it must be at least 1", param="input_lengths"
        )
    return tuple(array.tolist()[:length])


def _decoder_prompt(inputs: Inputs, card: ModelCard) -> str | tuple[int, ...] | None:
    """Return what the output of a model with an encoder begins with; None: it begins as usual.

    One pad id is what preprocessing makes where the client sent nothing. Other models ignore
    decoder_input_ids, as preprocessing sends them to all.
    """
    text = "".join(inputs.texts("decoder_text_input"))
    if text:
        return text
    array = inputs.array("decoder_input_ids")
    if array is None or card.encoder is None:
        return None
    length = inputs.first("decoder_input_lengths", array.size)
    if length < 1:
        raise InvalidTensorError(
            f"input 'decoder_input_lengths' is {length}; it must be at least 1",
            param="decoder_input_lengths",
        )
    ids = tuple(array.tolist()[:length])
    return None if ids == (card.pad_token_id,) else ids


# ---------------------------------------------------------------- what the KV is worth


def _retention(inputs: Inputs) -> KVRetention:
    """TensorRT-LLM's retention inputs: -1 is an open end, and no expiry."""
    columns = {name: _integers(inputs, f"retention_token_range_{name}") for name in _RANGE_COLUMNS}
    lengths = {name: len(values) for name, values in columns.items() if values}
    if any(length != len(columns["starts"]) for length in lengths.values()):
        raise InvalidTensorError(
            "inputs 'retention_token_range_starts', '_ends', '_priorities' and '_durations_ms' "
            f"must be equally long; they have {', '.join(f'{n} {k}' for k, n in lengths.items())}",
            param="retention_token_range_starts",
        )
    count = len(columns["starts"])
    rows = zip(
        columns["starts"],
        columns["ends"] or [NO_LIMIT] * count,
        columns["priorities"] or [DEFAULT_PRIORITY] * count,
        columns["durations_ms"] or [NO_LIMIT] * count,
        strict=True,
    )
    ranges = tuple(
        TokenRangeRetention(start, None if end == NO_LIMIT else end, priority, _duration(duration))
        for start, end, priority, duration in rows
    )
    return KVRetention(
        ranges,
        decode_priority=inputs.first("retention_decode_priority", DEFAULT_PRIORITY),
        decode_duration_ms=_duration(inputs.first("retention_decode_duration_ms", NO_LIMIT)),
    )


_RANGE_COLUMNS = ("starts", "ends", "priorities", "durations_ms")
_RETENTION = frozenset(
    {
        *(f"retention_token_range_{name}" for name in _RANGE_COLUMNS),
        "retention_decode_priority",
        "retention_decode_duration_ms",
    }
)


def _integers(inputs: Inputs, field: str) -> list[int]:
    array = inputs.array(field)
    return [] if array is None else [int(value) for value in array.flat]


def _duration(milliseconds: int) -> int | None:
    return None if milliseconds == NO_LIMIT else milliseconds


# ---------------------------------------------------------------- its end


def _end_id(inputs: Inputs, card: ModelCard, *, ends_by_default: bool) -> int | None:
    """Token that ends the completion; None: only the length ends it, as with an id that is no
    token. The original's client programs send GPT-2's by default, 50256, to every model.
    """
    has_default = inputs.kind.ends_by_default and ends_by_default
    default = card.eos_token_id if has_default else None
    end_id: int = inputs.first("end_id", NO_END_ID if default is None else default)
    return end_id if 0 <= end_id < card.vocab_size else None


Tokenize = Callable[[str], list[int]]
"""Tokenizer without special tokens."""


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


_WORDS = ("stop_words", "bad_words")


def _words(fields: _Fields) -> dict[str, Any]:
    """Words as text, whichever tokens spell them, or as exact token sequences."""
    inputs, card = fields.inputs, fields.card
    stop: tuple[Any, ...]
    bad: tuple[Any, ...]
    if inputs.kind.takes_text:
        stop, bad = (tuple(filter(None, inputs.texts(name))) for name in _WORDS)
        words: dict[str, Any] = {"stop": stop, "bad_words": bad}
    else:
        stop, bad = (tuple(_token_words(inputs, name, card)) for name in _WORDS)
        words = {"stop_token_sequences": stop, "bad_token_ids": bad}
    biases = logit_bias(inputs, card, fields.tokenize)
    return {**words, "include_stop_in_output": bool(stop), "logit_bias": biases}


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
            *_WORDS,
            *("embedding_bias", "embedding_bias_words", "embedding_bias_weights"),
        ),
        _words,
    ),
    **dict.fromkeys(GUIDE_FIELDS, _grammar),
    "beam_width": _beam,
    **dict.fromkeys((*_LOOKAHEAD, "num_draft_tokens"), _draft_tokens),
}
"""Fields that make sampling parameters together, or otherwise than by their value alone."""
