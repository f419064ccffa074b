"""Requests to Triton models over gRPC or HTTP, with keys and TLS, and all their responses."""

import concurrent.futures
import contextlib
import dataclasses
import http.client
import json
import queue
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import numpy as np
import tritonclient.grpc as triton_grpc
from tritonclient.grpc import InferenceServerClientPlugin
from tritonclient.utils import InferenceServerException, np_to_triton_dtype, triton_to_np_dtype

from loraplex.compat.client.request_parts import Array, inputs
from loraplex.compat.flags import Flags
from loraplex.core.environment import KEY_HINT, client_headers
from loraplex.core.errors import ConfigError

PORTS = {"http": 8000, "grpc": 8001}
_HTTP_TIMEOUT_SECONDS = 600.0
_SECONDS_TO_REPORT = 1.0
_NO_KEY = "StatusCode.UNAUTHENTICATED"
_TLS_FILES = ("root_certificates", "private_key", "certificate_chain")

Tensors = Mapping[str, Array]


@dataclasses.dataclass(frozen=True, slots=True)
class WireResponse:
    """The response to a request, or one response of a stream."""

    pieces: Sequence[Tensors]
    """One, or those of a stream in their order."""
    end: float
    """When the last of them came, by time.perf_counter."""
    request_id: str = ""

    @property
    def outputs(self) -> Tensors:
        """The tensors of a response in one piece."""
        return self.pieces[-1]


Pending = concurrent.futures.Future[WireResponse]
"""A response that is awaited; its error is a ConfigError."""


class Wire(Protocol):
    def submit(self, model: str, tensors: Tensors, request_id: str = "") -> Pending: ...


@contextlib.contextmanager
def open_wire(options: Flags, concurrency: int, *, is_streamed: bool = False) -> Iterator[Wire]:
    """Open --protocol to --url. HTTP has `concurrency` requests at a time; gRPC has no limit.

    Raises ConfigError.
    """
    address = options.url or f"localhost:{PORTS[options.protocol]}"
    if options.protocol == "grpc":
        timeout = options.get("stream_timeout")
        with open_grpc_wire(address, is_streamed=is_streamed, timeout=timeout) as wire:
            yield wire
    elif is_streamed:
        raise ConfigError("a stream needs -i grpc")
    else:
        with contextlib.closing(_HttpWire(address, max(concurrency, 1))) as http_wire:
            yield http_wire


@contextlib.contextmanager
def open_grpc_wire(
    address: str, options: Flags | None = None, **stream: Any
) -> "Iterator[GrpcWire]":
    """Open gRPC, with TLS if the options request it, and wait for the end of the stream.

    Raises ConfigError.
    """
    with grpc_client(address, options) as client:
        wire = GrpcWire(client, address, **stream)
        yield wire
        wire.finish()


@contextlib.contextmanager
def grpc_client(url: str, options: Flags | None = None) -> Iterator[Any]:
    """Open an InferenceServerClient, with TLS if the options of the program request it.

    Raises ConfigError for flags that contradict each other and for errors of the server.
    """
    tls = _tls(options) if options else {}
    try:
        with triton_grpc.InferenceServerClient(url, **tls) as client:
            client.register_plugin(_WithKey())
            yield client
    except InferenceServerException as error:
        raise _server_error(error, url) from error


