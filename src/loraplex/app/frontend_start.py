"""Start message of a front-end process."""

import msgspec

from loraplex.core.config import Config


class FrontendStart(msgspec.Struct, frozen=True):
    """Start message of a front-end process, as msgpack."""

    number: int
    config: Config
    """Configuration with local paths, the limits of one process, and the port that it serves."""
    keys_variable: str
    """LORAPLEX_API_KEYS, which is not in the environment of our processes."""
    given_keys: tuple[str, ...]
    owner_path: str
    """Unix socket of the owner for messages."""
    http_path: str
    """The same for requests that it forwards."""
