"""Listening sockets. Independent of the web stack, which takes a second to import."""

import errno
import os
import socket

from loraplex.core.errors import ConfigError

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
