"""Cursors of lists: the place of a page's last entry, as text for clients."""

import base64
from typing import Final, TypeVar

import msgspec

from loraplex.core.errors import InvalidParameterError

PlaceT = TypeVar("PlaceT")

_MAX_CURSOR: Final = 4096


def cursor_of(place: object) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode(place)).decode()


def place_of(cursor: str, kind: type[PlaceT]) -> PlaceT:
    """Return the place of a cursor. Raises InvalidParameterError."""
    try:
        content = base64.b64decode(cursor[:_MAX_CURSOR], altchars=b"-_", validate=True)
        return msgspec.json.decode(content, type=kind)
    except ValueError:
        raise InvalidParameterError(
            "after must be the cursor 'next' of a page of the same list", param="after"
        ) from None
