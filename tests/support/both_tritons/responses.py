"""Responses as flat mappings that can be compared: names of fields -> plain values.

A tensor is one field, "output NAME": its type, shape and elements. A failure has "status", the
HTTP status or the name of the gRPC code, and "error", its text.
"""

import contextlib
import gzip
import http.client
import json
import queue
import zlib
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import tritonclient.grpc
import tritonclient.http
from google.protobuf import json_format
from tritonclient.utils import InferenceServerException

from support.both_tritons.servers import Address

Response = dict[str, Any]

SECONDS = 60.0
_DIGITS = 4
"""Compared digits of floating-point elements; the digits after them are rounding."""
_FINAL = "parameter triton_final_response"
_GROWING = ("output text_output", "output output_ids", "output output_log_probs")
_OF_A_PIECE = ("output sequence_length", "output num_output_tokens", "output logprobs")
"""Fields of a streamed piece that state how much it contains."""
_KEPT_HEADERS = ("content-type", "inference-header-content-length", "content-encoding", "allow")

HTTP, GRPC = tritonclient.http, tritonclient.grpc


@contextlib.contextmanager
def client_of(server: Address, wire: ModuleType) -> Iterator[Any]:
    address = server.http if wire is HTTP else server.grpc
    more = {"network_timeout": SECONDS} if wire is HTTP else {}
    with wire.InferenceServerClient(address, **more) as client:
        yield client


def call_method(
    server: Address, wire: ModuleType, method: str, *args: Any, **kwargs: Any
) -> Response:
    """Call a tritonclient method that returns JSON, and return the result or the failure."""
    if wire is GRPC and method.startswith("get_"):
        kwargs["as_json"] = True
    with client_of(server, wire) as client:
        try:
            result = getattr(client, method)(*args, **kwargs)
        except InferenceServerException as error:
            return failure(error)
    return {"status": "OK", "result": result}


def infer(
    server: Address, wire: ModuleType, model: str, inputs: Sequence[Any], **kwargs: Any
) -> Response:
    """Return the one response to a request, or its failure."""
    with client_of(server, wire) as client:
        try:
            return fields_of(client.infer(model, inputs, **kwargs), wire)
        except InferenceServerException as error:
            return failure(error)


def stream(server: Address, model: str, inputs: Sequence[Any], **kwargs: Any) -> Response:
    """Return the responses of a request over ModelStreamInfer as one, or its failure.

    Growing fields are joined, because a slow reader gets several pieces in one.
    """
    return joined(pieces(server, model, inputs, **kwargs))


def pieces(server: Address, model: str, inputs: Sequence[Any], **kwargs: Any) -> list[Response]:
    """Return the responses of a request over ModelStreamInfer."""
    kwargs.setdefault("enable_empty_final_response", True)
    found: queue.Queue[Any] = queue.Queue()
    responses: list[Response] = []
    with client_of(server, GRPC) as client:
        client.start_stream(lambda result, error: found.put(error or result))
        client.async_stream_infer(model, inputs, **kwargs)
        while not responses or not is_last(responses[-1]):
            responses.append(piece_of(found.get(timeout=SECONDS)))
        client.stop_stream()
    return responses


def joined(responses: Sequence[Response]) -> Response:
    """Return the last response's fields, with incremental tensors concatenated."""
    whole = {name: value for name, value in responses[-1].items() if name not in _OF_A_PIECE}
    for name in {name for response in responses for name in response if name in _GROWING}:
        tensors = [response[name] for response in responses if response.get(name)]
        arrays = [np.array(elements, dtype=_dtype(kind)) for kind, _, elements in tensors]
        if all(kind == "BYTES" for kind, _, _ in tensors):
            whole[name] = "BYTES", [b"".join(row) for row in zip(*arrays, strict=True)]
        else:
            whole[name] = tensors[0][0], np.concatenate(arrays, axis=-1).tolist()
    return whole


