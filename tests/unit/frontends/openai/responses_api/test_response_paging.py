"""Pages of a conversation's items."""

from typing import Any

import pytest

from loraplex.core.errors import InvalidParameterError
from loraplex.frontends.openai.responses_api.endpoints import page

ITEMS: list[dict[str, Any]] = [{"id": f"i{number}"} for number in range(120)]


def ids(**query: str) -> list[str]:
    return [item["id"] for item in page(ITEMS, query).data]


def test_twenty_and_the_latest_first_by_default():
    assert ids() == [f"i{number}" for number in range(119, 99, -1)]
    assert ids(order="asc") == [f"i{number}" for number in range(20)]


def test_a_page_begins_behind_an_item():
    assert ids(after="i2") == ["i1", "i0"]
    assert ids(after="i117", order="asc") == ["i118", "i119"]
    assert ids(after="i0") == []


@pytest.mark.parametrize("limit", [1, 100])
def test_the_smallest_and_the_largest(limit: int):
    assert len(ids(limit=str(limit))) == limit


@pytest.mark.parametrize("limit", ["0", "101", "-1", "01", "1.0", "x", ""])
def test_other_limits_are_refused(limit: str):
    with pytest.raises(InvalidParameterError, match=r"in \[1, 100\]") as caught:
        ids(limit=limit)
    assert caught.value.param == "limit"


def test_whether_there_are_more():
    two = page(ITEMS[:2], {"limit": "1", "order": "asc"})
    assert (two.first_id, two.last_id, two.has_more) == ("i0", "i0", True)
    all_of_them = page(ITEMS[:2], {"limit": "2", "order": "asc"})
    assert (all_of_them.first_id, all_of_them.last_id, all_of_them.has_more) == ("i0", "i1", False)
    none = page([], {})
    assert (none.first_id, none.last_id, none.has_more) == (None, None, False)


def test_of_two_with_one_id_the_page_goes_on_behind_the_first():
    twins = [{"id": "a"}, {"id": "b"}, {"id": "a"}, {"id": "c"}]
    found = page(twins, {"order": "asc", "after": "a"}).data
    assert [item["id"] for item in found] == ["b", "a", "c"]
