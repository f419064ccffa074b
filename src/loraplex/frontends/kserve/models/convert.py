"""Conversion of one element of a batch to a GenerateRequest and the form of its outputs. Pure."""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from loraplex.adapters.staging import RequestTensor
from loraplex.core.adapter import AdapterChoice, ByTaskId
from loraplex.core.errors import InvalidParameterError, InvalidTensorError
from loraplex.core.request import BINARY_LOGIT_BYTES, REPEATED_BYTES, GenerateRequest, RequestId
from loraplex.core.retention import DEFAULT_PRIORITY, KVRetention, TokenRangeRetention
from loraplex.core.task import Generate
from loraplex.frontends.adapter_choices import read_choices
from loraplex.frontends.kserve.messages import Parameter
from loraplex.frontends.kserve.models.inputs import Inputs
from loraplex.frontends.kserve.models.sampling import sampling_params
from loraplex.frontends.kserve.models.triton_model import ModelOptions, TritonModel
from loraplex.frontends.kserve.tensors import Tensor
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
    inline_adapter, choices = _adapters(inputs, parameters.get("adapters", ""))
    sent = inputs.tensors
    wishes: dict[str, Any] = {
        field: inputs.first(field, default=False) for field in sent if field in _WISHES
    }
    wishes.setdefault("excludes_input", options.excludes_input)
    repeats_prompt = not (wishes["excludes_input"] or wishes.get("is_streamed"))
    request = GenerateRequest(
        **msgspec.structs.asdict(head),
        prompt=_prompt(inputs, card, options),
        task=Generate(sampling),
        adapters=choices,
        add_special_tokens=options.adds_special_tokens,
        retention=None if _RETENTION.isdisjoint(sent) else _retention(inputs),
        repeated_bytes=REPEATED_BYTES * repeats_prompt,
    )
    if (inline_adapter is not None or choices) and not options.lora_enabled:
        raise _lora_is_off()
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


def _lora_is_off() -> InvalidParameterError:
    return InvalidParameterError(
        "LoRA is not enabled for this model: its engine was built without a LoRA plugin; build it "
        "with --lora_plugin, or leave the lora_ inputs out",
        param="lora_task_id",
    )


_ADAPTER = frozenset({"lora_task_id", "lora_weights", "lora_config"})


def _adapters(
    inputs: Inputs, parameter: Parameter
) -> tuple[InlineAdapter | None, tuple[AdapterChoice, ...]]:
    """Return an inline adapter, and the adapters of the parameter or of lora_task_id.

    TensorRT-LLM's error text has lora_keys, the old name of lora_config.
    """
    choices = read_adapters(parameter) if parameter != "" else ()
    if _ADAPTER.isdisjoint(inputs.tensors):
        return None, choices
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
    if weights is not None and config is not None:
        tensors = _request_tensor(weights), _request_tensor(config)
        return InlineAdapter(task_id=task_id, weights=tensors[0], config=tensors[1]), choices
    return None, choices if task_id is None else (AdapterChoice(ByTaskId(task_id)),)


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


def _prompt(inputs: Inputs, card: ModelCard, options: ModelOptions) -> str | tuple[int, ...]:
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
