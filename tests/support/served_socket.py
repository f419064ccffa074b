"""A request socket over an EchoService, in this process or, as a program, in one of its own.

    python -m support.served_socket --request-socket=PATH

ends when its standard input does, as a server does that `loraplex compat triton export` started.
"""

import asyncio
import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from anyio.from_thread import start_blocking_portal

from loraplex.app.server import end_of_input
from loraplex.frontends.kserve.models.triton_model import ModelDeclaration
from loraplex.frontends.kserve.request_socket import serving_socket
from loraplex.frontends.kserve.service import TritonService
from loraplex.frontends.kserve.stub.wire import SILENCE_SECONDS
from loraplex.serving.backend import Backend
from support.echo_service import EchoService

FLAG = "--request-socket="
UNREAD_SECONDS = 60.0


@dataclasses.dataclass(frozen=True)
class ServedSocket:
    path: str
    service: TritonService
    stop: Callable[[], object]
    """Close the connections, as when the server ends."""


@contextmanager
def served_socket(
    backend: Backend,
    path: str,
    *,
    max_message_bytes: int = 1 << 20,
    silence_seconds: float = SILENCE_SECONDS,
    unread_seconds: float = UNREAD_SECONDS,
    declarations: Sequence[ModelDeclaration] = (),
) -> Iterator[ServedSocket]:
    """Serve until the context ends; the event loop runs in its own thread."""
    service = TritonService(backend, declarations=declarations)
    with start_blocking_portal() as portal, ExitStack() as stack:
        serving = serving_socket(
            service,
            path,
            max_message_bytes=max_message_bytes,
            silence_seconds=silence_seconds,
            unread_seconds=unread_seconds,
        )
        stack.enter_context(portal.wrap_async_context_manager(serving))
        yield ServedSocket(path, service, stack.close)


async def _serve_until_input_ends(path: str) -> None:
    ended = asyncio.Event()
    end_of_input(ended.set)
    service = TritonService(EchoService())
    limit = 1 << 20
    async with serving_socket(
        service, path, max_message_bytes=limit, unread_seconds=UNREAD_SECONDS
    ):
        await ended.wait()


if __name__ == "__main__":
    (flag,) = (argument for argument in sys.argv[1:] if argument.startswith(FLAG))
    asyncio.run(_serve_until_input_ends(flag.removeprefix(FLAG)))
