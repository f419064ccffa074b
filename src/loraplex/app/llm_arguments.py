"""Arguments of the library's `generate`: prompts, adapters, and one value for all or for each.

An adapter has its name, or arrives as TensorRT-LLM's lora_task_id, lora_weights and lora_config.
The rules are those of requests to a server: weights and config with the first use of an id, the id
alone later; without an id the weights' digest names the adapter.
"""

import dataclasses
import operator
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any, TypedDict, TypeGuard, cast

import numpy as np
import torch

from loraplex.adapters.staging import RequestTensor
from loraplex.app.llm_outputs import Prompt
from loraplex.core.adapter import AdapterChoice, AdapterKey, ByName, LoadPolicy
from loraplex.core.counts import counted
from loraplex.core.errors import InvalidRequestError, InvalidTensorError
from loraplex.core.retention import KVRetention
from loraplex.core.sampling_params import SamplingParams

Adapter = str | Mapping[str, float]
"""A name, or names with the scales that they are composed with: {"fr": 0.7, "legal": 0.3}."""

Chat = Sequence[Mapping[str, Any]]
"""A conversation: messages with role and content."""

_BFLOAT16 = "bfloat16"


class RequestOptions(TypedDict, total=False):
    """Options of a request in addition to its sampling parameters."""

    priority: int
    """Lower is sooner."""
    timeout_seconds: float
    end_id: int
    """The end-of-text token instead of the model's own; -1: none."""
    decoder_prompt: str | tuple[int, ...]
    """Beginning of the outputs of a model with an encoder, whose input the prompt is."""
    forced_bos_token_id: int
    """Token after the first one of such an output, such as a target language."""
    retention: KVRetention
    """Priorities and lifetimes of the request's KV blocks."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LoraArrays:
    """The adapter of one prompt, as an id or as arrays."""

    task_id: int | None
    tensors: tuple[RequestTensor, RequestTensor] | None
    """Weights and config."""


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return a list of prompts from one prompt or several. Raises InvalidRequestError."""
    if isinstance(prompts, str):
        return [prompts]
    items: list[Any] = list(prompts)
    if items and all(isinstance(item, Integral) for item in items):
        return [_as_prompt(items)]
    return [_as_prompt(item) for item in items]


def params_per_prompt(value: Any, count: int) -> list[SamplingParams]:
    """Return the sampling parameters of each of `count` prompts. Raises InvalidRequestError."""
    params = per_prompt("sampling_params", value, count)
    for one in params:
        if not isinstance(one, SamplingParams):
            raise InvalidRequestError(
                f"sampling_params must be SamplingParams, or a list of them, got {one!r}",
                param="sampling_params",
            )
    return params


def per_prompt(name: str, value: Any, count: int) -> list[Any]:
    """Return a value for each of `count` prompts. Raises InvalidRequestError."""
    if value is None or isinstance(value, str | Mapping | SamplingParams):
        return [value] * count
    return _of_length(name, list(value), count)


def adapter_choices(adapter: Any) -> tuple[AdapterChoice, ...]:
    """Return the adapters of one prompt; none for None, the base model.

    Raises InvalidRequestError.
    """
    match adapter:
        case None:
            return ()
        case str():
            return (AdapterChoice(ByName(adapter)),)
        case Mapping():
            return tuple(_scaled(name, scale) for name, scale in adapter.items())
    raise _invalid_adapter(adapter)


def lora_arrays(task_ids: Any, weights: Any, configs: Any, count: int) -> list[LoraArrays]:
    """Return the arrays of each of `count` prompts, from one value for all or a list for each.

    An array is one value. Raises InvalidRequestError, InvalidTensorError.
    """
    return [
        LoraArrays(_task_id(task_id), _tensors(weight, config))
        for task_id, weight, config in zip(
            _listed("lora_task_id", task_ids, count),
            _listed("lora_weights", weights, count),
            _listed("lora_config", configs, count),
            strict=True,
        )
    ]


def _as_prompt(item: Any) -> Prompt:
    if isinstance(item, str):
        return item
    try:
        # operator.index takes numpy's integers, too.
        return [operator.index(token_id) for token_id in item]
    except TypeError as error:
        raise InvalidRequestError(
            f"a prompt is a text or a list of token ids, got {item!r}", param="prompts"
        ) from error


