"""Messages of the request socket <-> our own."""

from collections.abc import Sequence

from loraplex.frontends.kserve.errors import as_loraplex_error, message_of, status_of
from loraplex.frontends.kserve.failures import FailedResponse
from loraplex.frontends.kserve.messages import InferRequest, InferResponse
from loraplex.frontends.kserve.stub.wire import Failure, Infer, Response, WireTensor
from loraplex.frontends.kserve.tensors import Tensor, from_raw, to_raw


def decode_request(message: Infer) -> InferRequest:
    """Raises InvalidTensorError."""
    return InferRequest(
        model=message.model,
        request_id=message.request_id,
        inputs=tuple(from_raw(t.name, t.datatype, t.shape, t.data) for t in message.inputs),
        requested=message.requested,
        parameters=message.parameters,
    )


def encode_response(number: int, response: InferResponse) -> Response:
    """number: the id of the request on its connection."""
    return Response(
        id=number,
        outputs=_encoded(response.outputs),
        parameters=dict(response.parameters),
        is_final=response.is_final,
    )


def encode_failure(number: int, raised: Exception) -> Failure:
    """Encode an error's kind and text; an internal error is logged and shows no details."""
    error = as_loraplex_error(raised)
    outputs = raised.outputs if isinstance(raised, FailedResponse) else ()
    return Failure(
        id=number,
        kind=status_of(error).grpc,
        message=message_of(error),
        outputs=_encoded(outputs),
    )


def _encoded(tensors: Sequence[Tensor]) -> tuple[WireTensor, ...]:
    return tuple(WireTensor(t.name, t.datatype, t.shape, to_raw(t)) for t in tensors)
