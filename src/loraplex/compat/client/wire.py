"""Many concurrent requests to Triton models, over HTTP or gRPC, with the time of each response."""

import concurrent.futures
import contextlib
import dataclasses
import http.client
import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol
from urllib.parse import quote

import numpy as np
from tritonclient.utils import np_to_triton_dtype, triton_to_np_dtype

from loraplex.compat.client.connection import grpc_client, is_decoupled, server_error
from loraplex.compat.client.tensors import Array, inputs
from loraplex.compat.flags import Flags
from loraplex.core.errors import ConfigError

PORTS = {"http": 8000, "grpc": 8001}
_HTTP_TIMEOUT_SECONDS = 600.0


@dataclasses.dataclass(frozen=True, slots=True)
class WireResponse:
    """All that a request brought."""

    pieces: Sequence[Mapping[str, Array]]
    """One, or those of a stream in their order."""
    end: float
    """When the last of them came, by time.perf_counter."""

    @property
    def outputs(self) -> Mapping[str, Array]:
        """The tensors of a response in one piece."""
        return self.pieces[-1]


Pending = concurrent.futures.Future[WireResponse]
"""A response that is awaited; its error is a ConfigError."""


class Wire(Protocol):
    def submit(self, model: str, tensors: Mapping[str, Array], request_id: str = "") -> Pending: ...


@contextlib.contextmanager
def open_wire(options: Flags, concurrency: int, *, is_streamed: bool = False) -> Iterator[Wire]:
    """Open --protocol to --url. HTTP has `concurrency` requests at a time; gRPC has no limit.

    Raises ConfigError.
    """
    address = options.url or f"localhost:{PORTS[options.protocol]}"
    if options.protocol == "grpc":
        with open_grpc_wire(address, is_streamed, options.get("stream_timeout")) as wire:
            yield wire
        return
    if is_streamed:
        raise ConfigError("a stream needs -i grpc")
    pool = concurrent.futures.ThreadPoolExecutor(max(concurrency, 1))
    http_wire = _HttpWire(address, pool)
    with contextlib.closing(http_wire), pool:
        yield http_wire


@contextlib.contextmanager
def open_grpc_wire(
    address: str, is_streamed: bool = False, stream_timeout: float | None = None
) -> Iterator[Wire]:
    """Open gRPC. Raises ConfigError."""
    with grpc_client(address) as client:
        wire = _GrpcWire(client, address, is_streamed, stream_timeout)
        yield wire
        wire.finish()


class _GrpcWire:
    """A call for each request, and one stream for models that take no calls or if requested.

    Each request of the stream needs its own id, and gets one.
    """

    def __init__(
        self, client: Any, address: str, is_streamed: bool, stream_timeout: float | None
    ) -> None:
        self._client = client
        self._address = address
        self._is_streamed = is_streamed
        self._timeout = stream_timeout
        self._decoupled: dict[str, bool] = {}
        self._lock = threading.Lock()
        self._pending: dict[str, tuple[Pending, list[Mapping[str, Array]]]] = {}
        self._num_streamed = 0

    def submit(self, model: str, tensors: Mapping[str, Array], request_id: str = "") -> Pending:
        if model not in self._decoupled:
            self._decoupled[model] = self._is_streamed or is_decoupled(self._client, model)
        if self._decoupled[model]:
            return self._stream(model, tensors, request_id)
        pending: Pending = concurrent.futures.Future()

        def received(result: Any, error: Any) -> None:
            end = time.perf_counter()
            if error is not None:
                pending.set_exception(server_error(error, self._address))
            else:
                pending.set_result(WireResponse([_arrays(result)], end))

        self._client.async_infer(model, inputs(tensors), callback=received, request_id=request_id)
        return pending

    def finish(self) -> None:
        """Wait for the end of the stream."""
        if self._num_streamed:
            self._client.stop_stream()

    def _stream(self, model: str, tensors: Mapping[str, Array], request_id: str) -> Pending:
        if not self._num_streamed:
            self._client.start_stream(callback=self._received, stream_timeout=self._timeout)
        pending: Pending = concurrent.futures.Future()
        self._num_streamed += 1
        request_id = f"{request_id or 'request'}-{self._num_streamed}"
        with self._lock:
            self._pending[request_id] = (pending, [])
        self._client.async_stream_infer(
            model, inputs(tensors), request_id=request_id, enable_empty_final_response=True
        )
        return pending

    def _received(self, result: Any, error: Any) -> None:
        end = time.perf_counter()
        if error is not None:
            # tritonclient does not report which request failed, so all that wait get the error.
            with self._lock:
                waiting, self._pending = self._pending, {}
            for pending, _ in waiting.values():
                pending.set_exception(server_error(error, self._address))
            return
        response = result.get_response()
        with self._lock:
            pending, pieces = self._pending[response.id]
        if response.outputs:
            pieces.append(_arrays(result))
        if response.parameters["triton_final_response"].bool_param:
            with self._lock:
                del self._pending[response.id]
            if pieces:
                pending.set_result(WireResponse(pieces, end))
            else:
                pending.set_exception(ConfigError("the server sent a response without tensors"))


