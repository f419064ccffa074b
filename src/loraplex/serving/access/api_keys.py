"""API keys: how they are made, hashed and checked for strength.

A key is `lpx_` and 256 random bits. Only its SHA-256 is stored. A slow hash such as scrypt would
not help: it protects secrets that people choose, while a search for 256 random bits never
succeeds, however cheap an attempt is. It would cost each request tens of milliseconds, so a client
that sends wrong keys could stop the server. In return weak keys must be refused: our own are
random, and a key from elsewhere must have at least MIN_KEY_LENGTH characters and look random.
"""

import hashlib
import re
import secrets

from loraplex.core.errors import ConfigError

KEY_PREFIX = "lpx_"
MIN_KEY_LENGTH = 32
MAX_KEY_LENGTH = 512
MAX_KEYS = 10_000
_MIN_DIFFERENT = 12
"""Minimum number of different characters. Fewer than 10 in a million random strings of 32
hexadecimal digits have less than 9; words and repeated patterns mostly have less than 12."""
_MIN_DIFFERENT_HEX = 8
_HEX = re.compile(r"[0-9a-fA-F]+")
_KEY = re.compile(r"[!-~]+")
_SECRET_BYTES = 32


def new_key() -> str:
    """Return a random key."""
    return KEY_PREFIX + secrets.token_urlsafe(_SECRET_BYTES)


def new_key_id() -> str:
    """Return a name for a key, which is independent of the key itself."""
    return secrets.token_hex(4)


def digest_of(key: str) -> bytes:
    """Return the SHA-256 digest of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def check_strength(key: str, where: str) -> None:
    """Raise ConfigError for a weak key. The error does not contain the key."""
    if not _KEY.fullmatch(key) or len(key) > MAX_KEY_LENGTH:
        raise ConfigError(
            f"{where}: a key must have at most {MAX_KEY_LENGTH} characters of ASCII, without spaces"
        )
    least = _MIN_DIFFERENT_HEX if _HEX.fullmatch(key) else _MIN_DIFFERENT
    if len(key) < MIN_KEY_LENGTH or len(set(key)) < least:
        raise ConfigError(
            f"{where}: the key is not strong enough: use one of at least {MIN_KEY_LENGTH} random "
            "characters, as `loraplex keys create` or `openssl rand -hex 32` makes them"
        )