def _scaled(name: Any, scale: Any) -> AdapterChoice:
    if not isinstance(name, str) or isinstance(scale, bool) or not isinstance(scale, Real):
        raise _invalid_adapter({name: scale})
    return AdapterChoice(ByName(name), float(scale))


def _invalid_adapter(adapter: object) -> InvalidRequestError:
    return InvalidRequestError(
        f"an adapter is a name, or names with scales as {{'fr': 0.7, 'legal': 0.3}}; got "
        f"{adapter!r}",
        param="adapter",
    )


def _listed(name: str, value: Any, count: int) -> list[Any]:
    if isinstance(value, list | tuple):
        return _of_length(name, list(value), count)
    return [value] * count


def _of_length(name: str, values: list[Any], count: int) -> list[Any]:
    if len(values) != count:
        raise InvalidRequestError(
            f"{name} has {counted(len(values), 'entry', 'entries')} for {counted(count, 'prompt')}"
        )
    return values


def _task_id(value: Any) -> int | None:
    """Return the id from an integer, or from an array of one element as Triton's clients send."""
    if value is None:
        return None
    array = np.asarray(value)
    if array.size != 1 or array.dtype.kind not in "iu":
        raise InvalidRequestError(
            f"lora_task_id must be one integer from 0 to 2**64 - 1, got {value!r}",
            param="lora_task_id",
        )
    return int(array.flat[0])


def _tensors(weights: Any, config: Any) -> tuple[RequestTensor, RequestTensor] | None:
    if weights is None and config is None:
        return None
    if weights is None or config is None:
        missing = "lora_weights" if weights is None else "lora_config"
        raise InvalidTensorError(
            "Request for LoRA inference must have both lora_weights and lora_keys; "
            f"{missing} is missing",
            param=missing,
        )
    return _tensor("lora_weights", weights), _tensor("lora_config", config)


def _tensor(name: str, value: Any) -> RequestTensor:
    """Convert an array of numpy or torch; bfloat16 may be numpy's raw two bytes."""
    dtype = ""
    if isinstance(value, torch.Tensor):
        tensor = value.detach().cpu().contiguous()
        if tensor.dtype is torch.bfloat16:
            tensor, dtype = tensor.view(torch.int16), _BFLOAT16
        value = tensor.numpy()
    if not isinstance(value, np.ndarray):
        raise InvalidTensorError(
            f"{name} must be an array of numpy or torch, got {type(value).__name__}", param=name
        )
    if value.dtype == np.dtype("V2"):
        dtype = _BFLOAT16
    little = np.ascontiguousarray(value, value.dtype.newbyteorder("<"))
    data = little.reshape(-1).view(np.uint8).data if little.size else b""
    return RequestTensor(dtype or value.dtype.name, value.shape, data)


def load_policy(text: str) -> LoadPolicy:
    try:
        return LoadPolicy(text)
    except ValueError:
        known = ", ".join(LoadPolicy)
        raise InvalidRequestError(
            f"load_lora_weights must be one of {known}, got {text!r}", param="load_lora_weights"
        ) from None


def as_chats(messages: Chat | Sequence[Chat]) -> Sequence[Chat]:
    """Return the conversations of one argument. Raises InvalidRequestError for an empty one."""
    chats = [messages] if messages and isinstance(messages[0], Mapping) else messages
    if not chats or not all(chats):
        raise InvalidRequestError(
            "give messages: a list of objects with role and content, or a list of such lists",
            param="messages",
        )
    return cast("Sequence[Chat]", chats)


def is_chat(prompt: Prompt | Chat) -> TypeGuard[Chat]:
    """Return whether a prompt is a conversation."""
    return not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def with_key(
    adapters: tuple[AdapterChoice, ...], key: AdapterKey | None
) -> tuple[AdapterChoice, ...]:
    """Return the adapters of a prompt: named ones, or the one of its id or arrays."""
    if key is None:
        return adapters
    if adapters:
        raise InvalidRequestError("adapter and lora_task_id or lora_weights name two adapters")
    return (AdapterChoice(key),)
