"""Protection of servers without API keys."""

import logging
from collections.abc import Sequence

from loraplex.core.environment import server_api_keys
from loraplex.core.errors import ConfigError
from loraplex.core.server_config import ServerConfig

logger = logging.getLogger(__name__)


def needs_keys(server: ServerConfig, given: Sequence[str] = ()) -> bool:
    return bool(server.api_keys_file or server_api_keys() or given)


def refuse_if_open(server: ServerConfig, given_keys: Sequence[str] = ()) -> None:
    """Raise ConfigError for a server that other machines reach without keys, unless the operator
    allows it: the rule of `loraplex serve`."""
    if needs_keys(server, given_keys) or server.is_on_loopback:
        return
    if server.allow_no_keys:
        _warn(server.host, "allow_no_keys is set")
    else:
        raise ConfigError(
            f"host {server.host} is reached from other machines, and there are no API keys: make "
            "them with `loraplex keys create` and set --api-keys-file, or LORAPLEX_API_KEYS; or "
            "serve everyone with --allow-no-keys"
        )


def warn_if_open(server: ServerConfig, original: str) -> None:
    """Log a warning for a server that other machines reach without keys: the rule of commands that
    replace another server (`original`), which listens on all addresses."""
    if not needs_keys(server) and not server.is_on_loopback:
        _warn(server.host, f"{original}'s default has it")


def warn_of_visible_key() -> None:
    """Log a warning for a key that is given as a flag."""
    logger.warning(
        "the key of --api-key is visible in the list of processes of this machine: use a file "
        "(--api-keys-file), or LORAPLEX_API_KEYS in the environment"
    )


def _warn(host: str, why: str) -> None:
    logger.warning(
        "every client that reaches %s may use this server without a key (%s); --host 127.0.0.1 "
        "restricts it to this machine, --api-keys-file to clients with a key",
        host,
        why,
    )
