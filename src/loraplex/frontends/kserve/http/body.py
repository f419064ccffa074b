"""Bodies: their length, content encodings, and JSON in and out.

The body of POST .../infer is a JSON object, and after it, in order, the bytes of the tensors that
have `binary_data_size`; the header Inference-Header-Content-Length has the length of the JSON.

The generate extension has one flat JSON object in, one out. A key that is an input of the model
becomes a tensor, `parameters` is an object whose members are treated alike, `id` is the request id,
and everything else is a request parameter. Output tensors come back as keys: one element as a
scalar, more as a flat list.
"""

import contextlib
import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from loraplex.core.errors import (
    InvalidParameterError,
    InvalidRequestError,
    InvalidTensorError,
    PayloadTooLargeError,
)
from loraplex.core.principal import Principal
from loraplex.core.request import BINARY_LOGIT_BYTES
from loraplex.frontends.body_limits import DEFAULT_JSON_LIMITS, JsonLimits, off_loop
from loraplex.frontends.kserve.errors import as_loraplex_error, message_of, status_of
from loraplex.frontends.kserve.messages import (
    JSON_LOGIT_BYTES,
    InferRequest,
    InferResponse,
    Parameter,
    ResponseStream,
)
from loraplex.frontends.kserve.models.kinds import InputSpec
from loraplex.frontends.kserve.models.triton_model import TritonModel
from loraplex.frontends.kserve.outputs import (
    BINARY,
    INLINE,
    REGION,
    Wishes,
    delivered,
    output_wish,
    place_of,
    shared_tensor,
)
from loraplex.frontends.kserve.shared_memory import TenantMemory
from loraplex.frontends.kserve.tensors import (
    Tensor,
    from_json,
    from_raw,
    long_values,
    to_raw,
)
from loraplex.frontends.long_json import encoded, send_pieces
from loraplex.frontends.streams import ClientDisconnectedError, until_disconnect

DEFAULT_MAX_BODY_BYTES = 64 * 1024 * 1024
ENCODINGS = ("gzip", "deflate")
_IDENTITY = "identity"
LENGTH = re.compile("[0-9]{1,18}")
"""A number of bytes that is not absurd, in a header."""
_CHUNK_BYTES = 64 * 1024
_MAX_GZIP_MEMBERS = 10_000
"""Members of one body: the shortest has 20 empty bytes, so a limit of bytes is not enough."""
Bytes = bytes | bytearray
_GZIP_WINDOW = 16 + zlib.MAX_WBITS


