"""API keys: how they are made, hashed, and looked for.

A key is `lpx_` and 256 random bits. At rest there is its SHA-256. That is enough, and no scrypt is
wanted: stretching protects secrets that people choose, and a guess at 256 bits never succeeds,
however cheap it is. It would also cost each request tens of milliseconds, and so let anybody who
sends wrong keys stop the server. The price is that a weak key must not come in: our own are random,
and one that comes from elsewhere is refused unless it is as long as MIN_KEY_LENGTH and looks drawn.
"""

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable

from loraplex.core.errors import ConfigError

KEY_PREFIX = "lpx_"
MIN_KEY_LENGTH = 32
MAX_KEY_LENGTH = 512
MAX_KEYS = 10_000
"""Every check compares with all of them: some 4 ms for so many."""
_MIN_DIFFERENT = 12
"""Characters that a key of MIN_KEY_LENGTH has. Of 32 drawn hexadecimal digits fewer than 10 in a
million have less than 9; words and repeated patterns mostly have less than 12."""
_MIN_DIFFERENT_HEX = 8
_HEX = re.compile(r"[0-9a-fA-F]+")
_KEY = re.compile(r"[!-~]+")
_SECRET_BYTES = 32


def new_key() -> str:
    """A key that nobody has."""
    return KEY_PREFIX + secrets.token_urlsafe(_SECRET_BYTES)


def new_key_id() -> str:
    """What people call a key by: it tells nothing of it."""
    return secrets.token_hex(4)


def hash_of(key: str) -> bytes:
    """32 bytes."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def check_strength(key: str, where: str) -> None:
    """Raise ConfigError for a key that could be guessed. The error does not tell it."""
    if not _KEY.fullmatch(key) or len(key) > MAX_KEY_LENGTH:
        raise ConfigError(
            f"{where}: a key must have at most {MAX_KEY_LENGTH} characters of ASCII, without spaces"
        )
    least = _MIN_DIFFERENT_HEX if _HEX.fullmatch(key) else _MIN_DIFFERENT
    if len(key) < MIN_KEY_LENGTH or len(set(key)) < least:
        raise ConfigError(
            f"{where}: a key that could be guessed: take one of at least {MIN_KEY_LENGTH} random "
            "characters, as `loraplex keys create` or `openssl rand -hex 32` makes them"
        )


def find_hash(wanted: bytes, hashes: Iterable[bytes]) -> int | None:
    """The place of a hash, or None. Compares with all: the time tells nothing of which it was."""
    found = None
    for index, known in enumerate(hashes):
        if hmac.compare_digest(known, wanted):
            found = index
    return found
