"""Pages of a list of adapters: found, ordered and cut before any of them is described.

Nothing here waits: thousands of adapters take a while, so call it in a thread.
"""

import enum
import operator
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple, Protocol

import msgspec

from loraplex.core.adapter import Residency
from loraplex.core.errors import InvalidParameterError
from loraplex.serving.adapter_cards import AdapterCard, AdapterState
from loraplex.serving.adapter_usage import UsageCount
from loraplex.serving.cursors import cursor_of, place_of

MAX_PAGE: Final = 1000
DEFAULT_PAGE: Final = 100
MAX_SEARCH: Final = 256
"""Characters of a search; no name is longer."""


class AdapterSort(enum.StrEnum):
    """Order of a list of adapters; equal ones are in the order of their names."""

    NAME = "name"
    LAST_USED = "last_used"
    SIZE = "size"
    RANK = "rank"
    TRAFFIC = "traffic"


class AdapterQuery(msgspec.Struct, frozen=True, kw_only=True):
    """One page of a list."""

    search: str = ""
    """Part of a name or an alias, in any case, or the beginning of a digest."""
    sort: AdapterSort = AdapterSort.NAME
    is_descending: bool = False
    state: AdapterState | None = None
    residency: Residency | None = None
    has_warnings: bool | None = None
    after: str = ""
    """Cursor of the page before."""
    offset: int = 0
    """Number of adapters before the page, or after the cursor."""
    limit: int = DEFAULT_PAGE


class PagedAdapter(AdapterCard, frozen=True, kw_only=True):
    """Adapter as a page shows it, with its use."""

    residency: Residency
    pinned: bool = False
    aliases: tuple[str, ...] = ()
    num_running: int | None = None
    """In-flight requests that named it; null for tenants which do not own it."""
    device_pages: int | None = None
    """Pages that it takes on the device; null until it was validated, and if it is unfit."""
    requests: int = 0
    """Requests that ended since the start of the server, of all tenants if the caller owns it."""
    errors: int = 0
    last_used: int | None = None
    """Time at which the newest of the requests ended, in Unix seconds."""


class AdapterPage(msgspec.Struct, frozen=True, kw_only=True):
    data: list[PagedAdapter]
    next: str | None
    """Cursor of the next page; null: there is none."""
    total: int
    """Number of adapters on all pages."""


class AdapterRow(Protocol):
    """Adapter in a list. Values are computed when they are read: most lists need few of them."""

    @property
    def name(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def aliases(self) -> Sequence[str]: ...
    @property
    def digest(self) -> str: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def state(self) -> AdapterState: ...
    @property
    def residency(self) -> Residency: ...
    @property
    def has_warnings(self) -> bool: ...
    @property
    def use(self) -> UsageCount: ...

    def shown(self) -> PagedAdapter:
        """Describe it."""
        ...


class _Place(NamedTuple):
    """Place of an adapter in an order."""

    value: int
    name: str
    model: str


def page_of(rows: Iterable[AdapterRow], query: AdapterQuery) -> AdapterPage:
    """Return a page. Raises InvalidParameterError for a cursor that is none of this order."""
    found = [(_place(row, query.sort), row) for row in rows if _matches(row, query)]
    found.sort(key=lambda each: each[0], reverse=query.is_descending)
    begin = query.offset
    if query.after:
        last = _last_place(query)
        ahead = operator.ge if query.is_descending else operator.le
        begin += sum(ahead(place, last) for place, _ in found)
    shown = found[begin : begin + query.limit]
    has_more = bool(shown) and begin + len(shown) < len(found)
    return AdapterPage(
        data=[row.shown() for _, row in shown],
        next=cursor_of((query.sort, *shown[-1][0])) if has_more else None,
        total=len(found),
    )


def _matches(row: AdapterRow, query: AdapterQuery) -> bool:
    if query.state is not None and row.state is not query.state:
        return False
    if query.residency is not None and row.residency is not query.residency:
        return False
    if query.has_warnings is not None and row.has_warnings is not query.has_warnings:
        return False
    wanted = query.search.casefold()
    if not wanted or wanted in row.name.casefold() or row.digest.startswith(wanted):
        return True
    return any(wanted in alias.casefold() for alias in row.aliases)


def _place(row: AdapterRow, sort: AdapterSort) -> _Place:
    match sort:
        case AdapterSort.NAME:
            value = 0
        case AdapterSort.LAST_USED:
            value = row.use.last_used or 0
        case AdapterSort.SIZE:
            value = row.num_bytes
        case AdapterSort.RANK:
            value = row.rank
        case AdapterSort.TRAFFIC:
            value = row.use.requests
    return _Place(value, row.name, row.model)


def _last_place(query: AdapterQuery) -> _Place:
    sort, value, name, model = place_of(query.after, tuple[AdapterSort, int, str, str])
    if sort is not query.sort:
        raise InvalidParameterError(
            f"after is a cursor of the order {sort}, but sort is {query.sort}", param="after"
        )
    return _Place(value, name, model)
