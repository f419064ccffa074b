"""Who can reach a server that asks for no keys."""

import logging

from loraplex.core.addresses import is_loopback
from loraplex.core.environment import server_api_keys
from loraplex.core.errors import ConfigError
from loraplex.core.server_config import ServerConfig

logger = logging.getLogger(__name__)


def asks_for_keys(server: ServerConfig) -> bool:
    return bool(server.api_keys_file or server_api_keys())


def refuse_if_open(server: ServerConfig) -> None:
    """For `loraplex serve`: without keys a server listens on this machine only.

    Raises ConfigError, unless the operator has said that it may be open.
    """
    if asks_for_keys(server) or is_loopback(server.host):
        return
    if server.allow_no_keys:
        _warn(server.host, "allow_no_keys is set")
    else:
        raise ConfigError(
            f"host {server.host} is reached from other machines, and there are no API keys: make "
            "them with `loraplex keys create` and give --api-keys-file, or LORAPLEX_API_KEYS; or "
            "let everybody in with --allow-no-keys"
        )


def warn_if_open(server: ServerConfig, original: str) -> None:
    """For commands that stand in for another server (`original`), which listens everywhere."""
    if not asks_for_keys(server) and not is_loopback(server.host):
        _warn(server.host, f"{original}'s default has it")


def _warn(host: str, why: str) -> None:
    logger.warning(
        "anybody who reaches %s may use this server (%s): no key is asked for; --host 127.0.0.1 "
        "keeps it to this machine, --api-keys-file to who has a key",
        host,
        why,
    )
