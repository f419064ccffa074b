"""Adapters: by task id, by weights inside a request and then by the id alone."""

import functools
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from loraplex.adapters.formats.storage_type import StorageType
from loraplex.compat.convert.adapters import read_peft, write_pair
from loraplex.demo import ADAPTER_PATHS
from support.both_tritons.calls import WIRES, Call, on_both_wires
from support.both_tritons.requests import task, text, tokens
from support.both_tritons.responses import Response, infer
from support.both_tritons.servers import Address, Repository
from support.triton_requests import Array

_MODELS = ("ensemble", "tensorrt_llm_bls", "tensorrt_llm")
_NEW_ID = 1000
"""The first of the task ids that calls bring adapters under, each its own."""


@functools.cache
def _pair(language: str) -> Mapping[str, Array]:
    """The tensors of an adapter, as the converter for TensorRT-LLM writes them."""
    with tempfile.TemporaryDirectory() as folder:
        write_pair(
            read_peft(str(ADAPTER_PATHS[language])).rows, Path(folder), StorageType("float16")
        )
        weights = np.load(f"{folder}/model.lora_weights.npy")
        config = np.load(f"{folder}/model.lora_config.npy")
    return {
        "lora_weights": weights.reshape(1, *weights.shape[-2:]),
        "lora_config": config.reshape(1, *config.shape[-2:])[:, :, :3],
    }


def _inputs(wire: ModuleType, model: str, more: Mapping[str, Array]) -> list[Any]:
    make: Callable[..., list[Any]] = tokens if model == "tensorrt_llm" else text
    return make(wire, **more)


def _known(server: Address, wire: ModuleType, model: str) -> Response:
    return infer(server, wire, model, _inputs(wire, model, {"lora_task_id": task(1)}))


def _sent(server: Address, wire: ModuleType, model: str) -> Response:
    """The id alone, weights with it, the id alone, other weights, the id alone."""
    place = list(WIRES.values()).index(wire) * len(_MODELS) + _MODELS.index(model)
    number = {"lora_task_id": task(_NEW_ID + place)}
    fields: Response = {}
    for step, pair in {
        "unknown": {},
        "weights": _pair("chinese"),
        "cached": {},
        "others": _pair("japanese"),
        "cached again": {},
    }.items():
        response = infer(server, wire, model, _inputs(wire, model, {**number, **pair}))
        fields |= {f"{step} {field}": value for field, value in response.items()}
    return fields


def _weights_alone(server: Address, wire: ModuleType, model: str) -> Response:
    return infer(server, wire, model, _inputs(wire, model, _pair("chinese")))


CALLS: list[Call] = [
    call
    for title, run in (
        ("a task id of the folder", _known),
        ("weights, then the id alone", _sent),
        ("weights without an id", _weights_alone),
    )
    for model in _MODELS
    for call in on_both_wires(f"{model}: {title}", Repository.UNARY, run, model)
]
