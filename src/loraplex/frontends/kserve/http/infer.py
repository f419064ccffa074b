"""The body of POST .../infer: JSON, and the binary tensor data extension.

A body is a JSON object, and after it, in order, the bytes of the tensors that say
`binary_data_size`; the header Inference-Header-Content-Length tells where the JSON ends.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from loraplex.core.errors import InvalidRequestError, InvalidTensorError, UnsupportedFeatureError
from loraplex.frontends.kserve.http.body import parse_object
from loraplex.frontends.kserve.messages import (
    InferRequest,
    InferResponse,
    Parameter,
    refuse_shared_memory,
)
from loraplex.frontends.kserve.tensors import (
    Tensor,
    datatype_of,
    from_json,
    from_raw,
    to_raw,
    to_values,
)

HEADER_LENGTH = "Inference-Header-Content-Length"


@dataclasses.dataclass(frozen=True, slots=True)
class BinaryWish:
    """Which outputs the client wants as bytes behind the JSON."""

    default: bool
    by_name: Mapping[str, bool]

    def covers(self, name: str) -> bool:
        return self.by_name.get(name, self.default)


def decode_request(
    body: bytes, header_length: str | None, *, model: str, version: str
) -> tuple[InferRequest, BinaryWish]:
    """Raises InvalidRequestError, InvalidTensorError, UnsupportedFeatureError."""
    split = len(body) if header_length is None else _header_length(header_length, len(body))
    document = parse_object(body[:split])
    parameters = _object(document, "parameters", "the request")
    requested = _outputs(document)
    request = InferRequest(
        model=model,
        version=version,
        request_id=request_id_of(document),
        inputs=_inputs(document, body[split:]),
        requested=tuple(requested),
        parameters=_parameters(parameters),
    )
    return request, BinaryWish(parameters.get("binary_data_output") is True, requested)


def _header_length(header: str, body_length: int) -> int:
    if not header.isdigit() or not 0 < int(header) <= body_length:
        raise InvalidRequestError(
            f"{HEADER_LENGTH} is {header!r}; it must be the length of the JSON part, in "
            f"[1, {body_length}]"
        )
    return int(header)


def request_id_of(document: Mapping[str, Any]) -> str:
    request_id = document.get("id", "")
    if not isinstance(request_id, str):
        raise InvalidRequestError(
            f"'id' must be a string, got {type(request_id).__name__}", param="id"
        )
    return request_id


def _object(holder: Mapping[str, Any], key: str, owner: str) -> dict[str, Any]:
    value = holder.get(key, {})
    if not isinstance(value, dict):
        raise InvalidRequestError(f"'{key}' of {owner} must be a JSON object", param=key)
    return value


def _parameters(raw: Mapping[str, Any]) -> dict[str, Parameter]:
    for key, value in raw.items():
        if not isinstance(value, bool | int | float | str):
            raise InvalidRequestError(
                f"parameter '{key}' has invalid type. It should be either 'int', 'bool', "
                "'double' or 'string'.",
                param=key,
            )
    return dict(raw)


def _named(document: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """The objects of `inputs` or `outputs`, each with a name."""
    entries = document.get(key, [])
    if not isinstance(entries, list):
        raise InvalidRequestError(f"'{key}' must be a list of objects", param=key)
    for entry in entries:
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            raise InvalidRequestError(
                f"every element of '{key}' must be an object with a string 'name'", param=key
            )
    return entries


# ---------------------------------------------------------------- inputs


def _inputs(document: Mapping[str, Any], blob: bytes) -> tuple[Tensor, ...]:
    if "inputs" not in document:
        raise InvalidRequestError(
            "Unable to parse 'inputs': attempt to access non-existing object member 'inputs'",
            param="inputs",
        )
    tensors = []
    offset = 0
    for entry in _named(document, "inputs"):
        parameters = _object(entry, "parameters", f"input '{entry['name']}'")
        refuse_shared_memory("input", entry["name"], parameters)
        size = parameters.get("binary_data_size")
        if size is None:
            tensors.append(_json_input(entry))
        else:
            tensors.append(_binary_input(entry, size, blob, offset))
            offset += size
    if offset != len(blob):
        raise InvalidRequestError(
            f"unexpected additional input data: {len(blob)} bytes follow the JSON, the inputs' "
            f"'binary_data_size' sum up to {offset}"
        )
    return tuple(tensors)


def _shape(entry: Mapping[str, Any]) -> list[Any]:
    shape = entry.get("shape")
    if not isinstance(shape, list):
        raise InvalidTensorError(
            f"input '{entry['name']}' must have a 'shape': a list of integers", param=entry["name"]
        )
    return shape


def _json_input(entry: Mapping[str, Any]) -> Tensor:
    name = entry["name"]
    if "data" not in entry:
        raise InvalidTensorError(
            f"input '{name}' has neither 'data' nor a parameter 'binary_data_size'", param=name
        )
    datatype = datatype_of(name, entry.get("datatype")).name
    return from_json(name, datatype, _shape(entry), entry["data"])


def _binary_input(entry: Mapping[str, Any], size: object, blob: bytes, offset: int) -> Tensor:
    name = entry["name"]
    left = len(blob) - offset
    if type(size) is not int or not 0 <= size <= left:
        raise InvalidTensorError(
            f"'binary_data_size' of input '{name}' is {size!r}; {left} bytes of binary data are "
            "left for it",
            param=name,
        )
    datatype = datatype_of(name, entry.get("datatype")).name
    return from_raw(name, datatype, _shape(entry), blob[offset : offset + size])


# ---------------------------------------------------------------- outputs


def _outputs(document: Mapping[str, Any]) -> dict[str, bool]:
    """Requested outputs -> whether as binary; in the client's order."""
    default = _object(document, "parameters", "the request").get("binary_data_output") is True
    requested = {}
    for entry in _named(document, "outputs"):
        name = entry["name"]
        parameters = _object(entry, "parameters", f"output '{name}'")
        refuse_shared_memory("output", name, parameters)
        if parameters.get("classification", 0) != 0:
            raise UnsupportedFeatureError(
                f"output '{name}': classification is not served", param=name
            )
        requested[name] = bool(parameters.get("binary_data", default))
    return requested


def encode_response(response: InferResponse, wish: BinaryWish) -> tuple[bytes, int | None]:
    """(body, length of its JSON part; None if there is nothing else)."""
    outputs: list[dict[str, Any]] = []
    blobs: list[bytes] = []
    for tensor in response.outputs:
        entry: dict[str, Any] = {
            "name": tensor.name,
            "datatype": tensor.datatype,
            "shape": list(tensor.shape),
        }
        if wish.covers(tensor.name):
            blobs.append(to_raw(tensor))
            entry["parameters"] = {"binary_data_size": len(blobs[-1])}
        else:
            entry["data"] = to_values(tensor)
        outputs.append(entry)
    header = msgspec.json.encode(_document(response, outputs))
    return b"".join([header, *blobs]), len(header) if blobs else None


def _document(response: InferResponse, outputs: Sequence[object]) -> dict[str, Any]:
    return {
        **({"id": response.request_id} if response.request_id else {}),
        "model_name": response.model,
        "model_version": response.version,
        **({"parameters": response.parameters} if response.parameters else {}),
        "outputs": outputs,
    }
