"""What JSON parsers read in different ways, and a request therefore must not hold."""

import json
import math
from collections.abc import Sequence
from typing import Any, NoReturn

from loraplex.core.errors import InvalidRequestError

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def check_beginning(body: bytes) -> None:
    """Raise InvalidRequestError for a body that is empty or begins with a byte order mark."""
    if not body.strip():
        raise InvalidRequestError("the body is empty, so it is not valid JSON: send an object")
    if body.startswith(_BYTE_ORDER_MARK):
        raise InvalidRequestError(
            "the body begins with a byte order mark, so it is not valid JSON: send UTF-8 without"
        )


def check_unambiguous(body: bytes) -> None:
    """Raise InvalidRequestError for a name that an object has twice, or a number that is none.

    The body is valid JSON otherwise.
    """
    json.loads(body, object_pairs_hook=_object, parse_constant=_refuse_number, parse_float=_finite)


def _object(pairs: Sequence[tuple[str, Any]]) -> None:
    """Nothing is kept of it."""
    names = {name for name, _ in pairs}
    if len(names) == len(pairs):
        return
    seen = set()
    for name, _ in pairs:
        if name in seen:
            raise InvalidRequestError(
                f"the body has the field {name[:60]!r} twice in one object", param=name[:60]
            )
        seen.add(name)


def _finite(text: str) -> None:
    if not math.isfinite(float(text)):
        _refuse_number(text)


def _refuse_number(text: str) -> NoReturn:
    raise InvalidRequestError(
        f"the body has {text[:60]}, which is not a number of JSON or of a float"
    )
