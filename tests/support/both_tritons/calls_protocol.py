"""Calls about the protocol: metadata, repository, statistics, shared memory, wire formats."""

import contextlib
import gzip
import json
import zlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np
from tritonclient.utils import shared_memory

from support.both_tritons.calls import Call, on_both_wires
from support.both_tritons.requests import TEXT, task, text, texts
from support.both_tritons.responses import (
    HTTP,
    Response,
    call_method,
    client_of,
    fields_of,
    infer,
    sent,
)
from support.both_tritons.servers import VLLM_MODEL, Address, Repository
from support.triton_repositories import FIVE
from support.triton_requests import i32, tensors

_MODEL = "ensemble"
_CONFIG_FIELDS = ("name", "max_batch_size", "model_transaction_policy")
_TENSOR_FIELDS = ("name", "data_type", "dims", "optional", "reshape", "allow_ragged_batch")
_REPOSITORIES: Mapping[Repository, tuple[str, ...]] = {
    Repository.UNARY: FIVE,
    Repository.DECOUPLED: FIVE,
    Repository.VLLM: (VLLM_MODEL,),
}


def _metadata(server: Address, wire: ModuleType, model: str) -> Response:
    """Metadata by tensor."""
    response = call_method(server, wire, "get_model_metadata", model)
    result = response.pop("result")
    for direction in ("inputs", "outputs"):
        rows = result[direction]
        response[direction] = [row["name"] for row in rows]
        response |= {f"{direction} {row['name']}": (row["datatype"], row["shape"]) for row in rows}
    return response | {"name": result["name"], "versions": result["versions"]}


def _config(server: Address, wire: ModuleType, model: str) -> Response:
    """Configuration by tensor, without the fields that name the backend."""
    response = call_method(server, wire, "get_model_config", model)
    result = response.pop("result")
    config = result if wire is HTTP else result["config"]
    for direction in ("input", "output"):
        rows = config[direction]
        response[direction] = [row["name"] for row in rows]
        for row in rows:
            kept = {field: row[field] for field in _TENSOR_FIELDS if row.get(field)}
            response[f"{direction} {row['name']}"] = kept
    return response | {field: config.get(field) for field in _CONFIG_FIELDS}


def _descriptions() -> list[Call]:
    return [
        call
        for repository, models in _REPOSITORIES.items()
        for model in models
        for title, run in (("metadata", _metadata), ("config", _config))
        for call in on_both_wires(
            f"{repository}: {title} of {model}",
            repository,
            run,
            model,
        )
    ]


def _states() -> list[Call]:
    rows: Mapping[str, tuple[Any, ...]] = {
        "is_server_live": (),
        "is_server_ready": (),
        "is_model_ready": (_MODEL,),
        "get_model_repository_index": (),
        "get_system_shared_memory_status": (),
        "get_cuda_shared_memory_status": (),
        "get_log_settings": (),
    }
    return [
        call
        for method, args in rows.items()
        for call in on_both_wires(
            method,
            Repository.UNARY,
            call_method,
            method,
            *args,
        )
    ]


def _server_metadata(server: Address, wire: ModuleType) -> Response:
    response = call_method(server, wire, "get_server_metadata")
    return {"status": response["status"], **response["result"]}


# ---------------------------------------------------------------- statistics, load, unload


def _counts(server: Address, wire: ModuleType, model: str) -> dict[str, int]:
    result = call_method(server, wire, "get_inference_statistics", model)["result"]
    (row,) = result["model_stats"]
    stats = row["inference_stats"]
    counts = {name: int(stats.get(name, {}).get("count", 0)) for name in ("success", "fail")}
    return counts | {name: int(row.get(name, 0)) for name in ("inference_count", "execution_count")}


def _statistics(server: Address, wire: ModuleType) -> Response:
    """How much each count grows by two requests that are served and one that is not."""
    before = _counts(server, wire, _MODEL)
    for inputs in (text(wire), text(wire), text(wire, lora_task_id=task(99))):
        infer(server, wire, _MODEL, inputs)
    after = _counts(server, wire, _MODEL)
    return {"status": "OK", **{name: after[name] - before[name] for name in after}}


