"""Broken inputs for the Triton front ends: valid ones, changed at random in bytes and structure.

Everything follows from a seed. The expected responses are in kserve_prober.
"""

import copy
import json
import random
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
from tritonclient.grpc import service_pb2 as pb

from loraplex.frontends.kserve.tensors import DATATYPES

ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**63, 2**64, -(2**63), 10**30),
    *(0.5, -0.0, 1e308, 1e-320, "", "a", "\0", "é\ud7ff", "x" * 500, "INT32", "BYTES", "FP16"),
    *([], [[]], [[[1]]], [1, "a"], {}, {"a": {}}, [{}], [None], [0] * 50, list("abc")),
)
NAMES = (
    *("text_input", "max_tokens", "stream", "input_ids", "input_lengths", "request_output_len"),
    *("lora_task_id", "lora_weights", "lora_config", "stop", "temperature", "top_k", "end_id"),
    *(
        "stop_words",
        "bad_words",
        "return_log_probs",
        "beam_width",
        "seed",
        "nope",
        "START",
        "QUERY",
    ),
    *("num_return_sequences", "sampling_parameters", "random_seed", "guided_decoding_guide"),
)
OUTPUTS = ("text_output", "output_ids", "cum_log_probs", "sequence_length", "nope")
MODELS = ("ensemble", "tensorrt_llm", "preprocessing", "postprocessing", "tensorrt_llm_bls", "echo")
PARAMETERS = (
    *("binary_data_size", "binary_data", "classification", "shared_memory_region", "priority"),
    *("shared_memory_byte_size", "shared_memory_offset", "timeout", "sequence_id", "adapters"),
    *("binary_data_output", "triton_enable_empty_final_response"),
)

UNSERVED: tuple[dict[str, Any], ...] = ({"lora_task_id": 77}, {"text_input": "hi" * 400})
"""Well said, and refused when the request has begun."""

Change = Callable[[random.Random, Any], Any]


def infer_body(rng: random.Random, model: str) -> tuple[dict[str, str], bytes]:
    """(headers, body) of a POST .../infer to a model."""
    document, blob = _infer_document(rng, model)
    for _ in range(rng.choice((0, 0, 1, 2))):
        document = changed_json(rng, document)
    head = json.dumps(document).encode()
    if rng.random() < 0.3:
        blob = changed_bytes(rng, blob)
    length = len(head) if rng.random() < 0.9 else rng.randrange(-2, len(head) + len(blob) + 5)
    body = head + blob
    if rng.random() < 0.2:
        body = changed_bytes(rng, body)
    headers = (
        {} if not blob and rng.random() < 0.5 else {"inference-header-content-length": str(length)}
    )
    if rng.random() < 0.1:
        headers["content-encoding"] = rng.choice(("gzip", "deflate", "br", "identity", ""))
    return headers, body


def generate_body(rng: random.Random) -> bytes:
    """Draw the body of a POST .../generate or generate_stream."""
    document: Any = {"text_input": "hi", "max_tokens": rng.choice((1, 5, 20)), "id": "7"}
    if rng.random() < 0.2:
        document |= rng.choice(UNSERVED)
    for _ in range(rng.randrange(4)):
        document[rng.choice((*NAMES, "id", "parameters"))] = rng.choice(ODD_VALUES)
    if rng.random() < 0.4:
        document["parameters"] = {rng.choice(NAMES): rng.choice(ODD_VALUES)}
    if rng.random() < 0.3:
        document = changed_json(rng, document)
    body = json.dumps(document).encode()
    return changed_bytes(rng, body) if rng.random() < 0.2 else body


def infer_message(rng: random.Random) -> Any:
    """A ModelInferRequest; its wire form may have been changed, if it can still be parsed."""
    model = rng.choice(MODELS)
    message = pb.ModelInferRequest(model_name=model, id=rng.choice(("", "7")))
    for name, datatype, shape, data in _tensors(rng, model):
        entry = message.inputs.add(name=name, datatype=datatype, shape=shape)
        if rng.random() < 0.05:
            entry.contents.int_contents.extend([1, 2])
        if rng.random() < 0.1:
            entry.parameters["shared_memory_region"].string_param = "r"
            entry.parameters["shared_memory_byte_size"].int64_param = rng.choice((0, 8, 2**40, -1))
        if rng.random() < 0.97:
            message.raw_input_contents.append(data)
    for _ in range(rng.randrange(2)):
        output = message.outputs.add(name=rng.choice(OUTPUTS))
        output.parameters[rng.choice(PARAMETERS)].int64_param = rng.choice((0, 1, 5, -1))
    for _ in range(rng.randrange(2)):
        message.parameters[rng.choice(PARAMETERS)].string_param = rng.choice(("", "true", "x"))
    if rng.random() < 0.3:
        return _reparsed(changed_bytes(rng, message.SerializeToString()), message)
    return message


