"""Query parameters of the lists of adapters and of their use."""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final, TypeVar

from loraplex.core.adapter import Residency
from loraplex.core.errors import InvalidParameterError
from loraplex.frontends.openapi.operation import Parameter
from loraplex.serving.adapter_cards import AdapterState
from loraplex.serving.adapter_list import (
    DEFAULT_PAGE,
    MAX_PAGE,
    MAX_SEARCH,
    AdapterQuery,
    AdapterSort,
)

Word = TypeVar("Word", bound=StrEnum)

_FLAGS: Final = MappingProxyType({"true": True, "false": False})
_MAX_OFFSET: Final = 10_000_000
_SORTS: Final = tuple(sign + sort for sort in AdapterSort for sign in ("", "-"))

LIMIT: Final = Parameter(
    "limit",
    f"Maximum number of entries; {DEFAULT_PAGE} if it is absent.",
    {"type": "integer", "minimum": 1, "maximum": MAX_PAGE},
)
MAX_VERSION: Final = 999_999_999
VERSION: Final = Parameter(
    "version",
    "Number of a version in the history, which is described in place of the present one.",
    {"type": "integer", "minimum": 1, "maximum": MAX_VERSION},
)
AFTER: Final = Parameter("after", "Cursor `next` of the page before.")
OF_LIST: Final = (
    Parameter(
        "search",
        "Part of a name or an alias, in any case, or the beginning of a digest.",
        {"type": "string", "maxLength": MAX_SEARCH},
    ),
    Parameter(
        "sort",
        "Order, with a leading - from the largest to the smallest; name if it is absent.",
        {"type": "string", "enum": list(_SORTS)},
    ),
    Parameter("state", "Only adapters in this state.", {"enum": [*AdapterState]}),
    Parameter("residency", "Only adapters that are there.", {"enum": [*Residency]}),
    Parameter("has_warnings", "Only adapters with warnings, or without.", {"enum": list(_FLAGS)}),
    AFTER,
    Parameter(
        "offset",
        "Number of adapters to skip, for a view that jumps. A cursor is exact while the list "
        "changes.",
        {"type": "integer", "minimum": 0, "maximum": _MAX_OFFSET},
    ),
    LIMIT,
)
_NAMES: Final = frozenset(parameter.name for parameter in OF_LIST)


def page_query(query: Mapping[str, str]) -> AdapterQuery | None:
    """Parse the query of a page; None: it has no parameter of a page.

    Raises InvalidParameterError.
    """
    if _NAMES.isdisjoint(query):
        return None
    search, sort = query.get("search", ""), query.get("sort", AdapterSort.NAME.value)
    if len(search) > MAX_SEARCH:
        raise InvalidParameterError(
            f"search must have at most {MAX_SEARCH} characters, got {len(search)}", param="search"
        )
    if sort not in _SORTS:
        raise _unknown("sort", sort, _SORTS)
    return AdapterQuery(
        search=search,
        sort=AdapterSort(sort.removeprefix("-")),
        is_descending=sort.startswith("-"),
        state=word(query, "state", AdapterState),
        residency=word(query, "residency", Residency),
        has_warnings=_flag(query, "has_warnings"),
        after=query.get("after", ""),
        offset=number(query, "offset", 0, 0, _MAX_OFFSET),
        limit=limit(query),
    )


def limit(query: Mapping[str, str]) -> int:
    return number(query, "limit", DEFAULT_PAGE, 1, MAX_PAGE)


def number(query: Mapping[str, str], name: str, default: int, least: int, most: int) -> int:
    """Parse a whole number. Raises InvalidParameterError."""
    given = query.get(name)
    if given is None:
        return default
    if given.isascii() and given.isdecimal() and len(given) < 10 and least <= int(given) <= most:
        return int(given)
    raise InvalidParameterError(
        f"{name} must be in [{least}, {most}], got {given[:64]!r}", param=name
    )


def word(query: Mapping[str, str], name: str, kind: type[Word]) -> Word | None:
    given = query.get(name)
    if given is None:
        return None
    try:
        return kind(given)
    except ValueError:
        raise _unknown(name, given, tuple(kind)) from None


def _flag(query: Mapping[str, str], name: str) -> bool | None:
    given = query.get(name)
    if given is None:
        return None
    if given not in _FLAGS:
        raise _unknown(name, given, tuple(_FLAGS))
    return _FLAGS[given]


def _unknown(name: str, given: str, known: tuple[str, ...]) -> InvalidParameterError:
    return InvalidParameterError(
        f"{name} must be one of {', '.join(known)}; got {given[:64]!r}", param=name
    )