def _unloaded(server: Address, wire: ModuleType) -> Response:
    """A model that is taken away, and comes back."""
    model = "postprocessing"
    steps = {"unload": call_method(server, wire, "unload_model", model)}
    try:
        steps["ready"] = call_method(server, wire, "is_model_ready", model)
        steps["metadata"] = call_method(server, wire, "get_model_metadata", model)
        steps["infer"] = infer(server, wire, model, _decoded(wire, 1))
        steps["again"] = call_method(server, wire, "unload_model", model)
    finally:
        steps["load"] = call_method(server, wire, "load_model", model)
    steps["loaded"] = call_method(server, wire, "is_model_ready", model)
    steps["unknown"] = call_method(server, wire, "load_model", "nope")
    steps["unload unknown"] = call_method(server, wire, "unload_model", "nope")
    return {
        f"{step} {field}": value
        for step, response in steps.items()
        for field, value in response.items()
    }


def _decoded(wire: ModuleType, batch_size: int) -> list[Any]:
    ids = np.ones((batch_size, 1, 2), np.int32)
    return tensors(wire, TOKENS_BATCH=ids, SEQUENCE_LENGTH=np.full((batch_size, 1), 2, np.int32))


def _whole_config(server: Address, model: str) -> Any:
    """Triton takes the one that it is given instead of the model's file."""
    return call_method(server, HTTP, "get_model_config", model)["result"]


def _configured(server: Address, wire: ModuleType) -> Response:
    """A model that is loaded with another configuration, and with its own again."""
    config = json.dumps(_whole_config(server, "postprocessing") | {"max_batch_size": 4})
    steps = {"load": call_method(server, wire, "load_model", "postprocessing", config=config)}
    steps["inputs"] = _metadata(server, wire, "postprocessing")
    steps["batch"] = infer(server, wire, "postprocessing", _decoded(wire, 5))
    steps["broken"] = call_method(server, wire, "load_model", "postprocessing", config="{not json")
    steps["back"] = call_method(server, wire, "load_model", "postprocessing")
    steps["back batch"] = infer(server, wire, "postprocessing", _decoded(wire, 5))
    call_method(server, wire, "unload_model", "postprocessing")
    steps["anew"] = call_method(server, wire, "load_model", "postprocessing")
    steps["anew batch"] = infer(server, wire, "postprocessing", _decoded(wire, 5))
    return {
        f"{step} {field}": value
        for step, response in steps.items()
        for field, value in response.items()
    }


# ---------------------------------------------------------------- forms of a request


def _in_shared_memory(server: Address, wire: ModuleType) -> Response:
    """Read the prompt from a shared memory region and write the output into another."""
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(client_of(server, wire))
        prompt = tensors(wire, text_input=texts(TEXT))[0]
        data = np.frombuffer(len(TEXT).to_bytes(4, "little") + TEXT.encode(), np.uint8)
        regions = {"contract_in": data.size, "contract_out": 256}
        for name, size in regions.items():
            handle = shared_memory.create_shared_memory_region(name, f"/loraplex_{name}", size)
            stack.callback(shared_memory.destroy_shared_memory_region, handle)
            client.register_system_shared_memory(name, f"/loraplex_{name}", size)
            stack.callback(client.unregister_system_shared_memory, name)
            if name == "contract_in":
                shared_memory.set_shared_memory_region(handle, [data])
        prompt.set_shared_memory("contract_in", data.size)
        output = wire.InferRequestedOutput("text_output")
        output.set_shared_memory("contract_out", 256)
        status = client.get_system_shared_memory_status(
            **({} if wire is HTTP else {"as_json": True})
        )
        result = client.infer(_MODEL, [prompt, *tensors(wire, max_tokens=i32(8))], outputs=[output])
        response = fields_of(result, wire, is_in_message=False)
        written = bytes(shared_memory.get_contents_as_numpy(handle, np.uint8, [40]))
    row = result.get_output("text_output")
    parameters = sorted(row.get("parameters", {}) if wire is HTTP else row.parameters)
    return response | {"regions": status, "written": written, "of output": parameters}