def _reparsed(data: bytes, otherwise: Any) -> Any:
    message = pb.ModelInferRequest()
    try:
        message.ParseFromString(data)
    except Exception:  # upb's DecodeError has no public home that all versions share
        return otherwise
    return message


def _infer_document(rng: random.Random, model: str) -> tuple[dict[str, Any], bytes]:
    inputs, blobs = [], []
    for name, datatype, shape, data in _tensors(rng, model):
        entry: dict[str, Any] = {"name": name, "datatype": datatype, "shape": shape}
        if rng.random() < 0.7:
            entry["parameters"] = {"binary_data_size": len(data)}
            blobs.append(data)
        else:
            entry["data"] = rng.choice((["hi"], [5], [[5]], [True], [1, 2, 3], *ODD_VALUES))
        inputs.append(entry)
    document: dict[str, Any] = {"id": "7", "inputs": inputs}
    if rng.random() < 0.4:
        parameters = {rng.choice(PARAMETERS): rng.choice(ODD_VALUES)}
        document["outputs"] = [{"name": rng.choice(OUTPUTS), "parameters": parameters}]
    if rng.random() < 0.3:
        document["parameters"] = {rng.choice(PARAMETERS): rng.choice(ODD_VALUES)}
    return document, b"".join(blobs)


def _tensors(rng: random.Random, model: str) -> list[tuple[str, str, list[int], bytes]]:
    """(name, type, shape, raw bytes): mostly a request that would be served."""
    if (model == "tensorrt_llm") == (rng.random() < 0.1):
        tensors = [
            ("text_input", "BYTES", [1, 1], _string(b"hi")),
            ("max_tokens", "INT32", [1, 1], struct.pack("<i", 5)),
        ]
    else:
        tensors = [
            ("input_ids", "INT32", [1, 2], struct.pack("<2i", 104, 105)),
            ("input_lengths", "INT32", [1, 1], struct.pack("<i", 2)),
            ("request_output_len", "INT32", [1, 1], struct.pack("<i", 5)),
        ]
    for _ in range(rng.choice((0, 0, 0, 1, 2))):
        tensors.append(_odd_tensor(rng))
    if rng.random() < 0.15:
        tensors.pop(rng.randrange(len(tensors)))
    return tensors


def _odd_tensor(rng: random.Random) -> tuple[str, str, list[int], bytes]:
    datatype = rng.choice(tuple(DATATYPES))
    shape = [rng.choice((0, 1, 1, 1, 2, 3)) for _ in range(rng.randrange(4))]
    if rng.random() < 0.1:
        shape.append(rng.choice((-1, 2**31, 2**62)))
    count = int(np.prod(shape)) if all(0 <= n < 10 for n in shape) else 3
    wire = DATATYPES[datatype].wire_dtype
    if wire is None:
        data = _string(rng.randbytes(rng.randrange(4))) * count
    else:
        data = rng.randbytes(wire.itemsize * count)
    return rng.choice(NAMES), datatype, shape, data


def _string(element: bytes) -> bytes:
    return struct.pack("<I", len(element)) + element


def changed_json(rng: random.Random, document: Any) -> Any:
    """A copy in which one value, anywhere, is another, or is gone."""
    document = copy.deepcopy(document)
    places = list(_places(document))
    if not places:
        return rng.choice(ODD_VALUES)
    holder, key = rng.choice(places)
    if rng.random() < 0.2:
        del holder[key]
    elif rng.random() < 0.1 and isinstance(holder, dict):
        holder[rng.choice(("", "é", "x" * 200, *NAMES))] = holder[key]
    else:
        holder[key] = rng.choice(ODD_VALUES)
    return document


def _places(value: Any) -> list[tuple[Any, Any]]:
    keys = (
        list(value)
        if isinstance(value, dict)
        else range(len(value))
        if isinstance(value, list)
        else ()
    )
    return [place for key in keys for place in [(value, key), *_places(value[key])]]


def changed_bytes(rng: random.Random, data: bytes) -> bytes:
    """Change, add, remove or repeat bytes."""
    content = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(content) + 1)
        match rng.randrange(5):
            case 0 if at < len(content):
                content[at] = rng.randrange(256)
            case 1:
                content[at:at] = rng.randbytes(rng.randrange(1, 9))
            case 2:
                del content[at : at + rng.randrange(1, 20)]
            case 3:
                content[at:at] = content[at : at + 40]
            case _:
                content[at : at + 4] = rng.choice((b"\xff" * 4, b"\0" * 4, b"\x7f\xff\xff\xff"))
    return bytes(content)