class _HttpWire:
    """KServe v2 as JSON; a connection for each thread."""

    def __init__(self, address: str, pool: concurrent.futures.ThreadPoolExecutor) -> None:
        self._address = address.removeprefix("http://").rstrip("/")
        self._pool = pool
        self._own = threading.local()
        self._connections: list[http.client.HTTPConnection] = []

    def close(self) -> None:
        """Close the connections. No request may be in flight."""
        for connection in self._connections:
            connection.close()

    def submit(self, model: str, tensors: Mapping[str, Array], request_id: str = "") -> Pending:
        arrays = [_json_tensor(name, array) for name, array in tensors.items()]
        body = json.dumps({"id": request_id, "inputs": arrays}).encode()
        return self._pool.submit(self._infer, f"/v2/models/{quote(model, safe='')}/infer", body)

    def _infer(self, path: str, body: bytes) -> WireResponse:
        try:
            status, content = self._post(path, body)
            end = time.perf_counter()
            response = json.loads(content)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ConfigError(f"there is no response from {self._address}: {error!r}") from error
        if status != http.HTTPStatus.OK:
            reason = response.get("error", content[:200])
            reason = f"{reason}; -i grpc can" if "decoupled" in str(reason) else reason
            raise ConfigError(f"the server at {self._address} answered: {reason} ({status})")
        return WireResponse([{row["name"]: _json_array(row) for row in response["outputs"]}], end)

    def _post(self, path: str, body: bytes) -> tuple[int, bytes]:
        connection = getattr(self._own, "connection", None)
        if connection is None:
            connection = http.client.HTTPConnection(self._address, timeout=_HTTP_TIMEOUT_SECONDS)
            self._own.connection = connection
            self._connections.append(connection)
        try:
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException):
            connection.close()
            raise


def _arrays(result: Any) -> Mapping[str, Array]:
    return {tensor.name: result.as_numpy(tensor.name) for tensor in result.get_response().outputs}


def _json_tensor(name: str, array: Array) -> dict[str, Any]:
    flat = array.ravel().tolist()
    return {
        "name": name,
        "shape": list(array.shape),
        "datatype": np_to_triton_dtype(array.dtype),
        "data": [v.decode() if isinstance(v, bytes) else v for v in flat],
    }


def _json_array(row: Mapping[str, Any]) -> Array:
    """Read an output; BYTES become an array of bytes objects, as over gRPC."""
    data = row["data"]
    if row["datatype"] == "BYTES":
        data = [text.encode() for text in np.ravel(np.array(data, dtype=object))]
    return np.array(data, dtype=triton_to_np_dtype(row["datatype"])).reshape(row["shape"])
