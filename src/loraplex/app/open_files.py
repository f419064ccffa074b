"""Limit of open files of the serving process."""

import logging
import resource
from typing import Final

from loraplex.core.errors import ConfigError

logger = logging.getLogger(__name__)

_LEAST_FILES: Final = 128
"""A server without connections opens about half of that. Libraries crash when they get no more."""
_OTHER_FILES: Final = 1024
"""Open files of this process other than connections."""


def raise_open_file_limit(max_connections: int) -> None:
    """Raise this process's limit of open files for these connections, up to the hard limit.

    Raises ConfigError if the hard limit is too low for any server.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * max_connections + _OTHER_FILES  # HTTP and gRPC
    if hard != resource.RLIM_INFINITY and hard < wanted:
        if hard < _LEAST_FILES:
            raise ConfigError(
                f"this process may open {hard} files at once (`ulimit -Hn`), and a server needs at "
                f"least {_LEAST_FILES}; {wanted} suffice for max_connections {max_connections}"
            )
        logger.warning(
            "this process may open %d files at once (`ulimit -Hn`): further connections may be "
            "refused before there are max_connections %d; %d files would suffice",
            hard,
            max_connections,
            wanted,
        )
        wanted = hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
