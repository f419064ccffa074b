"""Salt that separates requests which must not share KV blocks."""

import functools
import hashlib
import struct
from collections.abc import Iterable, Sequence

from loraplex.core.image import ImageSpan

LaterSalts = Sequence[tuple[int, bytes]]
"""(position, salt) of blocks that have this position, or later ones; ascending."""

_VERSION = b"loraplex kv_salt 1"


@functools.lru_cache(maxsize=1024)  # most requests are of a tenant and an adapter seen before
def kv_salt(
    model: str,
    kv_dtype: str,
    adapters: tuple[tuple[str, float], ...],
    tenant: str,
    cache_salt: str = "",
) -> bytes:
    """Return 32 bytes that are equal only for equal arguments.

    `adapters` are (content digest, scale) in the order in which they are applied, because rounding
    depends on it: new weights under an old name, another scale or another order is another salt.
    Serving puts a composition into one order first (`serving.admission.compose`). `cache_salt`
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
        *((b"adapter", struct.pack("<d", scale) + content.encode()) for content, scale in adapters),
        *([(b"cache_salt", cache_salt.encode())] if cache_salt else []),
    ]:
        digest.update(_with_length(tag) + _with_length(value))
    return digest.digest()


def image_salts(salt: bytes, images: Iterable[ImageSpan]) -> tuple[tuple[int, bytes], ...]:
    """Return the salt of the blocks from each image on, made of all images up to there.

    A block with any position of an image is known by the whole digest. The tokens of an image are
    the same for all images, and ids in their place would have too few bits in a block with few of
    its positions.
    """
    found = []
    for image in images:
        size = struct.pack("<QQ", image.first, image.num_tokens)
        content = _with_length(salt) + size + _with_length(image.digest)
        salt = hashlib.sha256(content).digest()
        found.append((image.first, salt))
    return tuple(found)


def salt_before(end: int, salt: bytes, later_salts: LaterSalts) -> bytes:
    """Return the salt of a block whose positions are less than `end`."""
    for first, later in later_salts:
        if first >= end:
            break
        salt = later
    return salt


def salt_with_input(salt: bytes, encoder_token_ids: Sequence[int]) -> bytes:
    """Return the salt of a sequence whose KV depends on an encoder's input, too.

    It has all tokens of the input.
    """
    tokens = struct.pack(f"<{len(encoder_token_ids)}q", *encoder_token_ids)
    return hashlib.sha256(_with_length(salt) + _with_length(tokens)).digest()


def _with_length(field: bytes) -> bytes:
    return struct.pack("<Q", len(field)) + field
