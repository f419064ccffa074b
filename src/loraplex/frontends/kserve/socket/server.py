"""Listens on a unix socket for processes of this machine that pass inference requests on.

Who may open the socket's file may use the server: its mode is 0600, so that is the server's own
user. Requests take the same way as those of HTTP and gRPC.
"""

import asyncio
import contextlib
import os
import socket
import stat
from collections.abc import AsyncIterator

from loraplex.core.errors import ConfigError
from loraplex.frontends.kserve.service import TritonService
from loraplex.frontends.kserve.socket.session import Session
from loraplex.frontends.kserve.stub.wire import SILENCE_SECONDS
from loraplex.frontends.telemetry.telemetry import Telemetry

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