def _dtype(kind: str) -> Any:
    return object if kind == "BYTES" else np.float64


def piece_of(piece: Any) -> Response:
    """Convert what a stream's callback got: a response, or the failure that ends the request."""
    return failure(piece) if isinstance(piece, InferenceServerException) else fields_of(piece, GRPC)


def is_last(response: Response) -> bool:
    return response["status"] != "OK" or response[_FINAL] is True


def failure(error: InferenceServerException) -> Response:
    status = str(error.status() or "")
    return {"status": status.removeprefix("StatusCode."), "error": error.message()}


def fields_of(result: Any, wire: ModuleType, *, is_in_message: bool = True) -> Response:
    """Return the fields of an InferResult. is_in_message: False for outputs in shared memory."""
    raw = result.get_response()
    message = (
        raw if wire is HTTP else json_format.MessageToDict(raw, preserving_proto_field_name=True)
    )
    rows = message.get("outputs", [])
    return {
        "status": "OK",
        "model": (message.get("model_name"), message.get("model_version")),
        "id": message.get("id", ""),
        **{f"parameter {k}": v for k, v in _parameters(message.get("parameters", {})).items()},
        "outputs": [row["name"] for row in rows],
        **{
            f"output {row['name']}": _tensor(row, result, is_in_message=is_in_message)
            for row in rows
        },
    }


def _parameters(raw: Mapping[str, Any]) -> dict[str, Any]:
    """HTTP has plain values, gRPC one field of a union each."""
    return {k: next(iter(v.values())) if isinstance(v, dict) else v for k, v in raw.items()}


def _tensor(row: Mapping[str, Any], result: Any, *, is_in_message: bool) -> tuple[Any, ...]:
    array = result.as_numpy(row["name"]) if is_in_message else None
    if array is not None and array.dtype.kind == "f":
        array = np.round(array.astype(np.float64), _DIGITS)
    shape = [int(size) for size in row["shape"]]
    return row["datatype"], shape, None if array is None else array.tolist()


def sent(
    server: Address,
    method: str,
    path: str,
    body: bytes | Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Send plain HTTP; return the status, content headers and body as JSON, events or bytes."""
    content = json.dumps(body).encode() if isinstance(body, Mapping) else body
    connection = http.client.HTTPConnection(server.http, timeout=SECONDS)
    with contextlib.closing(connection):
        connection.request(method, path, content, dict(headers or {}))
        response = connection.getresponse()
        data = _inflated(response.read(), response.getheader("content-encoding", ""))
    headers_kept = {name: response.getheader(name) for name in _KEPT_HEADERS}
    return {
        "status": response.status,
        **{f"header {name}": value for name, value in headers_kept.items() if value is not None},
        **_body(data),
    }


def _inflated(data: bytes, encoding: str) -> bytes:
    match encoding:
        case "gzip":
            return gzip.decompress(data)
        case "deflate":
            return zlib.decompress(data)
    return data


def _body(data: bytes) -> Response:
    if data.startswith(b"data: "):
        events = [event.removeprefix("data: ") for event in data.decode().split("\n\n") if event]
        return _joined_events([json.loads(event) for event in events])
    try:
        document = json.loads(data)
    except ValueError:
        return {"body": data}
    if isinstance(document, dict):
        return _fields(document)
    return {"body": document}


def _fields(document: Mapping[str, Any]) -> Response:
    """Return the document's members as fields: `error` as it is, others as body fields."""
    return {k if k == "error" else f"body {k}": _rounded(v) for k, v in document.items()}


def _joined_events(events: Sequence[Mapping[str, Any]]) -> Response:
    """Return the last event with the text of all, as a slow reader gets several in one."""
    texts = [event["text_output"] for event in events if "text_output" in event]
    last = dict(events[-1])
    if texts and all(isinstance(text, str) for text in texts):
        last["text_output"] = "".join(texts)
    return {"is stream": True, **_fields(last)}


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return round(value, _DIGITS) if isinstance(value, float) else value
