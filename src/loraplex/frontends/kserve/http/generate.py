"""The generate extension: one flat JSON object in, one out.

A key that is an input of the model becomes a tensor, `parameters` is an object whose members are
treated alike, `id` is the request id, and everything else is a request parameter. Output tensors
come back as keys: one element as a scalar, more as a flat list.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from loraplex.core.errors import InvalidRequestError, InvalidTensorError
from loraplex.frontends.body_limits import off_loop
from loraplex.frontends.kserve.errors import as_loraplex_error, message_of, status_of
from loraplex.frontends.kserve.http.body import request_id_of
from loraplex.frontends.kserve.messages import (
    JSON_LOGIT_BYTES,
    InferRequest,
    InferResponse,
    Parameter,
    ResponseStream,
)
from loraplex.frontends.kserve.models.kinds import InputSpec
from loraplex.frontends.kserve.models.triton_model import TritonModel
from loraplex.frontends.kserve.tensors import Tensor, from_json, long_values
from loraplex.frontends.long_json import encoded
from loraplex.frontends.streams import ClientDisconnectedError, until_disconnect

NESTED = "parameters"
_MAX_DEPTH = 8
"""Maximum depth of nested lists; no tensor has so many dimensions."""


def decode_generate(model: TritonModel, version: str, document: Mapping[str, Any]) -> InferRequest:
    """Raises InvalidRequestError and InvalidTensorError."""
    tensors, parameters = _read(model, document, prefix="")
    nested = document.get(NESTED, {})
    if not isinstance(nested, dict):
        raise InvalidRequestError(f"Expected JSON object for keyword: '{NESTED}'", param=NESTED)
    more_tensors, more_parameters = _read(model, nested, prefix=f"Converting keyword: '{NESTED}': ")
    return InferRequest(
        model=model.name,
        version=version,
        request_id=request_id_of(document),
        inputs=(*tensors, *more_tensors),
        parameters={**parameters, **more_parameters},
        logit_bytes=JSON_LOGIT_BYTES,
    )


def _read(
    model: TritonModel, members: Mapping[str, Any], *, prefix: str
) -> tuple[list[Tensor], dict[str, Parameter]]:
    tensors: list[Tensor] = []
    parameters: dict[str, Parameter] = {}
    for key, value in members.items():
        row = model.kind.inputs_by_name.get(key)
        if row is not None:
            batch = (-1,) if model.max_batch_size else ()
            tensors.append(_tensor(row, value, (*batch, *row.dims), prefix))
        elif not prefix and key in ("id", NESTED):
            continue
        elif isinstance(value, bool | int | float | str):
            parameters[key] = value
        else:
            raise InvalidRequestError(
                f"{prefix}parameter '{key}' has invalid type. It should be either 'int', 'bool', "
                "or 'string'.",
                param=key,
            )
    return tensors, parameters


def _tensor(row: InputSpec, value: object, dims: tuple[int, ...], prefix: str) -> Tensor:
    values = list(_elements(value))
    shape = fitted_shape(dims, len(values))
    if shape is None or any(isinstance(item, list | dict) for item in values):
        raise InvalidTensorError(
            f"{prefix}The schema can not convert input '{row.name}' to tensor with proper shape; "
            f"send a scalar or a list that fills {list(dims)}",
            param=row.name,
        )
    return from_json(row.name, row.datatype, shape, values)


def _elements(value: object, depth: int = 0) -> Iterator[object]:
    """Elements of nested lists: only their number counts. Deeper lists are elements."""
    if isinstance(value, list) and depth < _MAX_DEPTH:
        for item in value:
            yield from _elements(item, depth + 1)
    else:
        yield value


def fitted_shape(dims: tuple[int, ...], count: int) -> tuple[int, ...] | None:
    """The shape for so many elements: the innermost -1 takes what is left, every other -1 is 1.

    None if the fixed dimensions do not divide the count.
    """
    fixed = math.prod(dim for dim in dims if dim != -1)
    innermost = max((i for i, dim in enumerate(dims) if dim == -1), default=None)
    if innermost is None:
        return dims if fixed == count else None
    if count % fixed:
        return None
    return tuple(
        (count // fixed if i == innermost else 1) if dim == -1 else dim
        for i, dim in enumerate(dims)
    )


def encode_generate(response: InferResponse) -> dict[str, Any]:
    """The flat object of one response."""
    document: dict[str, Any] = {"id": response.request_id} if response.request_id else {}
    document["model_name"] = response.model
    document["model_version"] = response.version
    document.update(response.parameters)
    for tensor in response.outputs:
        values = long_values(tensor)
        document[tensor.name] = values[0] if len(values) == 1 else values
    return document


class GenerateEvents:
    """An ASGI response: each inference response as `data: {json}`, no closing mark.

    The first one fixes the status: if it is an error, the stream has the error's status. The
    source is closed in any case; a client that disconnects ends it.
    """

    def __init__(self, responses: ResponseStream) -> None:
        self._responses = responses
        self._status = 200

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope
        try:
            with contextlib.suppress(ClientDisconnectedError):
                await until_disconnect(receive, self._send_all(send))
        finally:
            await self._responses.aclose()

    async def _send_all(self, send: Send) -> None:
        has_started = False
        while (event := await self._next()) is not None:
            if not has_started:
                await send(_start(self._status))
                has_started = True
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _next(self) -> bytes | None:
        """The next event; None at the end, which an error is, too."""
        if self._status != 200:
            return None
        try:
            response = await anext(self._responses, None)
            if response is None:
                return None
            return await off_loop(response.num_bytes, lambda: _event(encode_generate(response)))
        except Exception as raised:
            error = as_loraplex_error(raised)
            self._status = status_of(error).http
            return _event({"error": message_of(error)})


def _event(content: object) -> bytes:
    return b"".join((b"data: ", *encoded(content), b"\n\n"))


def _start(status: int) -> Message:
    headers = [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
    ]
    return {"type": "http.response.start", "status": status, "headers": headers}
