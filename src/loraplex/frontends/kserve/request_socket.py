"""The request socket: it listens for processes of this machine that pass inference requests on.

Who may open the socket's file may use the server: its mode is 0600, so that is the server's own
user. Requests take the same way as those of HTTP and gRPC.
"""

import asyncio
import contextlib
import os
import socket
import stat
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing

from loraplex.core.errors import ConfigError
from loraplex.core.principal import LOCAL
from loraplex.frontends.body_limits import off_loop
from loraplex.frontends.kserve.errors import (
    FailedResponse,
    as_loraplex_error,
    message_of,
    status_of,
)
from loraplex.frontends.kserve.messages import InferRequest, InferResponse
from loraplex.frontends.kserve.service import TritonService
from loraplex.frontends.kserve.stub.wire import (
    CANCELLED,
    LENGTH,
    PROTOCOL,
    SILENCE_SECONDS,
    Cancel,
    FromClient,
    FromServer,
    Infer,
    NotAMessage,
    Ping,
    RequestFailure,
    Response,
    Status,
    Welcome,
    WireTensor,
    frame,
    read_from_client,
)
from loraplex.frontends.kserve.tensors import Tensor, from_raw, to_raw
from loraplex.frontends.long_json import SENT_BYTES
from loraplex.frontends.telemetry.telemetry import Telemetry
from loraplex.serving.wire_request import as_current

MAX_REQUESTS = 4096
"""Maximum number of in-flight requests per connection; more are refused."""
_INFER, _OK = "request_socket/Infer", "OK"
PENDING_BYTES = 64 << 10
"""That wait for a slow client; then its requests wait, others do not."""


class BrokenConnectionError(Exception):
    """Received bytes are no frame of the protocol; the message has the reason."""


