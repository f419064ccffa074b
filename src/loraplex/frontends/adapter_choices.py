"""Field `adapters` of a request, the same in every front end: adapters and their scales.

["fr", {"name": "legal", "scale": 0.5}, {"task_id": 7}, {"digest": "9f86...", "scale": -1}]
"""

import json
from collections.abc import Mapping
from typing import Any

from loraplex.core.adapter import (
    MAX_TASK_ID,
    AdapterChoice,
    AdapterKey,
    ByDigest,
    ByName,
    ByTaskId,
)
from loraplex.core.errors import InvalidParameterError

FIELD = "adapters"

_KEYS = ("name", "task_id", "digest")
_FIELDS = (*_KEYS, "scale")
_MAX_SHOWN_CHARS = 60


def read_choices(value: Any, path: str = FIELD) -> tuple[AdapterChoice, ...]:
    """Parse the value of a JSON document at `path`. Raises InvalidParameterError."""
    if not isinstance(value, list):
        raise _refused(path, "a list of adapters, each a name or an object", value)
    return tuple(read_choice(entry, f"{path}[{index}]") for index, entry in enumerate(value))


def read_choice(value: Any, path: str) -> AdapterChoice:
    """One adapter: its name, or an object with one of name, task_id and digest, and a scale."""
    if isinstance(value, str):
        return AdapterChoice(_key("name", value, f"{path}.name"))
    if not isinstance(value, Mapping):
        raise _refused(path, "an adapter's name or an object with name and scale", value)
    for field in value:
        if field not in _FIELDS:
            raise InvalidParameterError(
                f"{path} has no field {field!r}; known: {', '.join(_FIELDS)}",
                param=f"{path}.{field}",
            )
    given = [field for field in _KEYS if value.get(field) is not None]
    if len(given) != 1:
        found = " and ".join(given) or "none"
        raise InvalidParameterError(
            f"{path} must have one of name, task_id and digest, got {found}",
            param=path,
        )
    [field] = given
    return AdapterChoice(
        _key(field, value[field], f"{path}.{field}"), _scale(value.get("scale"), f"{path}.scale")
    )


def _key(field: str, value: Any, path: str) -> AdapterKey:
    if field == "task_id":
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        if not is_integer or not 0 <= value <= MAX_TASK_ID:
            raise _refused(path, "an integer from 0 to 2**64 - 1", value)
        return ByTaskId(value)
    if not isinstance(value, str) or not value:
        raise _refused(path, "a string that is not empty", value)
    return ByName(value) if field == "name" else ByDigest(value)


def _scale(value: Any, path: str) -> float:
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _refused(path, "a number", value)
    try:
        return float(value)
    except OverflowError:
        raise _refused(path, "a number", value) from None


def _refused(path: str, expected: str, value: Any) -> InvalidParameterError:
    shown = json.dumps(value, ensure_ascii=False, default=str)
    if len(shown) > _MAX_SHOWN_CHARS:
        shown = f"{shown[:_MAX_SHOWN_CHARS]}..."
    return InvalidParameterError(f"{path} must be {expected}, got {shown}", param=path)