def too_large(max_bytes: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(f"the request body is larger than the limit of {max_bytes} bytes")


def decompress(body: Bytes, encoding: str, max_bytes: int) -> Bytes:
    """The body without its Content-Encoding; the limit holds for what comes out, too.

    gzip data may have several members, one after the other (RFC 1952).
    """
    if not encoding:
        return body
    encoding = encoding.strip().lower()
    if encoding in ("", _IDENTITY):
        return body
    if encoding not in ENCODINGS:
        raise InvalidRequestError(
            f"Unsupported content-encoding '{encoding}'; use gzip, deflate or identity"
        )
    is_gzip = encoding == "gzip"
    data, rest = bytearray(), memoryview(body)
    try:
        for _ in range(_MAX_GZIP_MEMBERS if is_gzip else 1):
            unpacker = zlib.decompressobj(_GZIP_WINDOW if is_gzip else zlib.MAX_WBITS)
            rest = rest[_unpack(unpacker, rest, data, max_bytes) :]
            if not rest:
                return data
    except zlib.error as error:
        raise InvalidRequestError(f"the body is not valid {encoding} data: {error}") from None
    raise InvalidRequestError(
        f"the body is not valid {encoding} data: {len(rest)} bytes follow its end"
    )


def _unpack(unpacker: Any, packed: memoryview, data: bytearray, max_bytes: int) -> int:
    """Append to data what is packed first; returns how long that was.

    It goes by chunks because zlib copies what follows the end. Raises zlib.error.
    """
    position = 0
    while not unpacker.eof:
        chunk = packed[position : position + _CHUNK_BYTES]
        if not chunk:
            raise zlib.error("it ends early")
        data += unpacker.decompress(chunk, max_bytes - len(data) + 1)
        if len(data) > max_bytes:
            raise too_large(max_bytes)
        position += len(chunk) - len(unpacker.unused_data)
    return position


def compress(
    pieces: Sequence[bytes | memoryview], accept_encoding: str
) -> tuple[Sequence[bytes | memoryview], dict[str, str]]:
    """(pieces of the body, headers) in the encoding that the client likes best of those we have."""
    match _preferred(accept_encoding) if accept_encoding else _IDENTITY:
        case "gzip":
            packer = zlib.compressobj(1, wbits=_GZIP_WINDOW)
        case "deflate":
            packer = zlib.compressobj(1)
        case _:
            return pieces, {}
    encoding = _preferred(accept_encoding)
    packed = [packer.compress(piece) for piece in pieces]
    return [*filter(None, packed), packer.flush()], {"Content-Encoding": encoding}


def _preferred(accept_encoding: str) -> str:
    """Encoding of the highest quality, of equals the first; identity if none is accepted."""
    qualities: dict[str, float] = {}
    for part in accept_encoding.lower().split(","):
        name, _, parameters = part.partition(";")
        qualities.setdefault(name.strip(), _quality(parameters))
    of_others = qualities.pop("*", 0.0)
    for name in (_IDENTITY, *ENCODINGS):
        qualities.setdefault(name, of_others)
    ours = [name for name in qualities if name == _IDENTITY or name in ENCODINGS]
    best = max(ours, key=qualities.__getitem__)
    return best if qualities[best] else _IDENTITY


def _quality(parameters: str) -> float:
    """1 if nothing is said; 0 for what is no quality: such an encoding is not used."""
    name, _, number = parameters.partition("=")
    if not parameters.strip():
        return 1.0
    try:
        quality = float(number) if name.strip() == "q" else 0.0
    except ValueError:
        return 0.0
    return quality if 0 <= quality <= 1 else 0.0


def parse_object(body: Bytes, *, what: str = "the request body") -> dict[str, Any]:
    """A JSON object; nothing at all is the empty object."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if not body.strip():
            return {}
        raise InvalidRequestError(f"failed to parse the request JSON buffer: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{what} must be a JSON object, got {type(value).__name__}")
    return value


def json_response(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


class HttpRequest(msgspec.Struct, frozen=True):
    """headers: by lower-case name. The last four: what the path names."""

    headers: Mapping[str, str]
    receive: Receive
    principal: Principal
    model: str = ""
    version: str = ""
    region: str = ""
    repository: str = ""

    async def body(self, max_bytes: int) -> bytearray:
        """All of it, as it came.

        Raises PayloadTooLargeError as soon as that is known, and ClientDisconnectedError.
        """
        declared = self.headers.get("content-length", "")
        if LENGTH.fullmatch(declared) and int(declared) > max_bytes:
            raise too_large(max_bytes)
        body = bytearray()  # it grows in place: joining chunks would copy all of them at once
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnectedError
            body += message.get("body", b"")
            if len(body) > max_bytes:
                raise too_large(max_bytes)
            if not message.get("more_body", False):
                return body


class WholeResponse:
    """An ASGI response, with status 200. Starlette's takes three times as long to make."""

    __slots__ = ("_headers", "_pieces")

    def __init__(
        self,
        pieces: Sequence[bytes | memoryview],
        media_type: bytes,
        headers: Mapping[str, str],
    ) -> None:
        """pieces: of the body."""
        self._pieces = pieces
        self._headers = [
            (b"content-type", media_type),
            (b"content-length", b"%d" % sum(map(len, pieces))),
            *[(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()],
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive
        await send({"type": "http.response.start", "status": 200, "headers": self._headers})
        await send_pieces(self._pieces, send)


_LOGITS = ("context_logits", "generation_logits")
_BINARY_OUTPUT = ("binary_data_output", "the request")
HEADER_LENGTH = "Inference-Header-Content-Length"


class _SentTensor(msgspec.Struct):
    """An element of `inputs` or `outputs`."""

    name: str
    parameters: dict[str, Any] = {}
    datatype: Any = None
    shape: Any = None
    data: Any = msgspec.UNSET


class _InferDocument(msgspec.Struct):
    inputs: list[_SentTensor]
    outputs: list[_SentTensor] = []
    parameters: dict[str, Parameter] = {}
    id: str = ""


_DECODER = msgspec.json.Decoder(_InferDocument)


def decode_request(
    body: Bytes,
    header_length: str | None,
    *,
    model: str,
    version: str,
    memory: TenantMemory,
    limits: JsonLimits = DEFAULT_JSON_LIMITS,
) -> tuple[InferRequest, Wishes]:
    """The request, and how its outputs are wanted.

    Raises InvalidRequestError, InvalidTensorError, PayloadTooLargeError for too much JSON, and
    NotFoundError for a shared memory region.
    """
    split = len(body) if header_length is None else _header_length(header_length, len(body))
    text = body[:split]
    limits.check(text)
    try:
        document = _DECODER.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        _explain(parse_object(text))
        raise InvalidRequestError(f"failed to parse the request JSON buffer: {error}") from None
    parameters = document.parameters
    is_binary = _flag(parameters, *_BINARY_OUTPUT, otherwise=False)
    default = BINARY if is_binary else INLINE
    requested = {
        output.name: output_wish(
            output.name,
            output.parameters,
            is_binary=_flag(
                output.parameters,
                "binary_data",
                f"output '{output.name}'",
                otherwise=default.is_binary,
            ),
            memory=memory,
        )
        for output in document.outputs
    }
    is_json = any(requested.get(name, default) == INLINE for name in _LOGITS)
    request = InferRequest(
        model=model,
        version=version,
        request_id=document.id,
        inputs=_inputs(document.inputs, memoryview(body)[split:], memory),
        requested=tuple(requested),
        parameters=parameters,
        logit_bytes=JSON_LOGIT_BYTES if is_json else BINARY_LOGIT_BYTES,
    )
    return request, Wishes(memory, default, requested)


def _explain(document: Mapping[str, Any]) -> None:
    """Raise InvalidRequestError, in Triton's words or ours, for what is no _InferDocument."""
    _check_parameters(document, "the request")
    _check_entries(document, "outputs")
    request_id_of(document)
    if "inputs" not in document:
        raise InvalidRequestError(
            "Unable to parse 'inputs': attempt to access non-existing object member 'inputs'",
            param="inputs",
        )
    _check_entries(document, "inputs")
    _flag(parameters := document.get("parameters", {}), *_BINARY_OUTPUT, otherwise=False)
    for key, value in parameters.items():
        if not isinstance(value, bool | int | float | str):
            raise InvalidRequestError(
                f"parameter '{key}' has invalid type. It should be either 'int', 'bool', "
                "'double' or 'string'.",
                param=key,
            )


def _header_length(header: str, body_length: int) -> int:
    length = int(header) if LENGTH.fullmatch(header) else 0
    if not 0 < length <= body_length:
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


def _check_parameters(holder: Mapping[str, Any], owner: str, name: str | None = None) -> None:
    """owner, name: what the holder is, and what it is called if it has a name."""
    if not isinstance(holder.get("parameters", {}), dict):
        whose = owner if name is None else f"{owner} '{name}'"
        raise InvalidRequestError(
            f"'parameters' of {whose} must be a JSON object", param="parameters"
        )


def _check_entries(document: Mapping[str, Any], key: str) -> None:
    """Check that `inputs` or `outputs` are objects, each with a name."""
    entries = document.get(key, [])
    if not isinstance(entries, list):
        raise InvalidRequestError(f"'{key}' must be a list of objects", param=key)
    for entry in entries:
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            raise InvalidRequestError(
                f"every element of '{key}' must be an object with a string 'name'", param=key
            )
    for entry in entries:
        _check_parameters(entry, key.removesuffix("s"), entry["name"])


# ---------------------------------------------------------------- inputs


def _inputs(
    entries: Sequence[_SentTensor], blob: memoryview, memory: TenantMemory
) -> tuple[Tensor, ...]:
    tensors = []
    offset = 0
    for entry in entries:
        name, size = entry.name, entry.parameters.get("binary_data_size")
        place = place_of(name, entry.parameters) if REGION in entry.parameters else None
        if place is None:
            _check_data(entry, size, len(blob) - offset)
        if not isinstance(entry.shape, list):
            raise InvalidTensorError(
                f"input '{name}' must have a 'shape': a list of integers", param=name
            )
        if place is not None:
            tensor = shared_tensor(name, entry.datatype, entry.shape, place, memory)
        elif size is None:
            tensor = from_json(name, entry.datatype, entry.shape, entry.data)
        else:
            data = blob[offset : offset + size]
            tensor = from_raw(name, entry.datatype, entry.shape, data)
            offset += size
        tensors.append(tensor)
    if offset != len(blob):
        raise InvalidRequestError(
            f"unexpected additional input data: {len(blob)} bytes follow the JSON, the inputs' "
            f"'binary_data_size' sum up to {offset}"
        )
    return tuple(tensors)


def _check_data(entry: _SentTensor, size: object, num_left: int) -> None:
    """Raise InvalidTensorError without data, and for more binary data than are left."""
    if size is None:
        if entry.data is msgspec.UNSET:
            raise InvalidTensorError(
                f"input '{entry.name}' has neither 'data' nor a parameter 'binary_data_size'",
                param=entry.name,
            )
    elif type(size) is not int or not 0 <= size <= num_left:
        raise InvalidTensorError(
            f"'binary_data_size' of input '{entry.name}' is {size!r}; {num_left} bytes of binary "
            "data are left for it",
            param=entry.name,
        )


# ---------------------------------------------------------------- outputs


def _flag(parameters: Mapping[str, Any], key: str, owner: str, *, otherwise: bool) -> bool:
    """owner: whose parameters they are."""
    value = parameters.get(key, otherwise)
    if not isinstance(value, bool):
        raise InvalidParameterError(
            f"the parameter '{key}' of {owner} must be true or false, got {repr(value)[:40]}",
            param=key,
        )
    return value


def encode_response(
    response: InferResponse, wishes: Wishes
) -> tuple[list[bytes | memoryview], int | None]:
    """(pieces of the body, length of its JSON part; None if there is nothing else)."""
    outputs: list[dict[str, Any]] = []
    blobs: list[bytes | memoryview] = []
    for output in delivered(response.outputs, wishes):
        tensor = output.tensor
        entry: dict[str, Any] = {
            "name": tensor.name,
            "datatype": tensor.datatype,
            "shape": tensor.shape,
        }
        if output.is_in_message and output.wish.is_binary:
            blobs.append(raw := tensor.data or to_raw(tensor))
            entry["parameters"] = {"binary_data_size": len(raw)}
        elif output.is_in_message:
            entry["data"] = long_values(tensor)
        outputs.append(entry)
    header = encoded(_described(response, outputs))
    return [*header, *blobs], sum(map(len, header)) if blobs else None


def _described(response: InferResponse, outputs: Sequence[object]) -> dict[str, Any]:
    document: dict[str, Any] = {"id": response.request_id} if response.request_id else {}
    document["model_name"] = response.model
    document["model_version"] = response.version
    if response.parameters:
        document["parameters"] = dict(response.parameters)
    document["outputs"] = outputs
    return document


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
