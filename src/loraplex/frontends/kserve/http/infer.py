"""The body of POST .../infer: JSON, and the binary tensor data extension.

A body is a JSON object, and after it, in order, the bytes of the tensors that say
`binary_data_size`; the header Inference-Header-Content-Length tells where the JSON ends.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from loraplex.core.errors import InvalidRequestError, InvalidTensorError
from loraplex.frontends.kserve.http.body import length_of, parse_object
from loraplex.frontends.kserve.messages import InferRequest, InferResponse, Parameter
from loraplex.frontends.kserve.outputs import (
    OutputWish,
    Wishes,
    delivered,
    output_wish,
    place_of,
)
from loraplex.frontends.kserve.shared_memory import Place, TenantMemory
from loraplex.frontends.kserve.tensors import (
    Tensor,
    check_raw_size,
    datatype_of,
    from_json,
    from_raw,
    to_raw,
    to_values,
)

HEADER_LENGTH = "Inference-Header-Content-Length"


def decode_request(
    body: bytes, header_length: str | None, *, model: str, version: str, memory: TenantMemory
) -> tuple[InferRequest, Wishes]:
    """The request, and how its outputs are wanted.

    Raises InvalidRequestError, InvalidTensorError, and NotFoundError for a shared memory region.
    """
    split = len(body) if header_length is None else _header_length(header_length, len(body))
    document = parse_object(body[:split])
    parameters = _parameters(document, "the request")
    default = OutputWish(is_binary=parameters.get("binary_data_output") is True)
    requested = _outputs(document, default, memory)
    request = InferRequest(
        model=model,
        version=version,
        request_id=request_id_of(document),
        inputs=_inputs(document, body[split:], memory),
        requested=tuple(requested),
        parameters=_of_request(parameters),
    )
    return request, Wishes(memory, default, requested)


def _header_length(header: str, body_length: int) -> int:
    length = length_of(header)
    if length is None or not 0 < length <= body_length:
        raise InvalidRequestError(
            f"{HEADER_LENGTH} is {header[:40]!r}; it must be the length of the JSON part, in "
            f"[1, {body_length}]"
        )
    return length


def request_id_of(document: Mapping[str, Any]) -> str:
    request_id = document.get("id", "")
    if not isinstance(request_id, str):
        raise InvalidRequestError(
            f"'id' must be a string, got {type(request_id).__name__}", param="id"
        )
    return request_id


def _parameters(holder: Mapping[str, Any], owner: str, name: str | None = None) -> dict[str, Any]:
    """owner, name: what the holder is, and what it is called if it has a name."""
    parameters = holder.get("parameters", {})
    if not isinstance(parameters, dict):
        whose = owner if name is None else f"{owner} '{name}'"
        raise InvalidRequestError(
            f"'parameters' of {whose} must be a JSON object", param="parameters"
        )
    return parameters


def _of_request(parameters: Mapping[str, Any]) -> Mapping[str, Parameter]:
    for key, value in parameters.items():
        if not isinstance(value, bool | int | float | str):
            raise InvalidRequestError(
                f"parameter '{key}' has invalid type. It should be either 'int', 'bool', "
                "'double' or 'string'.",
                param=key,
            )
    return parameters


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


def _inputs(document: Mapping[str, Any], blob: bytes, memory: TenantMemory) -> tuple[Tensor, ...]:
    if "inputs" not in document:
        raise InvalidRequestError(
            "Unable to parse 'inputs': attempt to access non-existing object member 'inputs'",
            param="inputs",
        )
    tensors = []
    offset = 0
    for entry in _named(document, "inputs"):
        name = entry["name"]
        parameters = _parameters(entry, "input", name)
        size = parameters.get("binary_data_size")
        place = place_of(name, parameters)
        if place is not None:
            tensors.append(_shared_input(entry, place, memory))
        elif size is None:
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


def _shared_input(entry: Mapping[str, Any], place: Place, memory: TenantMemory) -> Tensor:
    name = entry["name"]
    datatype = datatype_of(name, entry.get("datatype")).name
    check_raw_size(name, datatype, _shape(entry), place.byte_size)
    return from_raw(name, datatype, _shape(entry), memory.read(place))


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


def _outputs(
    document: Mapping[str, Any], default: OutputWish, memory: TenantMemory
) -> dict[str, OutputWish]:
    """Requested outputs, in the client's order."""
    requested = {}
    for entry in _named(document, "outputs"):
        name = entry["name"]
        parameters = _parameters(entry, "output", name)
        is_binary = bool(parameters.get("binary_data", default.is_binary))
        requested[name] = output_wish(name, parameters, is_binary=is_binary, memory=memory)
    return requested


def encode_response(response: InferResponse, wishes: Wishes) -> tuple[bytes, int | None]:
    """(body, length of its JSON part; None if there is nothing else)."""
    outputs: list[dict[str, Any]] = []
    blobs: list[bytes] = []
    for output in delivered(response.outputs, wishes):
        tensor = output.tensor
        entry: dict[str, Any] = {
            "name": tensor.name,
            "datatype": tensor.datatype,
            "shape": tensor.shape,
        }
        if output.is_in_message and output.wish.is_binary:
            blobs.append(raw := to_raw(tensor))
            entry["parameters"] = {"binary_data_size": len(raw)}
        elif output.is_in_message:
            entry["data"] = to_values(tensor)
        outputs.append(entry)
    header = msgspec.json.encode(_document(response, outputs))
    return b"".join([header, *blobs]), len(header) if blobs else None


def _document(response: InferResponse, outputs: Sequence[object]) -> dict[str, Any]:
    document: dict[str, Any] = {"id": response.request_id} if response.request_id else {}
    document["model_name"] = response.model
    document["model_version"] = response.version
    if response.parameters:
        document["parameters"] = dict(response.parameters)
    document["outputs"] = outputs
    return document
