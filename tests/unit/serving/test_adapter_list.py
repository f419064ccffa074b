"""Pages of a list of adapters: what is found, in which order, and that only a page is described."""

from types import SimpleNamespace

import pytest

from loraplex.core.adapter import Residency
from loraplex.core.errors import InvalidParameterError
from loraplex.serving.adapter_cards import AdapterState
from loraplex.serving.adapter_list import (
    AdapterQuery,
    AdapterSort,
    PagedAdapter,
    page_of,
)
from loraplex.serving.adapter_usage import UsageCount
from support.naming import refused


def row(name, *, described=None, **fields):
    number = sum(map(ord, name))

    def shown():
        if described is not None:
            described.append(name)
        return PagedAdapter(
            name=name,
            model="base",
            task_id=None,
            digest="",
            created=0,
            rank=0,
            num_bytes=0,
            source="",
            residency=Residency.ABSENT,
        )

    defaults = {
        "name": name,
        "model": "base",
        "aliases": (),
        "digest": f"{number:064x}",
        "num_bytes": number % 7,
        "rank": number % 5,
        "state": AdapterState.READY,
        "residency": Residency.ABSENT,
        "has_warnings": False,
        "use": UsageCount(requests=number % 3, last_used=number % 4 or None),
        "shown": shown,
    }
    return SimpleNamespace(**(defaults | fields))


def names(page):
    return [card.name for card in page.data]


THREE = [
    row("b"),
    row("A", aliases=("First",)),
    row("c", state=AdapterState.MISSING, has_warnings=True),
]


def test_only_a_page_is_described():
    described = []
    rows = [row(f"a{number:05}", described=described) for number in range(10_000)]
    page = page_of(rows, AdapterQuery(offset=9990, limit=20))
    assert names(page) == described == [f"a{number:05}" for number in range(9990, 10_000)]
    assert page.total == 10_000
    assert page.next is None


@pytest.mark.parametrize("sort", AdapterSort)
@pytest.mark.parametrize("is_descending", [False, True])
def test_pages_give_each_adapter_once(sort, is_descending):
    rows = [row(f"{number}") for number in range(50)]
    query = AdapterQuery(sort=sort, is_descending=is_descending, limit=7)
    whole = names(page_of(rows, AdapterQuery(sort=sort, is_descending=is_descending)))
    assert sorted(whole) == sorted(each.name for each in rows)
    found, after = [], ""
    while after is not None:
        page = page_of(
            rows,
            AdapterQuery(sort=sort, is_descending=is_descending, limit=query.limit, after=after),
        )
        found += names(page)
        after = page.next
    assert found == whole


def test_a_cursor_holds_while_the_list_changes():
    first = page_of(THREE, AdapterQuery(limit=2))
    assert names(first) == ["A", "b"]
    rest = page_of([row("0"), row("bb"), *THREE], AdapterQuery(after=first.next))
    assert names(rest) == ["bb", "c"]


def test_orders():
    rows = [
        row("a", num_bytes=1, rank=8, use=UsageCount(requests=5)),
        row("b", num_bytes=3, rank=4, use=UsageCount(requests=2, last_used=9)),
        row("c", num_bytes=2, rank=16, use=UsageCount(requests=9, last_used=8)),
    ]
    for sort, expected in (
        (AdapterSort.SIZE, "acb"),
        (AdapterSort.RANK, "bac"),
        (AdapterSort.TRAFFIC, "bac"),
        (AdapterSort.LAST_USED, "acb"),
    ):
        assert "".join(names(page_of(rows, AdapterQuery(sort=sort)))) == expected
        reverse = page_of(rows, AdapterQuery(sort=sort, is_descending=True))
        assert "".join(names(reverse)) == expected[::-1]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({"search": "a"}, ["A"]),
        ({"search": "first"}, ["A"]),
        ({"search": f"{ord('b'):064x}"[:62]}, ["A", "b", "c"]),
        ({"search": "x"}, []),
        ({"state": AdapterState.MISSING}, ["c"]),
        ({"residency": Residency.DEVICE}, []),
        ({"has_warnings": True}, ["c"]),
        ({"has_warnings": False}, ["A", "b"]),
        ({"offset": 3}, []),
    ],
)
def test_what_is_found(query, expected):
    page = page_of(THREE, AdapterQuery(**query))
    assert names(page) == expected
    assert page.next is None


@pytest.mark.parametrize("after", ["x", "é", "W10=", "bm90aGluZw==", "A" * 100_000])
def test_a_bad_cursor_is_refused(after):
    with refused(InvalidParameterError, "after", "'next'", param="after"):
        page_of(THREE, AdapterQuery(after=after))


def test_the_cursor_of_another_order_is_refused():
    after = page_of(THREE, AdapterQuery(limit=1)).next
    with refused(InvalidParameterError, "after", "name", "rank", param="after"):
        page_of(THREE, AdapterQuery(sort=AdapterSort.RANK, after=after))
