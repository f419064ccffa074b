"""Protobuf messages of inference <-> our own. Knows nothing of calls and streams."""

from collections.abc import Mapping, Sequence
from typing import Any

from tritonclient.grpc import service_pb2 as pb

from loraplex.core.errors import InvalidRequestError, InvalidTensorError
from loraplex.frontends.kserve.grpc.wire import MessageReader
from loraplex.frontends.kserve.messages import (
    NO_PARAMETERS,
    InferRequest,
    InferResponse,
    Parameter,
)
from loraplex.frontends.kserve.outputs import (
    BINARY,
    OutputWish,
    Wishes,
    delivered,
    output_wish,
    place_of,
    shared_tensor,
)
from loraplex.frontends.kserve.shared_memory import Place, TenantMemory
from loraplex.frontends.kserve.tensors import (
    Tensor,
    form_of,
    from_raw,
    from_values,
    to_raw,
)

FINAL = "triton_final_response"

_CHOICES = {
    bool: "bool_param",
    int: "int64_param",
    float: "double_param",
    str: "string_param",
}
"""Where the value of a parameter stands, by its type."""


def infer_reader(max_values: int) -> MessageReader:
    """Return a reader of ModelInferRequests; max_values as in `MessageReader`."""
    return MessageReader(pb.ModelInferRequest, max_values, "raw_input_contents")


def decode_request(
    message: Any, raw: Sequence[bytes | memoryview], memory: TenantMemory
) -> tuple[InferRequest, Wishes]:
    """A ModelInferRequest, and how its outputs are wanted. Raises as the codecs of its parts do.

    raw: its raw_input_contents, which are not in the message.
    """
    wishes = {
        output.name: _wish(output, memory) if output.parameters else BINARY
        for output in message.outputs[:]
    }
    request = InferRequest(
        model=message.model_name,
        version=message.model_version,
        request_id=message.id,
        inputs=_inputs(message, raw, memory),
        requested=tuple(wishes),
        parameters=decode_parameters(message.parameters) if message.parameters else NO_PARAMETERS,
    )
    return request, Wishes(memory, BINARY, wishes)


def decode_parameters(parameters: Mapping[str, Any]) -> dict[str, Parameter]:
    """Each the value of its oneof; one without a value is left out."""
    choices = {key: value.WhichOneof("parameter_choice") for key, value in parameters.items()}
    return {
        key: getattr(parameters[key], choice)
        for key, choice in choices.items()
        if choice is not None
    }


def _wish(output: Any, memory: TenantMemory) -> OutputWish:
    parameters = decode_parameters(output.parameters)
    return output_wish(output.name, parameters, is_binary=True, memory=memory)


def _inputs(
    message: Any, raw: Sequence[bytes | memoryview], memory: TenantMemory
) -> tuple[Tensor, ...]:
    """Tensors in shared memory have no raw contents, all others have them or none has."""
    entries = message.inputs[:]  # a list, in one step
    places = [_place(entry) if entry.parameters else None for entry in entries]
    num_here = places.count(None)
    if raw and len(raw) != num_here:
        raise InvalidRequestError(
            f"expected {num_here} raw_input_contents, one per input that is not in shared memory, "
            f"got {len(raw)}; send all inputs raw or all with contents",
            param="raw_input_contents",
        )
    contents = iter(raw)
    tensors = []
    for entry, place in zip(entries, places, strict=True):
        if place is not None:
            form = entry.name, entry.datatype, entry.shape[:]
            tensors.append(shared_tensor(*form, place, memory))
        elif raw:
            tensors.append(_raw_input(message, entry, next(contents)))
        else:
            tensors.append(_typed_input(entry))
    return tuple(tensors)


def _place(entry: Any) -> Place | None:
    return place_of(entry.name, decode_parameters(entry.parameters))


def _raw_input(message: Any, entry: Any, data: bytes | memoryview) -> Tensor:
    if entry.HasField("contents"):
        raise InvalidTensorError(
            "contents field must not be specified when using raw_input_contents for "
            f"'{entry.name}' for model '{message.model_name}'",
            param=entry.name,
        )
    return from_raw(entry.name, entry.datatype, entry.shape[:], data)


def _typed_input(entry: Any) -> Tensor:
    row, dims = form_of(entry.name, entry.datatype, entry.shape[:])
    if not row.contents:
        raise InvalidTensorError(
            f"input '{entry.name}' is {row.name}; send it in raw_input_contents, there is no "
            "typed content for it",
            param=entry.name,
        )
    filled = [name.name for name, _ in entry.contents.ListFields()]
    if any(name != row.contents for name in filled):
        raise InvalidTensorError(
            f"input '{entry.name}' is {row.name}: its values belong in {row.contents}, got "
            f"{', '.join(filled)}",
            param=entry.name,
        )
    return from_values(entry.name, row.name, dims, getattr(entry.contents, row.contents)[:])


def encode_response(response: InferResponse, wishes: Wishes) -> Any:
    """A ModelInferResponse with raw outputs; of those in shared memory the contents are empty."""
    message = pb.ModelInferResponse()
    _fill(message, response, wishes)
    return message


def encode_piece(response: InferResponse, wishes: Wishes) -> Any:
    """A ModelStreamInferResponse, marked if it is the last one of its request."""
    piece = pb.ModelStreamInferResponse()
    message = piece.infer_response  # filled in its place: given later it would be copied
    _fill(message, response, wishes)
    message.parameters[FINAL].bool_param = response.is_final
    return piece


def encode_failure(request: Any, text: str, outputs: Sequence[Tensor] = ()) -> Any:
    """The last ModelStreamInferResponse of a request that failed; some have outputs even so."""
    message = pb.ModelInferResponse(
        model_name=request.model_name, model_version=request.model_version, id=request.id
    )
    message.parameters[FINAL].bool_param = True
    for tensor in outputs:
        _add_output(message, tensor, to_raw(tensor))
    return pb.ModelStreamInferResponse(error_message=text, infer_response=message)


def _fill(message: Any, response: InferResponse, wishes: Wishes) -> None:
    """An empty ModelInferResponse."""
    message.model_name = response.model
    message.model_version = response.version
    message.id = response.request_id
    _set_parameters(message, response.parameters)
    for output in delivered(response.outputs, wishes):
        tensor = output.tensor
        _add_output(message, tensor, to_raw(tensor) if output.is_in_message else b"")


def _add_output(message: Any, tensor: Tensor, data: bytes) -> None:
    message.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
    message.raw_output_contents.append(data)


def _set_parameters(message: Any, parameters: Mapping[str, Parameter]) -> None:
    into = message.parameters
    for key, value in parameters.items():
        setattr(into[key], _CHOICES[type(value)], value)
