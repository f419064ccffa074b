import pytest

from loraplex.core.errors import ResponseNotFoundError
from loraplex.frontends.openai.context import StoreLimits
from loraplex.frontends.openai.responses_api.store import ResponseStore, StoredResponse


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def stored(size: int = 10) -> StoredResponse:
    return StoredResponse(b"x" * (size - 2), b"y", b"z")


def store_of(clock: Clock | None = None, **limits: float) -> ResponseStore:
    return ResponseStore(StoreLimits(**limits), clock or Clock())


def kept(store: ResponseStore, tenant: str, *ids: str) -> list[str]:
    found = []
    for response_id in ids:
        try:
            store.get(tenant, response_id)
        except ResponseNotFoundError:
            continue
        found.append(response_id)
    return found


def test_what_is_kept_comes_back_whole():
    store = store_of()
    given = StoredResponse(b"{}", b"[1]", b"[2]")
    store.keep("a", "r", given)
    assert store.get("a", "r") == given


def test_the_oldest_of_the_tenant_goes_first():
    store = store_of(max_responses=2)
    store.keep("b", "r1", stored())
    for response_id in ("r1", "r2", "r3"):
        store.keep("a", response_id, stored())
    assert kept(store, "a", "r1", "r2", "r3") == ["r2", "r3"]
    assert kept(store, "b", "r1") == ["r1"]


def test_bytes_are_those_of_the_tenant():
    store = store_of(max_bytes=25)
    store.keep("b", "r1", stored(25))
    for response_id in ("r1", "r2", "r3"):
        store.keep("a", response_id, stored(10))
    assert kept(store, "a", "r1", "r2", "r3") == ["r2", "r3"]
    store.keep("a", "r4", stored(25))
    assert kept(store, "a", "r2", "r3", "r4") == ["r4"]
    assert kept(store, "b", "r1") == ["r1"]


def test_what_is_larger_than_all_of_it_moves_nothing():
    store = store_of(max_bytes=25)
    store.keep("a", "r1", stored(10))
    store.keep("a", "r2", stored(26))
    assert kept(store, "a", "r1", "r2") == ["r1"]


def test_removing_frees_capacity():
    store = store_of(max_bytes=20)
    store.keep("a", "r1", stored(10))
    store.keep("a", "r2", stored(10))
    store.remove("a", "r1")
    store.keep("a", "r3", stored(10))
    assert kept(store, "a", "r1", "r2", "r3") == ["r2", "r3"]


def test_age():
    clock = Clock()
    store = store_of(clock, max_seconds=60)
    store.keep("a", "r1", stored())
    clock.now = 30.0
    store.keep("b", "r2", stored())
    clock.now = 59.9
    assert kept(store, "a", "r1") == ["r1"]
    clock.now = 60.0
    assert kept(store, "a", "r1") == []
    assert kept(store, "b", "r2") == ["r2"]


def test_a_store_of_nothing():
    store = store_of(max_responses=0)
    assert not store.is_open
    store.keep("a", "r1", stored())
    assert kept(store, "a", "r1") == []


@pytest.mark.parametrize("tenant", ["b", "a"])
def test_the_error_names_the_response(tenant: str):
    store = store_of()
    store.keep("a", "r1", stored())
    with pytest.raises(ResponseNotFoundError, match="'r2'") as caught:
        store.get(tenant, "r2", param="previous_response_id")
    assert caught.value.param == "previous_response_id"
    with pytest.raises(ResponseNotFoundError):
        store.remove("b", "r1")
    assert kept(store, "a", "r1") == ["r1"]