class Session:
    def __init__(
        self,
        service: TritonService,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        max_message_bytes: int,
        silence_seconds: float,
        unread_seconds: float,
        telemetry: Telemetry,
    ) -> None:
        """unread_seconds: how long the client may take to read each SENT_BYTES."""
        self._service = service
        self._telemetry = telemetry
        self._reader = reader
        self._writer = writer
        self._max_message_bytes = max_message_bytes
        self._silence_seconds = silence_seconds
        self._unread_seconds = unread_seconds
        self._requests: dict[int, asyncio.Task[None]] = {}
        writer.transport.set_write_buffer_limits(high=PENDING_BYTES)

    async def run(self) -> None:
        """Serve until the client has gone or fallen silent; then its requests are aborted."""
        try:
            await self._send(Welcome(protocol=PROTOCOL, max_message_bytes=self._max_message_bytes))
            while (message := await self._next()) is not None:
                await self._take(message)
        except BrokenConnectionError as error:
            self._writer.write(frame(RequestFailure(kind="INVALID_ARGUMENT", message=str(error))))
        except ConnectionError:
            pass  # it has gone in the middle of a message
        finally:
            await self._abort_all()
            self._close()

    async def _next(self) -> FromClient | None:
        """Next message; None: the client has closed its end or sends nothing any more."""
        try:
            async with asyncio.timeout(self._silence_seconds):
                (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
                if length > self._max_message_bytes:
                    raise BrokenConnectionError(
                        f"a message of {length} bytes; at most {self._max_message_bytes} are taken"
                    )
                payload = await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, TimeoutError):
            return None
        try:
            return read_from_client(payload)
        except NotAMessage as error:
            raise BrokenConnectionError(f"not a message of the protocol: {error}") from None

    async def _take(self, message: FromClient) -> None:
        match message:
            case Infer():
                await self._admit(message)
            case Cancel(id=number):
                await self._cancel(number)
            case Ping():
                await self._send(self._status())

    async def _admit(self, message: Infer) -> None:
        """Requests run as tasks, so that one does not wait for another."""
        if message.id in self._requests:
            raise BrokenConnectionError(f"id {message.id} is in use")
        if len(self._requests) >= MAX_REQUESTS:
            text = f"{MAX_REQUESTS} requests of this connection are in flight; try again later"
            await self._send(RequestFailure(id=message.id, kind="UNAVAILABLE", message=text))
            return
        task = asyncio.create_task(self._serve(message))
        self._requests[message.id] = task
        task.add_done_callback(lambda _: self._requests.pop(message.id, None))

    async def _serve(self, message: Infer) -> None:
        request, status = self._telemetry.begin("socket", "", _INFER, "", {}, _INFER), CANCELLED
        try:
            with as_current(request):
                status = await self._status_of(message)
        finally:
            request.end(status)

    async def _status_of(self, message: Infer) -> str:
        """Respond to it; a failure is a response, too."""
        try:
            await self._respond(message)
            return _OK
        except ConnectionError:
            return CANCELLED  # the client has gone: run() ends, too
        except Exception as raised:
            failure = encode_failure(message.id, raised)
        with contextlib.suppress(ConnectionError):
            await self._send(failure)
        return failure.kind

    async def _respond(self, message: Infer) -> None:
        request = decode_request(message)
        if message.is_unary:
            response = await self._service.infer(request, LOCAL)
            await self._send_response(message.id, response)
            return
        async with aclosing(await self._service.stream(request, LOCAL)) as responses:
            async for response in responses:
                await self._send_response(message.id, response)

    async def _send_response(self, number: int, response: InferResponse) -> None:
        data = await off_loop(response.num_bytes, lambda: frame(encode_response(number, response)))
        await self._send_frame(data)

    async def _cancel(self, number: int) -> None:
        task = self._requests.get(number)
        if task is None:
            return
        task.cancel()
        await asyncio.wait({task})
        if task.cancelled():
            failure = RequestFailure(id=number, kind=CANCELLED, message="Request was cancelled")
            await self._send(failure)

    async def _abort_all(self) -> None:
        tasks = list(self._requests.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _close(self) -> None:
        """Close the connection once the client has read the last bytes, if it does."""
        self._writer.close()
        asyncio.get_running_loop().call_later(self._time_to_read(), self._writer.transport.abort)

    def _status(self) -> Status:
        health = self._service.backend.health()
        return Status(
            is_ready=health.ready,
            reason=health.reason,
            models=tuple(model.name for model in self._service.catalog.models()),
        )

    async def _send(self, message: FromServer) -> None:
        """A frame is written as a whole; then wait while much of what was written is unread.

        Raises ConnectionError if the client has gone, or does not read: then it is disconnected.
        """
        await self._send_frame(frame(message))

    async def _send_frame(self, data: bytes) -> None:
        if self._writer.is_closing():
            raise ConnectionResetError
        self._writer.write(data)
        try:
            async with asyncio.timeout(self._time_to_read()):
                await self._writer.drain()
        except TimeoutError:
            self._writer.transport.abort()
            raise ConnectionAbortedError from None

    def _time_to_read(self) -> float:
        """Return how many seconds the client has for what waits for it."""
        unsent = self._writer.transport.get_write_buffer_size()
        return (1 + unsent // SENT_BYTES) * self._unread_seconds


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


def encode_failure(number: int, raised: Exception) -> RequestFailure:
    """Encode an error's kind and text; an internal error is logged and shows no details."""
    error = as_loraplex_error(raised)
    outputs = raised.outputs if isinstance(raised, FailedResponse) else ()
    return RequestFailure(
        id=number,
        kind=status_of(error).grpc,
        message=message_of(error),
        outputs=_encoded(outputs),
    )


def _encoded(tensors: Sequence[Tensor]) -> tuple[WireTensor, ...]:
    return tuple(WireTensor(t.name, t.datatype, t.shape, to_raw(t)) for t in tensors)


_BACKLOG = 128
_MODE = 0o600
_PROBE_SECONDS = 1.0
_LONGEST_PATH = 107
"""Bytes that a unix socket's address takes."""


@contextlib.asynccontextmanager
async def serving_socket(
    service: TritonService,
    path: str,
    *,
    max_message_bytes: int,
    unread_seconds: float,
    silence_seconds: float = SILENCE_SECONDS,
    telemetry: Telemetry | None = None,
) -> AsyncIterator[None]:
    """Serve while the context lasts, on the running loop. Raises ConfigError.

    unread_seconds: how long a client may take to read each 256 KiB. telemetry: of the whole server;
    None: one without readers.

    The file of a server that has died is replaced; that of a living one is an error. At the end
    connections are closed, and requests that are still in flight are aborted.
    """
    listener = bind(path)
    sessions: set[asyncio.Task[None]] = set()
    events = telemetry or Telemetry()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        sessions.add(task)
        session = Session(
            service,
            reader,
            writer,
            max_message_bytes=max_message_bytes,
            silence_seconds=silence_seconds,
            unread_seconds=unread_seconds,
            telemetry=events,
        )
        try:
            with contextlib.suppress(asyncio.CancelledError):  # asyncio would log it
                await session.run()
        finally:
            sessions.discard(task)

    server = await asyncio.start_unix_server(serve, sock=listener, backlog=_BACKLOG)
    own_file = os.stat(path)
    try:
        yield
    finally:
        server.close()
        for task in list(sessions):
            task.cancel()
        await asyncio.gather(*sessions, return_exceptions=True)
        _remove(path, own_file)


def bind(path: str) -> socket.socket:
    """Return a bound socket which only this user may connect to. Raises ConfigError."""
    length = len(os.fsencode(path))
    if length > _LONGEST_PATH:
        raise ConfigError(
            f"request_socket: {path} has {length} bytes, and a unix socket's path has at most "
            f"{_LONGEST_PATH}; choose a shorter one"
        )
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        os.fchmod(listener.fileno(), _MODE)  # before it is bound: its file is never open to others
        listener.bind(path)
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        raise ConfigError(f"request_socket: cannot listen on {path}: {reason}") from error
    except ConfigError:
        listener.close()
        raise
    return listener


def _remove_stale(path: str) -> None:
    """Take away the socket of a server that has died."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"request_socket: {path} exists already, and is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_SECONDS)  # a server that hangs takes no more connections
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
    raise ConfigError(f"request_socket: a server listens on {path} already; stop it first")


def _remove(path: str, own_file: os.stat_result) -> None:
    """Unless another server has its own file there by now."""
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(os.lstat(path), own_file):
            os.unlink(path)
