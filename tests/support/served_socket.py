"""A request socket over an EchoBackend, in this process or, as a program, in one of its own.

    python -m support.served_socket --request-socket=PATH

ends when its standard input does, as a server does that `loraplex compat triton export` started.
"""

import asyncio
import dataclasses
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

from loraplex.app.end_of_input import end_of_input
from loraplex.frontends.kserve.models.declaration import ModelDeclaration
from loraplex.frontends.kserve.service import TritonService
from loraplex.frontends.kserve.socket.server import serving_socket
from loraplex.frontends.kserve.stub.wire import SILENCE_SECONDS
from loraplex.serving.backend import Backend
from loraplex.testing.echo_backend import EchoBackend

START_SECONDS = 30.0
FLAG = "--request-socket="


@dataclasses.dataclass(frozen=True)
class ServedSocket:
    path: str
    service: TritonService
    stop: threading.Event
    """Set it: connections are closed, as when the server ends."""


@contextmanager
def served_socket(
    backend: Backend,
    path: str,
    *,
    max_message_bytes: int = 1 << 20,
    silence_seconds: float = SILENCE_SECONDS,
    declarations: Sequence[ModelDeclaration] = (),
) -> Iterator[ServedSocket]:
    """Serve until the context ends; the event loop runs in its own thread."""
    service = TritonService(backend, declarations=declarations)
    served = ServedSocket(path, service, threading.Event())
    started: Future[None] = Future()

    async def serve() -> None:
        async with serving_socket(
            served.service,
            path,
            max_message_bytes=max_message_bytes,
            silence_seconds=silence_seconds,
        ):
            started.set_result(None)
            await asyncio.to_thread(served.stop.wait)

    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    try:
        started.result(START_SECONDS)
        yield served
    finally:
        served.stop.set()
        thread.join()


async def _serve_until_input_ends(path: str) -> None:
    ended = asyncio.Event()
    end_of_input(ended.set)
    async with serving_socket(TritonService(EchoBackend()), path, max_message_bytes=1 << 20):
        await ended.wait()


if __name__ == "__main__":
    (flag,) = (argument for argument in sys.argv[1:] if argument.startswith(FLAG))
    asyncio.run(_serve_until_input_ends(flag.removeprefix(FLAG)))