class GrpcWire:
    """A call for each request, and one stream for models that take no calls or if requested."""

    def __init__(
        self,
        client: Any,
        address: str,
        *,
        is_streamed: bool = False,
        timeout: float | None = None,
        compression: str | None = None,
    ) -> None:
        """A stream ends after `timeout` seconds."""
        self.client = client
        self.errors: list[InferenceServerException] = []
        """Errors of sent requests, but for cancellations."""
        self.was_cancelled = False
        self._address = address
        self._is_streamed = is_streamed
        self._timeout = timeout
        self._compression = compression
        self._decoupled: dict[str, bool] = {}
        self._lock = threading.Lock()
        self._pending: dict[str, tuple[Pending, list[Tensors]]] = {}
        self._num_streamed = 0
        self._has_stream = self._is_cancelled = False
        self._calls: list[Any] = []
        self._sent: queue.Queue[WireResponse | InferenceServerException] = queue.Queue()

    def submit(self, model: str, tensors: Tensors, request_id: str = "") -> Pending:
        """Send a request; over a stream with an id of its own, so that its end can be seen."""
        pending: Pending = concurrent.futures.Future()
        if self._streams(model):
            self._open_stream(self._piece_received)
            self._num_streamed += 1
            request_id = f"{request_id or 'request'}-{self._num_streamed}"
            with self._lock:
                self._pending[request_id] = (pending, [])
            self.client.async_stream_infer(
                model, inputs(tensors), request_id=request_id, enable_empty_final_response=True
            )
            return pending

        def received(result: Any, error: Any) -> None:
            if error is not None:
                pending.set_exception(_server_error(error, self._address))
            else:
                pending.set_result(_response(result))

        self.client.async_infer(model, inputs(tensors), callback=received, request_id=request_id)
        return pending

    def send(self, model: str, tensors: Tensors, request_id: str, **options: Any) -> None:
        """Send a request with exactly this id, whose responses `finish` returns.

        `options` are those of tritonclient's call.
        """

        def received(result: Any, error: Any) -> None:
            self._sent.put(_response(result) if error is None else error)

        options["request_id"] = request_id
        if self._streams(model):
            self._open_stream(received)
            try:
                self.client.async_stream_infer(model, inputs(tensors), **options)
            except InferenceServerException as error:
                raise self._reason(error) from None
        else:
            options |= {"callback": received, "compression_algorithm": self._compression}
            self._calls.append(self.client.async_infer(model, inputs(tensors), **options))

    def cancel(self) -> None:
        """Cancel the sent requests."""
        self._is_cancelled = True
        for call in self._calls:
            call.cancel()

    def outputs(self) -> list[Tensors]:
        """Wait for the sent requests, and return their tensors. Raises the first error."""
        outputs = [response.outputs for response in self.finish()]
        if self.errors:
            raise self.errors[0]
        return outputs

    def finish(self) -> list[WireResponse]:
        """Wait for all requests, and return the responses to the sent ones; see `errors`."""
        if self._has_stream:
            self._has_stream = False
            self.client.stop_stream(cancel_requests=self._is_cancelled)
            results = [self._sent.get() for _ in range(self._sent.qsize())]
        else:
            results = [self._sent.get() for _ in self._calls]
            self._calls.clear()
        errors = [result for result in results if not isinstance(result, WireResponse)]
        others = [e for e in errors if not (e.status() or "").endswith("CANCELLED")]
        self.was_cancelled = len(others) < len(errors)
        self.errors += others
        return [result for result in results if isinstance(result, WireResponse)]

    def _streams(self, model: str) -> bool:
        """Return whether to use the stream: some models give any number of responses."""
        if model not in self._decoupled:
            self._decoupled[model] = self._is_streamed or bool(
                self.client.get_model_config(model).config.model_transaction_policy.decoupled
            )
        return self._decoupled[model]

    def _open_stream(self, callback: Any) -> None:
        if not self._has_stream:
            self._has_stream = True
            self.client.start_stream(
                callback=callback,
                stream_timeout=self._timeout,
                compression_algorithm=self._compression,
            )

    def _piece_received(self, result: Any, error: Any) -> None:
        if error is not None:
            # tritonclient does not report which request failed, so all that wait get the error.
            with self._lock:
                waiting, self._pending = self._pending, {}
            for pending, _ in waiting.values():
                pending.set_exception(_server_error(error, self._address))
            return
        piece, response = _response(result), result.get_response()
        with self._lock:
            pending, pieces = self._pending[response.id]
        if response.outputs:
            pieces.append(piece.outputs)
        if response.parameters["triton_final_response"].bool_param:
            with self._lock:
                del self._pending[response.id]
            if pieces:
                pending.set_result(WireResponse(pieces, piece.end))
            else:
                pending.set_exception(ConfigError("the server sent a response without tensors"))

    def _reason(self, error: InferenceServerException) -> InferenceServerException:
        """Return the error with which the server ended the stream, which may come a moment later.

        Without it tritonclient only reports that the stream is no longer valid.
        """
        with contextlib.suppress(queue.Empty):
            while True:
                cause = self._sent.get(timeout=_SECONDS_TO_REPORT)
                if isinstance(cause, InferenceServerException):
                    return InferenceServerException(cause.message(), cause.status())
        return error


