"""Protobuf messages of inference <-> our own. Knows nothing of calls and streams."""

from collections.abc import Mapping
from typing import Any

from tritonclient.grpc import service_pb2 as pb

from loraplex.core.errors import InvalidRequestError, InvalidTensorError
from loraplex.frontends.kserve.messages import (
    InferRequest,
    InferResponse,
    Parameter,
    refuse_shared_memory,
)
from loraplex.frontends.kserve.tensors import Tensor, datatype_of, from_raw, from_values, to_raw

FINAL = "triton_final_response"

_CONTENTS = {
    "BOOL": "bool_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
"""Where the typed values of a data type stand; FP16 and BF16 have raw contents only."""


def decode_request(message: Any) -> InferRequest:
    """A ModelInferRequest. Raises as the codecs of its parts do."""
    for output in message.outputs:
        refuse_shared_memory("output", output.name, decode_parameters(output.parameters))
    return InferRequest(
        model=message.model_name,
        version=message.model_version,
        request_id=message.id,
        inputs=_inputs(message),
        requested=tuple(output.name for output in message.outputs),
        parameters=decode_parameters(message.parameters),
    )


def decode_parameters(parameters: Mapping[str, Any]) -> dict[str, Parameter]:
    """Each the value of its oneof; one without a value is left out."""
    choices = {key: value.WhichOneof("parameter_choice") for key, value in parameters.items()}
    return {
        key: getattr(parameters[key], choice)
        for key, choice in choices.items()
        if choice is not None
    }


def _inputs(message: Any) -> tuple[Tensor, ...]:
    raw = message.raw_input_contents
    for entry in message.inputs:
        refuse_shared_memory("input", entry.name, decode_parameters(entry.parameters))
    if raw and len(raw) != len(message.inputs):
        raise InvalidRequestError(
            f"expected {len(message.inputs)} raw_input_contents, one per input, got {len(raw)}; "
            "send all inputs raw or all with contents",
            param="raw_input_contents",
        )
    tensors = []
    for index, entry in enumerate(message.inputs):
        if raw:
            tensors.append(_raw_input(message, entry, raw[index]))
        else:
            tensors.append(_typed_input(entry))
    return tuple(tensors)


def _raw_input(message: Any, entry: Any, data: bytes) -> Tensor:
    if entry.HasField("contents"):
        raise InvalidTensorError(
            "contents field must not be specified when using raw_input_contents for "
            f"'{entry.name}' for model '{message.model_name}'",
            param=entry.name,
        )
    return from_raw(entry.name, entry.datatype, list(entry.shape), data)


def _typed_input(entry: Any) -> Tensor:
    datatype = datatype_of(entry.name, entry.datatype).name
    field = _CONTENTS.get(datatype)
    if field is None:
        raise InvalidTensorError(
            f"input '{entry.name}' is {datatype}; send it in raw_input_contents, there is no "
            "typed content for it",
            param=entry.name,
        )
    filled = [name.name for name, _ in entry.contents.ListFields()]
    if any(name != field for name in filled):
        raise InvalidTensorError(
            f"input '{entry.name}' is {datatype}: its values belong in {field}, got "
            f"{', '.join(filled)}",
            param=entry.name,
        )
    values = list(getattr(entry.contents, field))
    return from_values(entry.name, datatype, list(entry.shape), values)


def encode_response(response: InferResponse) -> Any:
    """A ModelInferResponse with raw outputs."""
    message = pb.ModelInferResponse(
        model_name=response.model, model_version=response.version, id=response.request_id
    )
    _set_parameters(message, response.parameters)
    for tensor in response.outputs:
        message.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        message.raw_output_contents.append(to_raw(tensor))
    return message


def encode_piece(response: InferResponse) -> Any:
    """A ModelStreamInferResponse that says whether it is the last one of its request."""
    message = encode_response(response)
    message.parameters[FINAL].bool_param = response.is_final
    return pb.ModelStreamInferResponse(infer_response=message)


def encode_failure(request: Any, text: str) -> Any:
    """The last ModelStreamInferResponse of a request that failed."""
    message = pb.ModelInferResponse(
        model_name=request.model_name, model_version=request.model_version, id=request.id
    )
    message.parameters[FINAL].bool_param = True
    return pb.ModelStreamInferResponse(error_message=text, infer_response=message)


def _set_parameters(message: Any, parameters: Mapping[str, Parameter]) -> None:
    for key, value in parameters.items():
        match value:
            case bool():
                message.parameters[key].bool_param = value
            case int():
                message.parameters[key].int64_param = value
            case float():
                message.parameters[key].double_param = value
            case str():
                message.parameters[key].string_param = value
