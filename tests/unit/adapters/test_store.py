import pytest

from loraplex.adapters.staged import StagedAdapter
from loraplex.adapters.store import AdapterStore
from loraplex.core.adapter import (
    AdapterRef,
    AdapterSource,
    ByDigest,
    ByName,
    ByTaskId,
    LoraTarget,
)
from loraplex.core.errors import (
    AdapterExistsError,
    AdapterNotFoundError,
    InvalidParameterError,
)


def staged(digest="d1", ranks=(2, 4), warnings=()) -> StagedAdapter:
    targets = tuple(LoraTarget(i, "q_proj", rank, 8, 8) for i, rank in enumerate(ranks))
    source = AdapterSource(digest, f"/state/{digest}", 100, targets)
    return StagedAdapter(source=source, dtypes=("F32",), num_tensors=4, warnings=warnings)


@pytest.fixture
def store() -> AdapterStore:
    return AdapterStore(unix_seconds=lambda: 1234.9)


def add(store, name="cats", adapter=None, *, tenant="t", model="m", **kwargs):
    adapter = adapter or staged()
    return store.add(model, tenant, name, adapter, path=f"/adapters/{name}", **kwargs)


def by_name(name, tenant="t", model="m") -> AdapterRef:
    return AdapterRef(model, tenant, ByName(name))


def by_task(task_id, tenant="t") -> AdapterRef:
    return AdapterRef("m", tenant, ByTaskId(task_id))


def test_an_added_adapter_is_found_by_name_task_and_digest(store):
    version = add(store, "cats", staged("abc", warnings=("w",)), task_id=0)
    assert store.resolve(by_name("cats")) == version
    assert store.resolve(by_task(0)) == version
    assert store.resolve(AdapterRef("m", "t", ByDigest("abc"))) == version
    assert (version.digest, version.rank, version.number) == ("abc", 4, 1)
    assert (version.created, version.path, version.warnings) == (1234, "/adapters/cats", ("w",))


def test_tenants_and_models_do_not_see_each_other(store):
    add(store, "cats", task_id=1)
    for ref in (by_name("cats", tenant="u"), by_name("cats", model="n"), by_task(1, tenant="u")):
        with pytest.raises(AdapterNotFoundError) as caught:
            store.resolve(ref)
        assert "no adapter is registered" in caught.value.message
    with pytest.raises(AdapterNotFoundError):
        store.resolve(AdapterRef("m", "u", ByDigest("d1")))
    add(store, "cats", staged("other"), tenant="u", task_id=1)
    assert store.resolve(by_name("cats")).digest == "d1"
    assert [v.digest for v in store.list("u")] == ["other"]


class TestReplacing:
    def test_a_taken_name_is_refused_unless_replaced(self, store):
        first = add(store, "cats", staged("d1"), task_id=7)
        with pytest.raises(AdapterExistsError, match="'cats' already exists"):
            add(store, "cats", staged("d2"))
        assert store.resolve(by_name("cats")) == first
        second = add(store, "cats", staged("d2"), replace=True)
        assert (second.number, second.task_id, second.digest) == (2, 7, "d2")
        assert store.resolve(by_task(7)) == second
        assert first.digest == "d1"

    def test_a_new_task_id_takes_the_old_one_s_place(self, store):
        add(store, "cats", task_id=7)
        add(store, "cats", task_id=8, replace=True)
        with pytest.raises(AdapterNotFoundError):
            store.resolve(by_task(7))
        assert store.resolve(by_task(8)).name == "cats"
        add(store, "dogs", task_id=7)

    def test_the_task_id_of_another_name_is_refused_even_then(self, store):
        add(store, "cats", task_id=7)
        add(store, "dogs")
        for replace in (False, True):
            with pytest.raises(AdapterExistsError, match="task 7 already is adapter 'cats'"):
                add(store, "dogs" if replace else "cows", task_id=7, replace=replace)
        assert store.resolve(by_name("dogs")).number == 1

    def test_check_free_says_the_same_and_changes_nothing(self, store):
        store.check_free("m", "t", "cats", 7, replace=False)
        add(store, "cats", task_id=7)
        with pytest.raises(AdapterExistsError):
            store.check_free("m", "t", "cats", None, replace=False)
        with pytest.raises(AdapterExistsError):
            store.check_free("m", "t", "dogs", 7, replace=True)
        store.check_free("m", "t", "cats", 7, replace=True)
        assert [v.name for v in store.list("t")] == ["cats"]


class TestRemoving:
    def test_by_name_or_task(self, store):
        add(store, "cats", task_id=7)
        add(store, "dogs", task_id=8)
        assert store.remove(by_task(7)).name == "cats"
        store.remove(by_name("dogs"))
        assert store.list("t") == []
        with pytest.raises(AdapterNotFoundError):
            store.remove(by_name("cats"))
        assert add(store, "cats", task_id=8).number == 1


class TestNotFound:
    def test_a_name_tells_the_nearest_first(self, store):
        for name in ("zebras", "capitals", "cats"):
            add(store, name)
        with pytest.raises(AdapterNotFoundError) as caught:
            store.resolve(by_name("capitels"))
        assert caught.value.message == (
            "adapter 'capitels' not found for model 'm'; "
            "known adapters: 'capitals', 'cats', 'zebras'"
        )

    def test_many_names_are_cut_off(self, store):
        for i in range(14):
            add(store, f"n{i:02}")
        with pytest.raises(AdapterNotFoundError, match=r"and 4 more$"):
            store.resolve(by_name("other"))

    def test_a_task_id_says_the_sentence_that_clients_look_for(self, store):
        sentence = "LoRA task 5 not found in cache. Please send LoRA weights with request"
        with pytest.raises(AdapterNotFoundError) as caught:
            store.resolve(by_task(5))
        assert sentence in caught.value.message


@pytest.mark.parametrize("name", ["a", "a.b-c_d", "../../etc/passwd", "日本語", "a b", "x" * 256])
def test_names_are_free_text_and_never_paths(store, name):
    assert add(store, name).name == name
    assert store.resolve(by_name(name)).name == name


@pytest.mark.parametrize("name", ["", "x" * 257, "a\nb", "\0", "a\x7f", "a\u2028b", "\ud800"])
def test_bad_names_are_refused(store, name):
    with pytest.raises(InvalidParameterError) as caught:
        add(store, name)
    assert caught.value.param == "name"


@pytest.mark.parametrize("task_id", [-1, 2**64])
def test_task_ids_are_uint64(store, task_id):
    with pytest.raises(InvalidParameterError) as caught:
        add(store, task_id=task_id)
    assert caught.value.param == "task_id"
    assert add(store, task_id=2**64 - 1).task_id == 2**64 - 1


def test_a_listing_is_sorted(store):
    for model, name in (("n", "a"), ("m", "z"), ("m", "b")):
        add(store, name, model=model)
    assert [(v.model, v.name) for v in store.list("t")] == [("m", "b"), ("m", "z"), ("n", "a")]
    assert [v.name for v in store.list("t", "n")] == ["a"]
    assert store.list("nobody") == []