def _with(server: Address, wire: ModuleType, kwargs: Mapping[str, Any]) -> Response:
    return infer(server, wire, "tensorrt_llm_bls", text(wire), **kwargs)


def _preprocessed(server: Address, wire: ModuleType, classes: Mapping[str, int]) -> Response:
    """classes: by output how many are wanted; 0: the tensor itself."""
    outputs = [wire.InferRequestedOutput(name, class_count=n) for name, n in classes.items()]
    query = tensors(wire, QUERY=texts(TEXT), REQUEST_OUTPUT_LEN=i32(8))
    return infer(server, wire, "preprocessing", query, outputs=outputs)


def _forms() -> list[Call]:
    parameters = {"parameters": {"nope": "a", "number": 5, "flag": True}}
    rows: Mapping[str, Mapping[str, Any]] = {
        "an id": {"request_id": "seven"},
        "parameters": parameters,
        "a priority and a timeout": {"priority": 1, "timeout": 60_000_000},
        "a sequence": {"sequence_id": 5, "sequence_start": True, "sequence_end": True},
        "its version": {"model_version": "1"},
    }
    calls = [
        call
        for name, kwargs in rows.items()
        for call in on_both_wires(
            f"with {name}",
            Repository.UNARY,
            _with,
            kwargs,
        )
    ]
    for name, outputs in (
        ("one output", {"INPUT_ID": 0}),
        ("classes", {"INPUT_ID": 2}),
        ("outputs in another order", {"OUT_END_ID": 0, "INPUT_ID": 0}),
    ):
        calls += on_both_wires(
            f"with {name}",
            Repository.UNARY,
            _preprocessed,
            outputs,
        )
    return calls


def _json_tensors(server: Address) -> Response:
    """Tensors as JSON both ways."""
    tensor = tensors(HTTP, text_input=texts(TEXT), max_tokens=i32(8))
    tensor[0].set_data_from_numpy(texts(TEXT), binary_data=False)
    tensor[1].set_data_from_numpy(i32(8), binary_data=False)
    output = HTTP.InferRequestedOutput("text_output", binary_data=False)
    return infer(server, HTTP, _MODEL, tensor, outputs=[output])


_BODY = {
    "id": "7",
    "inputs": [
        {"name": "text_input", "datatype": "BYTES", "shape": [1, 1], "data": [[TEXT]]},
        {"name": "max_tokens", "datatype": "INT32", "shape": [1, 1], "data": [8]},
    ],
    "outputs": [{"name": "text_output"}],
}
_INFER = "/v2/models/tensorrt_llm_bls/infer"


def _bodies() -> list[Call]:
    plain = json.dumps(_BODY).encode()
    length = {"Inference-Header-Content-Length": str(len(plain))}
    binary = _BODY | {"parameters": {"binary_data_output": True}}
    rows: Mapping[str, tuple[Any, dict[str, str]]] = {
        "JSON": (plain, {}),
        "JSON and its length": (plain, length),
        "binary outputs": (binary, {}),
        "gzip": (gzip.compress(plain), {"Content-Encoding": "gzip"}),
        "deflate": (zlib.compress(plain), {"Content-Encoding": "deflate"}),
        "a response as gzip": (plain, {"Accept-Encoding": "gzip"}),
        "a response as deflate": (plain, {"Accept-Encoding": "deflate"}),
        "another content type": (plain, {"Content-Type": "text/plain"}),
    }
    return [
        Call(
            f"body: {name}/http",
            Repository.UNARY,
            sent,
            ("POST", _INFER, body, headers),
        )
        for name, (body, headers) in rows.items()
    ]


CALLS = [
    *_descriptions(),
    *_states(),
    *on_both_wires("server metadata", Repository.UNARY, _server_metadata),
    *on_both_wires("statistics", Repository.UNARY, _statistics),
    *on_both_wires("a model is unloaded and loaded", Repository.UNARY, _unloaded),
    *on_both_wires("a model is loaded with a config", Repository.UNARY, _configured),
    *on_both_wires("in shared memory", Repository.UNARY, _in_shared_memory),
    *_forms(),
    Call("JSON tensors/http", Repository.UNARY, _json_tensors),
    *_bodies(),
]