class _HttpWire:
    """KServe v2 as JSON, with a thread and a connection for each request at a time."""

    def __init__(self, address: str, concurrency: int) -> None:
        self._address = address.removeprefix("http://").rstrip("/")
        self._pool = concurrent.futures.ThreadPoolExecutor(concurrency)
        self._free: queue.LifoQueue[http.client.HTTPConnection] = queue.LifoQueue()
        for _ in range(concurrency):
            self._free.put(http.client.HTTPConnection(self._address, timeout=_HTTP_TIMEOUT_SECONDS))

    def close(self) -> None:
        """Wait for the requests and close the connections."""
        self._pool.shutdown()
        while not self._free.empty():
            self._free.get().close()

    def submit(self, model: str, tensors: Tensors, request_id: str = "") -> Pending:
        arrays = [_json_tensor(name, array) for name, array in tensors.items()]
        body = json.dumps({"id": request_id, "inputs": arrays}).encode()
        return self._pool.submit(self._infer, f"/v2/models/{quote(model, safe='')}/infer", body)

    def _infer(self, path: str, body: bytes) -> WireResponse:
        connection = self._free.get()
        try:
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            received = connection.getresponse()
            content = received.read()
            end = time.perf_counter()
            response = json.loads(content)
        except (OSError, http.client.HTTPException, ValueError) as error:
            connection.close()
            raise ConfigError(f"there is no response from {self._address}: {error!r}") from error
        finally:
            self._free.put(connection)
        if received.status != http.HTTPStatus.OK:
            reason = response.get("error", content[:200])
            reason = f"{reason}; -i grpc can" if "decoupled" in str(reason) else reason
            raise ConfigError(
                f"the server at {self._address} answered: {reason} ({received.status})"
            )
        return WireResponse([{row["name"]: _json_array(row) for row in response["outputs"]}], end)


class _WithKey(InferenceServerClientPlugin):  # type: ignore[misc]
    """Plugin that adds the API key of the environment to every call."""

    def __init__(self) -> None:
        self._headers = client_headers()

    def __call__(self, request: Any) -> None:
        request.headers.update(self._headers)


def _tls(options: Flags) -> dict[str, Any]:
    given = {name: path for name in _TLS_FILES if (path := options.get(name)) is not None}
    for name, path in given.items():
        flag = f"--{name.replace('_', '-')}"
        if not options.ssl:
            raise ConfigError(f"{flag} has no effect without --ssl")
        if not Path(path).is_file():
            raise ConfigError(f"{flag}: there is no file {path}")
    return {"ssl": options.ssl, **given}


def _server_error(error: InferenceServerException, url: str) -> ConfigError:
    """Return the error, with its status if it has one."""
    status = error.status()
    text = f"the server at {url} answered: {error.message()}" + (f" ({status})" if status else "")
    return ConfigError(f"{text}; {KEY_HINT}" if status == _NO_KEY else text)


def _response(result: Any) -> WireResponse:
    response, end = result.get_response(), time.perf_counter()
    arrays = {tensor.name: result.as_numpy(tensor.name) for tensor in response.outputs}
    return WireResponse([arrays], end, response.id)


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
