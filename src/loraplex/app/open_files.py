"""Limit of open files of the serving process."""

import logging
import resource
from typing import Final

from loraplex.core.errors import ConfigError

logger = logging.getLogger(__name__)

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
