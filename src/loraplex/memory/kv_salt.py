"""Salt that separates requests which must not share KV blocks."""

import hashlib
import struct
from collections.abc import Sequence

_VERSION = b"loraplex kv_salt 1"


def kv_salt(
    model: str,
    kv_dtype: str,
    adapters: Sequence[tuple[str, float]],
    tenant: str,
    cache_salt: str = "",
) -> bytes:
    """Return 32 bytes that are equal only for equal arguments.

    `adapters` are (content digest, scale) in the order in which they are applied, because rounding
    depends on it: new weights under an old name, another scale or another order is another salt.
    Serving puts a composition into one order first (`serving.adapters.composition`). `cache_salt`
    is chosen by the client.

    The salt is a SHA-256 over tagged fields, each preceded by its length, so that no two argument
    lists have one encoding.
    """
    digest = hashlib.sha256()
    for tag, value in [
        (b"version", _VERSION),
        (b"model", model.encode()),
        (b"kv_dtype", kv_dtype.encode()),
        (b"tenant", tenant.encode()),
        *((b"adapter", _adapter(*adapter)) for adapter in adapters),
        *([(b"cache_salt", cache_salt.encode())] if cache_salt else []),
    ]:
        digest.update(_with_length(tag) + _with_length(value))
    return digest.digest()


def _adapter(content_digest: str, scale: float) -> bytes:
    return struct.pack("<d", scale) + content_digest.encode()


def _with_length(field: bytes) -> bytes:
    return struct.pack("<Q", len(field)) + field
