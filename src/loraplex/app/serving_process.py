"""What a serving process takes of the machine: listening sockets, open files, an event loop,
and work that runs alongside.

Independent of the web stack, which takes a second to import.
"""

import asyncio
import contextlib
import errno
import functools
import logging
import os
import resource
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Final, ParamSpec

from loraplex.core.errors import ConfigError
from loraplex.core.threads import switch_threads_often
from loraplex.serving.tenant_threads import default_executor

P = ParamSpec("P")

logger = logging.getLogger(__name__)


_BACKLOG = 2048


def bind(host: str, port: int, *, is_shared: bool = False) -> socket.socket:
    """Return a listening socket. Raises ConfigError that names the address.

    is_shared: other sockets of this user may listen there, too, if they are as this one.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server(
            (host, port), family=family, backlog=_BACKLOG, reuse_port=is_shared
        )
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno == errno.EADDRINUSE:
            reason = f"{os.strerror(error.errno)}; stop what listens there, or choose another port"
        raise ConfigError(f"cannot listen on {host}:{port}: {reason}") from error
    # Accepted sockets inherit it. asyncio sets it only on sockets that name their protocol. Without
    # it the chunks of a stream wait for each other, about 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


_LEAST_FILES: Final = 128
"""A server without connections opens about half of that. Libraries crash when they get no more."""
_LEAST_CONNECTIONS: Final = 8
_NUM_PORTS: Final = 3
"""HTTP, gRPC, metrics: each has the limit of connections of its own."""
_OTHER_FILES: Final = 1024
"""Open files of this process other than connections."""


def raise_open_file_limit(max_connections: int) -> int:
    """Raise this process's limit of open files for these connections, up to the hard limit.

    Return how many connections of each kind leave the rest of the server enough files: loads of
    adapters, and engines that start again, do not wait for clients to hang up. Raises ConfigError
    if the hard limit is too low for any server.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _NUM_PORTS * max_connections + _OTHER_FILES
    if hard != resource.RLIM_INFINITY and hard < wanted:
        if hard < _LEAST_FILES:
            raise ConfigError(
                f"this process may open {hard} files at once (`ulimit -Hn`), and a server needs at "
                f"least {_LEAST_FILES}; {wanted} suffice for max_connections {max_connections}"
            )
        allowed = max(_LEAST_CONNECTIONS, (hard - _reserved(hard)) // _NUM_PORTS)
        logger.warning(
            "this process may open %d files at once (`ulimit -Hn`): it takes %d connections, not "
            "max_connections %d; %d files would suffice",
            *(hard, min(allowed, max_connections), max_connections, wanted),
        )
        max_connections = min(allowed, max_connections)
        wanted = hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max_connections


def _reserved(limit: int) -> int:
    """Return how many of the files are no connections."""
    return min(_OTHER_FILES, limit // 2 + _LEAST_FILES // 2)


try:
    import uvloop
except ImportError:  # a platform that it does not know
    new_event_loop = asyncio.new_event_loop
else:
    new_event_loop = uvloop.new_event_loop


def run_on_event_loop(main: Coroutine[Any, Any, None]) -> None:
    """asyncio.run, on the loop that costs a request less; tenants take turns in its threads."""
    switch_threads_often()
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.get_loop().set_default_executor(default_executor())
        runner.run(main)


def alongside(
    work: Callable[P, Coroutine[Any, Any, None]],
) -> Callable[P, contextlib.AbstractAsyncContextManager[None]]:
    """Make a context of work: it runs while the context lasts, whose end cancels it."""

    @contextlib.asynccontextmanager
    @functools.wraps(work)
    async def running(*args: P.args, **kwargs: P.kwargs) -> AsyncIterator[None]:
        task = asyncio.create_task(work(*args, **kwargs))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    return running
