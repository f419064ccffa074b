"""Many requests at a time to Triton models, over HTTP or gRPC, with the time of each answer."""

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
import tritonclient.grpc as triton_grpc
from tritonclient.utils import np_to_triton_dtype, triton_to_np_dtype

from loraplex.compat.client.connection import grpc_client, is_decoupled, told
from loraplex.compat.client.connection_options import GrpcOptions
from loraplex.compat.client.flags import check_choice
from loraplex.compat.client.tensors import Array, inputs
from loraplex.core.errors import ConfigError

PROTOCOLS = ("http", "grpc")
PORTS = {"http": 8000, "grpc": 8001}
_HTTP_TIMEOUT_SECONDS = 600.0


@dataclasses.dataclass(frozen=True, slots=True)
class WireAnswer:
    """All that came back for one request."""

    pieces: Sequence[Mapping[str, Array]]
    """One, or those of a stream in their order."""
    end: float
    """When the last of them came, by time.perf_counter."""

    @property
    def outputs(self) -> Mapping[str, Array]:
        """Of an answer in one piece: its tensors."""
        return self.pieces[-1]


Pending = concurrent.futures.Future[WireAnswer]
"""An answer that is on its way; its error is a ConfigError."""


class Wire(Protocol):
    def submit(self, model: str, tensors: Mapping[str, Array], request_id: str = "") -> Pending: ...


@contextlib.contextmanager
def open_wire(
    protocol: str,
    url: str | None,
    concurrency: int,
    *,
    is_streamed: bool = False,
    stream_timeout: float | None = None,
) -> Iterator[Wire]:
    """concurrency: HTTP requests at a time; gRPC has no limit. Raises ConfigError."""
    check_choice("--protocol", protocol, PROTOCOLS)
    address = url or f"localhost:{PORTS[protocol]}"
    if protocol == "http":
        if is_streamed:
            raise ConfigError("a stream needs -i grpc")
        pool = concurrent.futures.ThreadPoolExecutor(max(concurrency, 1))
        wire = _HttpWire(address, pool)
        with contextlib.closing(wire), pool:
            yield wire
        return
    with grpc_client(GrpcOptions(url=address)) as client:
        grpc_wire = _GrpcWire(client, address, is_streamed, stream_timeout)
        yield grpc_wire
        grpc_wire.finish()


class _GrpcWire:
    """A call for each request; a stream for models that take no calls, or where it is wished."""

    def __init__(
        self, client: Any, address: str, is_streamed: bool, stream_timeout: float | None
    ) -> None:
        self._client = client
        self._address = address
        self._is_streamed = is_streamed
        self._timeout = stream_timeout
        self._stream: _StreamWire | None = None
        self._decoupled: dict[str, bool] = {}

    def submit(self, model: str, tensors: Mapping[str, Array], request_id: str = "") -> Pending:
        if model not in self._decoupled:
            self._decoupled[model] = self._is_streamed or is_decoupled(self._client, model)
        if self._decoupled[model]:
            if self._stream is None:
                self._stream = _StreamWire(self._client, self._address, self._timeout)
            return self._stream.submit(model, tensors, request_id)
        return self._call(model, tensors, request_id)

    def finish(self) -> None:
        """Wait for the end of the stream."""
        if self._stream is not None:
            self._client.stop_stream()

    def _call(self, model: str, tensors: Mapping[str, Array], request_id: str) -> Pending:
        pending: Pending = concurrent.futures.Future()

        def answered(result: Any, error: Any) -> None:
            end = time.perf_counter()
            if error is not None:
                pending.set_exception(told(error, self._address))
            else:
                pending.set_result(WireAnswer([_arrays(result)], end))

        self._client.async_infer(
            model, inputs(triton_grpc, tensors), callback=answered, request_id=request_id
        )
        return pending


class _StreamWire:
    """All requests over one stream; each needs an id of its own, which it gets if it has none."""

    def __init__(self, client: Any, address: str, timeout: float | None) -> None:
        self._client = client
        self._address = address
        self._lock = threading.Lock()
        self._pending: dict[str, tuple[Pending, list[Mapping[str, Array]]]] = {}
        self._num_sent = 0
        client.start_stream(callback=self._answered, stream_timeout=timeout)

    def submit(self, model: str, tensors: Mapping[str, Array], request_id: str = "") -> Pending:
        pending: Pending = concurrent.futures.Future()
        with self._lock:
            self._num_sent += 1
            request_id = f"{request_id or 'request'}-{self._num_sent}"
            self._pending[request_id] = (pending, [])
        self._client.async_stream_infer(
            model,
            inputs(triton_grpc, tensors),
            request_id=request_id,
            enable_empty_final_response=True,
        )
        return pending

    def _answered(self, result: Any, error: Any) -> None:
        end = time.perf_counter()
        if error is not None:
            self._failed(error)
            return
        response = result.get_response()
        pending, pieces = self._pending[response.id]
        if response.outputs:
            pieces.append(_arrays(result))
        if response.parameters["triton_final_response"].bool_param:
            with self._lock:
                del self._pending[response.id]
            if pieces:
                pending.set_result(WireAnswer(pieces, end))
            else:
                pending.set_exception(ConfigError("the server gave an answer without tensors"))

    def _failed(self, error: Any) -> None:
        """tritonclient does not tell which request failed, so every one that waits is told."""
        with self._lock:
            waiting, self._pending = self._pending, {}
        for pending, _ in waiting.values():
            pending.set_exception(told(error, self._address))


class _HttpWire:
    """KServe v2 as JSON; a connection for each thread."""

    def __init__(self, address: str, pool: concurrent.futures.ThreadPoolExecutor) -> None:
        self._address = address.removeprefix("http://").rstrip("/")
        self._pool = pool
        self._own = threading.local()
        self._connections: list[http.client.HTTPConnection] = []

    def close(self) -> None:
        """No request may be on its way."""
        for connection in self._connections:
            connection.close()

    def submit(self, model: str, tensors: Mapping[str, Array], request_id: str = "") -> Pending:
        body = {
            "id": request_id,
            "inputs": [_json_tensor(name, array) for name, array in tensors.items()],
        }
        return self._pool.submit(self._infer, model, json.dumps(body).encode())

    def _infer(self, model: str, body: bytes) -> WireAnswer:
        try:
            status, content = self._post(f"/v2/models/{quote(model, safe='')}/infer", body)
            end = time.perf_counter()
            answer = json.loads(content)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ConfigError(f"there is no answer from {self._address}: {error!r}") from error
        if status != http.HTTPStatus.OK:
            reason = answer.get("error", content[:200])
            reason = f"{reason}; -i grpc can" if "decoupled" in str(reason) else reason
            raise ConfigError(f"the server at {self._address} answered: {reason} ({status})")
        arrays = {row["name"]: _json_array(row) for row in answer["outputs"]}
        return WireAnswer([arrays], end)

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
    """BYTES become an array of bytes objects, as over gRPC."""
    data = row["data"]
    if row["datatype"] == "BYTES":
        data = [text.encode() for text in np.ravel(np.array(data, dtype=object))]
    return np.array(data, dtype=triton_to_np_dtype(row["datatype"])).reshape(row["shape"])
