"""TensorRT-LLM's lora_task_id, lora_weights and lora_config as arguments of the library.

The rules are those of requests to a server: weights and config with the first use of an id, the id
alone later, and without an id they mean themselves.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from loraplex.adapters.staging import RequestTensor
from loraplex.core.errors import InvalidRequestError, InvalidTensorError

_BFLOAT16 = "bfloat16"


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LoraArrays:
    """Of one prompt."""

    task_id: int | None
    tensors: tuple[RequestTensor, RequestTensor] | None
    """Weights and config."""


def lora_arrays(task_ids: Any, weights: Any, configs: Any, count: int) -> list[LoraArrays]:
    """One for each of `count` prompts, from one value for all or a list with one for each.

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


def _listed(name: str, value: Any, count: int) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        return [value] * count
    if len(value) != count:
        raise InvalidRequestError(f"{name} has {len(value)} entries for {count} prompts")
    return value


def _task_id(value: Any) -> int | None:
    """An integer, or an array of one element, as clients of Triton have it."""
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
    """An array of numpy or torch; bfloat16 also as numpy's raw two bytes."""
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
