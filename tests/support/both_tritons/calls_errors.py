"""Calls with invalid requests, which compare the servers' errors."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from support.both_tritons.calls import Call, on_both_wires
from support.both_tritons.requests import TEXT, task, text, texts, tokens
from support.both_tritons.responses import Response, call_method, infer, sent
from support.both_tritons.servers import Address, Repository
from support.triton_requests import TRUE, f32, i32, tensors

_Make = Callable[[ModuleType], list[Any]]
_ENSEMBLE, _TOKENS = "ensemble", "tensorrt_llm"


def _wrong(name: str, model: str, make: _Make, **kwargs: Any) -> list[Call]:
    def send(server: Address, wire: ModuleType) -> Response:
        return infer(server, wire, model, make(wire), **kwargs)

    return on_both_wires(f"{model}: {name}", Repository.UNARY, send)


def _plain(name: str, path: str, body: Any, headers: dict[str, str] | None = None) -> Call:
    return Call(
        f"{name}/http", Repository.UNARY, lambda server: sent(server, "POST", path, body, headers)
    )


def _none(module: ModuleType) -> list[Any]:
    del module
    return []


def _requested(module: ModuleType, name: str) -> list[Any]:
    return [module.InferRequestedOutput(name)]


_TENSORS = [
    *_wrong("no max_tokens", _ENSEMBLE, lambda m: tensors(m, text_input=texts(TEXT))),
    *_wrong("no text_input", _ENSEMBLE, lambda m: tensors(m, max_tokens=i32(8))),
    *_wrong("no inputs", _ENSEMBLE, _none),
    *_wrong("no input_lengths", _TOKENS, lambda m: tokens(m)[:1]),
    *_wrong("an unknown input", _ENSEMBLE, lambda m: text(m, nope=i32(1))),
    *_wrong("a type", _ENSEMBLE, lambda m: text(m, temperature=i32(1))),
    *_wrong(
        "text as numbers", _ENSEMBLE, lambda m: tensors(m, text_input=i32(1), max_tokens=i32(1))
    ),
    *_wrong("a shape", _ENSEMBLE, lambda m: text(m, temperature=f32(1.0, 2.0))),
    *_wrong("no batch dimension", _ENSEMBLE, lambda m: text(m, top_k=np.array([1], np.int32))),
    *_wrong("three dimensions", _ENSEMBLE, lambda m: text(m, top_k=np.array([[[1]]], np.int32))),
    *_wrong(
        "batches of unequal size",
        _ENSEMBLE,
        lambda m: text(m, top_k=np.array([[1], [1]], np.int32)),
    ),
    *_wrong(
        "lora_config of two columns",
        _ENSEMBLE,
        lambda m: text(
            m,
            lora_task_id=task(5),
            lora_config=np.zeros((1, 2, 2), np.int32),
            lora_weights=np.zeros((1, 2, 8), np.float16),
        ),
    ),
    *_wrong("the batch is too large", _ENSEMBLE, lambda m: _many(m, 129)),
    *_wrong("one input twice", _ENSEMBLE, lambda m: [*text(m), *tensors(m, top_k=i32(1)) * 2]),
]
_VALUES = [
    *_wrong("max_tokens of -1", _ENSEMBLE, lambda m: _text(m, max_tokens=i32(-1))),
    *_wrong("max_tokens of 0", _ENSEMBLE, lambda m: _text(m, max_tokens=i32(0))),
    *_wrong("max_tokens beyond the model", _ENSEMBLE, lambda m: _text(m, max_tokens=i32(10**6))),
    *_wrong("a prompt beyond the model", _ENSEMBLE, lambda m: text(m, "hello " * 3000)),
    *_wrong("an empty prompt", _ENSEMBLE, lambda m: text(m, "")),
    *_wrong("temperature", _ENSEMBLE, lambda m: text(m, temperature=f32(-1.0))),
    *_wrong("top_p", _ENSEMBLE, lambda m: text(m, top_p=f32(1.5))),
    *_wrong("top_k", _ENSEMBLE, lambda m: text(m, top_k=i32(-5))),
    *_wrong("beam_width of 0", _ENSEMBLE, lambda m: text(m, beam_width=i32(0))),
    *_wrong("bias without weights", _ENSEMBLE, lambda m: text(m, embedding_bias_words=texts("a"))),
    *_wrong("streaming", _ENSEMBLE, lambda m: text(m, stream=TRUE)),
    *_wrong("an unknown adapter", _ENSEMBLE, lambda m: text(m, lora_task_id=task(99))),
    *_wrong("an unknown adapter", "tensorrt_llm_bls", lambda m: text(m, lora_task_id=task(99))),
    *_wrong("an unknown adapter", _TOKENS, lambda m: tokens(m, lora_task_id=task(99))),
    *_wrong(
        "weights without a config",
        _ENSEMBLE,
        lambda m: text(m, lora_task_id=task(5), lora_weights=np.zeros((1, 2, 8), np.float16)),
    ),
    *_wrong(
        "weights of another model",
        _ENSEMBLE,
        lambda m: text(
            m,
            lora_task_id=task(5),
            lora_config=np.array([[[1, 0, 8], [2, 0, 8]]], np.int32),
            lora_weights=np.zeros((1, 2, 8), np.float16),
        ),
    ),
    *_wrong(
        "an id out of the vocabulary",
        _TOKENS,
        lambda m: tokens(m, np.array([[1, 2, 10**6]], np.int32)),
    ),
    *_wrong(
        "input_lengths beyond the ids",
        _TOKENS,
        lambda m: tensors(m, input_ids=i32(5, 6), input_lengths=i32(9), request_output_len=i32(4)),
    ),
    *_wrong("prompt tuning", _ENSEMBLE, lambda m: text(m, prompt_embedding_table=_table())),
    *_wrong(
        "a batch",
        _TOKENS,
        lambda m: tensors(
            m,
            input_ids=np.array([[5, 6], [7, 8]], np.int32),
            input_lengths=np.array([[2], [2]], np.int32),
            request_output_len=np.array([[2], [2]], np.int32),
        ),
    ),
]
_NAMES = [
    *_wrong("unknown", "nope", text),
    *_wrong("an unknown version", _ENSEMBLE, text, model_version="9"),
    *_wrong("a version that is no number", _ENSEMBLE, text, model_version="x"),
    *on_both_wires(
        "ensemble: an unknown output",
        Repository.UNARY,
        lambda s, m: infer(s, m, _ENSEMBLE, text(m), outputs=_requested(m, "nope")),
    ),
    *(
        call
        for method in ("get_model_metadata", "get_model_config", "get_inference_statistics")
        for call in on_both_wires(
            f"{method} of nope", Repository.UNARY, call_method, method, "nope"
        )
    ),
    *on_both_wires(
        "is_model_ready of nope", Repository.UNARY, call_method, "is_model_ready", "nope"
    ),
    *on_both_wires(
        "get_model_metadata of version 9",
        Repository.UNARY,
        lambda s, m: call_method(s, m, "get_model_metadata", _ENSEMBLE, "9"),
    ),
]
_INFER = "/v2/models/ensemble/infer"


def _json_inputs(**changes: Any) -> dict[str, Any]:
    first = {"name": "text_input", "datatype": "BYTES", "shape": [1, 1], "data": [TEXT]}
    second = {"name": "max_tokens", "datatype": "INT32", "shape": [1, 1], "data": [8]}
    return {"inputs": [first | changes, second]}


def _shared_inputs() -> dict[str, Any]:
    inputs = _json_inputs(parameters={"shared_memory_region": "gone", "shared_memory_byte_size": 8})
    del inputs["inputs"][0]["data"]
    return inputs


_BODIES = [
    _plain("infer: no JSON", _INFER, b"{not json"),
    _plain("infer: an empty body", _INFER, b""),
    _plain("infer: a list", _INFER, b"[]"),
    _plain("infer: no inputs", _INFER, {}),
    _plain("infer: inputs is a number", _INFER, {"inputs": 3}),
    _plain("infer: no name", _INFER, {"inputs": [{"shape": [1], "datatype": "INT32"}]}),
    _plain("infer: an unknown datatype", _INFER, _json_inputs(datatype="INT31")),
    _plain("infer: a shape with a negative size", _INFER, _json_inputs(shape=[1, -1])),
    _plain("infer: more elements than the shape", _INFER, _json_inputs(data=["a", "b"])),
    _plain("infer: fewer elements than the shape", _INFER, _json_inputs(shape=[1, 2])),
    _plain("infer: numbers as text", _INFER, _json_inputs(data=[3])),
    _plain(
        "infer: no data",
        _INFER,
        {"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1, 1]}]},
    ),
    _plain("infer: id is a number", _INFER, _json_inputs() | {"id": 3}),
    _plain("infer: a parameter is a list", _INFER, _json_inputs() | {"parameters": {"a": [1]}}),
    _plain(
        "infer: the header is no number",
        _INFER,
        _json_inputs(),
        {"Inference-Header-Content-Length": "x"},
    ),
    _plain(
        "infer: the header is beyond the body",
        _INFER,
        _json_inputs(),
        {"Inference-Header-Content-Length": "9999"},
    ),
    _plain(
        "infer: binary data is missing", _INFER, _json_inputs(parameters={"binary_data_size": 10})
    ),
    _plain("infer: an unknown encoding", _INFER, _json_inputs(), {"Content-Encoding": "br"}),
    _plain("infer: the body is not gzip", _INFER, _json_inputs(), {"Content-Encoding": "gzip"}),
    _plain(
        "infer: FP16 in JSON",
        _INFER,
        {
            "inputs": [
                *_json_inputs()["inputs"],
                {"name": "lora_weights", "datatype": "FP16", "shape": [1, 1, 1], "data": [0.5]},
            ]
        },
    ),
    _plain("infer: a shared memory region that is not", _INFER, _shared_inputs()),
    Call("infer: GET/http", Repository.UNARY, lambda s: sent(s, "GET", _INFER)),
    Call("an unknown path/http", Repository.UNARY, lambda s: sent(s, "GET", "/v2/nope")),
    Call(
        "an unknown action/http",
        Repository.UNARY,
        lambda s: sent(s, "POST", "/v2/models/ensemble/nope", {}),
    ),
    Call("metadata: DELETE/http", Repository.UNARY, lambda s: sent(s, "DELETE", "/v2")),
]


def _text(module: ModuleType, **arrays: Any) -> list[Any]:
    return tensors(module, **({"text_input": texts(TEXT)} | arrays))


def _many(module: ModuleType, count: int) -> list[Any]:
    return tensors(
        module,
        text_input=np.array([[TEXT]] * count, dtype=object),
        max_tokens=np.full((count, 1), 8, np.int32),
    )


def _table() -> Any:
    return np.zeros((1, 2, 64), np.float16)


CALLS = [*_TENSORS, *_VALUES, *_NAMES, *_BODIES]
