import re

import msgspec
import pytest

from loraplex.adapters.index import MAX_RECALLED
from loraplex.adapters.staged import StagedAdapter
from loraplex.adapters.store import MAX_HISTORY, AdapterStore, VersionOrigin
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
from support.naming import naming, refused


def staged(digest="d1", ranks=(2, 4), warnings=()) -> StagedAdapter:
    targets = tuple(LoraTarget(i, "q_proj", rank, 8, 8) for i, rank in enumerate(ranks))
    source = AdapterSource(digest, f"/state/{digest}", 100, targets)
    return StagedAdapter(source=source, dtypes=("F32",), num_tensors=4, warnings=warnings)


@pytest.fixture
def store() -> AdapterStore:
    return AdapterStore(unix_seconds=lambda: 1234.9)


def add(store, name="cats", adapter=None, *, tenant="t", model="m", **kwargs):
    adapter = adapter or staged()
    path = f"/adapters/{name}"
    return store.register(model, tenant, name, adapter, path=path, **kwargs).version


def register(store, name, adapter, *, tenant="t", **kwargs):
    return store.register("m", tenant, name, adapter, path=f"/adapters/{name}", **kwargs)


def numbers(store, name="cats"):
    return [version.number for version in store.history(by_name(name))]


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
    assert (version.created, version.path, version.staged.warnings) == (
        1234,
        "/adapters/cats",
        ("w",),
    )


def test_task_ids_are_listed_where_one_is_unknown(store):
    add(store, "bats")
    add(store, "cats", task_id=8)
    add(store, "dogs", task_id=7)
    with pytest.raises(
        AdapterNotFoundError, match=r"adapters: 'dogs' \(task 7\), 'cats' \(task 8\), 'bats'$"
    ):
        store.resolve(by_task(9))


def test_tenants_and_models_do_not_see_each_other(store):
    add(store, "cats", task_id=1)
    for ref in (by_name("cats", tenant="u"), by_name("cats", model="n"), by_task(1, tenant="u")):
        with pytest.raises(AdapterNotFoundError) as caught:
            store.resolve(ref)
        assert re.search(naming("no adapter"), caught.value.message)
    with pytest.raises(AdapterNotFoundError):
        store.resolve(AdapterRef("m", "u", ByDigest("d1")))
    add(store, "cats", staged("other"), tenant="u", task_id=1)
    assert store.resolve(by_name("cats")).digest == "d1"
    assert [v.digest for v in store.list("u")] == ["other"]


def test_finding_raises_no_error(store):
    version = add(store, "cats", task_id=3)
    assert store.find(by_name("cats")) == store.find(by_task(3)) == version
    for ref in (by_name("dogs"), by_task(4), AdapterRef("m", "t", ByDigest("d9"))):
        assert store.find(ref) is None


class TestReplacing:
    def test_a_taken_name_is_refused_if_not_replaced(self, store):
        first = add(store, "cats", staged("d1"), task_id=7)
        with refused(AdapterExistsError, "cats", "d1", param="name"):
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
            with refused(AdapterExistsError, 7, "cats", param="task_id"):
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


class TestReloading:
    def test_the_same_bytes_are_the_same_version(self, store):
        first = register(store, "cats", staged("d1"), task_id=7)
        again = register(store, "cats", staged("d1"), replace=True)
        assert (first.is_unchanged, again.is_unchanged) == (False, True)
        assert again.version == first.version == store.resolve(by_name("cats"))
        assert numbers(store) == [1]

    def test_they_may_come_from_elsewhere_with_another_report(self, store):
        register(store, "cats", staged("d1"))
        version = store.register(
            "m", "t", "cats", staged("d1", warnings=("w",)), path="/new", replace=True
        ).version
        assert (version.number, version.path, version.staged.warnings) == (1, "/new", ("w",))
        assert store.history(by_name("cats")) == [version]

    def test_the_time_that_it_took_is_no_difference(self, store):
        slow = msgspec.structs.replace(staged("d1"), seconds={"read": 3.0}, was_known=True)
        first = register(store, "cats", slow).version
        assert register(store, "cats", staged("d1"), replace=True).version == first

    def test_other_bytes_are_a_new_version(self, store):
        first = register(store, "cats", staged("d1")).version
        second = register(store, "cats", staged("d2"), replace=True)
        assert (second.is_unchanged, second.version.number) == (False, 2)
        assert store.history(by_name("cats")) == [second.version, first]

    def test_bytes_that_came_back_are_a_new_version_too(self, store):
        for digest in ("d1", "d2", "d1"):
            add(store, "cats", staged(digest), replace=True)
        assert [(v.number, v.digest) for v in store.history(by_name("cats"))] == [
            (3, "d1"),
            (2, "d2"),
            (1, "d1"),
        ]

    def test_the_history_has_an_end(self, store):
        for i in range(MAX_HISTORY + 3):
            add(store, "cats", staged(f"d{i}"), replace=True)
        assert numbers(store) == list(range(MAX_HISTORY + 3, 3, -1))


class TestRecalling:
    def recalled(self, store, digest, tenant="t"):
        return store.recall(("m", tenant), digest, lambda version: None)

    def test_a_kept_version_is_found_by_its_digest(self, store):
        old = add(store, "cats", staged("d1"))
        new = add(store, "cats", staged("d2"), replace=True)
        assert store.kept(("m", "t"), "d1") is None
        assert self.recalled(store, "d1") == store.kept(("m", "t"), "d1") == old
        assert [store.is_kept_only(version) for version in (old, new)] == [True, False]
        assert store.find(AdapterRef("m", "t", ByDigest("d1"))) is None, "no name has it"

    def test_nothing_else_is(self, store):
        add(store, "cats", staged("d1"))
        assert self.recalled(store, "d2") is None
        assert self.recalled(store, "d1", "other") is None
        assert store.kept(("m", "other"), "d1") is None

    def test_what_does_not_fit_is_not(self, store):
        add(store, "cats", staged("d1"))
        add(store, "cats", staged("d2"), replace=True)

        def check(version):
            raise AdapterExistsError(version.digest)

        with pytest.raises(AdapterExistsError, match="d1"):
            store.recall(("m", "t"), "d1", check)
        assert store.kept(("m", "t"), "d1") is None

    def test_it_is_forgotten_with_its_history(self, store):
        def begin():
            add(store, "cats", staged("d1"), replace=True)
            add(store, "cats", staged("d2"), replace=True)
            self.recalled(store, "d1")
            add(store, "dogs", staged("d3"), replace=True)
            assert store.kept(("m", "t"), "d1") is not None, "another name changed"

        begin()
        store.remove(by_name("cats"))
        assert store.kept(("m", "t"), "d1") is None
        assert self.recalled(store, "d1") is None
        begin()
        store.rollback(by_name("cats"))
        assert store.kept(("m", "t"), "d1") is None, "it is the present version again"
        begin()
        store.pin(by_name("cats"), 1)
        for i in range(MAX_HISTORY + 1):
            add(store, "cats", staged(f"n{i}"), replace=True)
        assert self.recalled(store, "d1") is not None, "it is pinned"
        store.unpin(by_name("cats"), 1)
        assert store.kept(("m", "t"), "d1") is None
        assert self.recalled(store, "d1") is None

    def test_the_index_is_bounded(self, store):
        for i in range(MAX_RECALLED + 1):
            add(store, str(i), staged(f"old{i}"))
            add(store, str(i), staged(f"new{i}"), replace=True)
        for i in range(MAX_RECALLED + 1):
            assert self.recalled(store, f"old{i}")
        assert store.kept(("m", "t"), "old0") is None
        assert store.kept(("m", "t"), "old1") is not None


class TestRollingBack:
    def test_goes_back_one_version_at_a_time(self, store):
        for digest in ("d1", "d2", "d3"):
            add(store, "cats", staged(digest), task_id=7, replace=True)
        back = store.rollback(by_task(7))
        assert (back.number, back.digest, back.restored, back.task_id) == (4, "d2", 2, 7)
        assert store.resolve(by_name("cats")) == back
        assert store.rollback(by_name("cats")).digest == "d1"
        with pytest.raises(AdapterNotFoundError, match=naming(1, "cats")):
            store.rollback(by_name("cats"))
        assert numbers(store) == [5, 4, 3, 2, 1]

    def test_after_a_load_goes_back_to_what_was_served_before_it(self, store):
        for digest in ("d1", "d2"):
            add(store, "cats", staged(digest), replace=True)
        store.rollback(by_name("cats"))
        add(store, "cats", staged("d4"), replace=True)
        back = store.rollback(by_name("cats"))
        assert (back.digest, back.restored) == ("d1", 1)

    def test_to_any_version_in_the_history(self, store):
        for digest in ("d1", "d2", "d3"):
            add(store, "cats", staged(digest), replace=True)
        assert store.rollback(by_name("cats"), 1).digest == "d1"
        assert store.rollback(by_name("cats"), 3).digest == "d3"
        present = store.rollback(by_name("cats"), 3)
        assert (present.number, numbers(store)) == (5, [5, 4, 3, 2, 1])
        with refused(AdapterNotFoundError, "cats", 9, "5, 4, 3, 2, 1", param="version"):
            store.rollback(by_name("cats"), 9)

    def test_a_new_version_has_the_source_of_the_old_one(self, store):
        store.register("m", "t", "cats", staged("d1"), path="/one", task_id=7)
        store.register("m", "t", "cats", staged("d2"), path="/two", task_id=8, replace=True)
        back = store.rollback(by_name("cats"))
        assert (back.path, back.task_id, back.is_pinned) == ("/one", 8, False)
        with pytest.raises(AdapterNotFoundError):
            store.resolve(by_task(7))

    def test_is_the_api_s_doing(self, store):
        for digest in ("d1", "d2"):
            register(store, "cats", staged(digest), origin=VersionOrigin.CONFIGURED, replace=True)
        assert store.rollback(by_name("cats")).origin is VersionOrigin.API
        assert store.apply_configuration("m", "t", {}).removed == ()


class TestPinning:
    def test_a_pinned_version_outlives_the_history(self, store):
        add(store, "cats", staged("d0"))
        assert store.pin(by_name("cats")).is_pinned
        for i in range(1, MAX_HISTORY + 3):
            add(store, "cats", staged(f"d{i}"), replace=True)
        newest = MAX_HISTORY + 3
        assert numbers(store) == [*range(newest, 3, -1), 1]
        assert store.rollback(by_name("cats"), 1).digest == "d0"
        assert not store.unpin(by_name("cats"), 1).is_pinned
        assert numbers(store) == list(range(newest + 1, 4, -1))

    def test_the_present_version_shows_its_pin(self, store):
        add(store, "cats")
        pinned = store.pin(by_name("cats"), 1)
        assert store.resolve(by_name("cats")) == pinned
        add(store, "cats", replace=True)
        assert store.resolve(by_name("cats")).is_pinned
        store.unpin(by_name("cats"))
        assert not store.resolve(by_name("cats")).is_pinned

    def test_an_old_version_s_pin_is_not_the_present_one_s(self, store):
        add(store, "cats", staged("d1"))
        second = add(store, "cats", staged("d2"), replace=True)
        store.pin(by_name("cats"), 1)
        assert store.resolve(by_name("cats")) == second
        with refused(AdapterNotFoundError, "cats", 3, "2, 1", param="version"):
            store.pin(by_name("cats"), 3)


class TestAliases:
    def test_follow_the_adapter(self, store):
        add(store, "cats", staged("d1"))
        store.alias(by_name("cats"), "pets")
        store.alias(by_name("pets"), "animals")
        second = add(store, "cats", staged("d2"), replace=True)
        assert store.resolve(by_name("pets")) == store.resolve(by_name("animals")) == second
        assert store.aliases("t", "m") == {"pets": "cats", "animals": "cats"}
        assert [v.name for v in store.list("t")] == ["cats"]

    def test_are_removed_alone_or_with_their_adapter(self, store):
        version = add(store, "cats")
        for alias in ("pets", "animals"):
            store.alias(by_name("cats"), alias)
        assert store.remove(by_name("pets")) == version
        assert store.resolve(by_name("cats")) == version
        store.remove(by_name("cats"))
        assert store.aliases("t", "m") == {}
        with pytest.raises(AdapterNotFoundError):
            store.resolve(by_name("animals"))
        add(store, "animals")

    def test_turn_over_to_another_adapter_if_requested(self, store):
        add(store, "blue", staged("d1"))
        green = add(store, "green", staged("d2"))
        store.alias(by_name("blue"), "live")
        store.alias(by_name("blue"), "live")
        with refused(AdapterExistsError, "blue", "live", param="alias"):
            store.alias(by_name("green"), "live")
        store.alias(by_name("green"), "live", replace=True)
        assert store.resolve(by_name("live")) == green

    def test_and_names_do_not_meet(self, store):
        add(store, "cats")
        add(store, "dogs", staged("d2"))
        store.alias(by_name("cats"), "pets")
        for replace in (False, True):
            with refused(AdapterExistsError, "dogs", param="alias"):
                store.alias(by_name("cats"), "dogs", replace=replace)
            with refused(AdapterExistsError, "pets", "cats", param="name"):
                add(store, "pets", replace=replace)
        with pytest.raises(InvalidParameterError):
            store.alias(by_name("cats"), "a\nb")

    def test_are_listed_when_a_name_is_unknown(self, store):
        add(store, "cats")
        store.alias(by_name("cats"), "pets")
        with refused(AdapterNotFoundError, "petz", "'pets', 'cats'", param="adapter"):
            store.resolve(by_name("petz"))


class TestConfiguration:
    def test_forgets_what_only_an_earlier_one_had_named(self, store):
        old = register(
            store, "old", staged("d1"), origin=VersionOrigin.CONFIGURED, task_id=7
        ).version
        register(store, "stays", staged("d2"), origin=VersionOrigin.CONFIGURED)
        register(store, "loaded", staged("d3"))
        register(store, "old", staged("d1"), origin=VersionOrigin.CONFIGURED, tenant="u")
        change = store.apply_configuration("m", "t", {"stays": None, "new": 7})
        assert (change.removed, change.aliases, change.task_ids) == ((old,), (), ())
        assert [v.name for v in store.list("t")] == ["loaded", "stays"]
        assert [v.name for v in store.list("u")] == ["old"]

    def test_an_adapter_that_was_replaced_over_the_api_is_not_its_own(self, store):
        register(store, "cats", staged("d1"), origin=VersionOrigin.CONFIGURED)
        register(store, "cats", staged("d2"), replace=True)
        store.apply_configuration("m", "t", {})
        assert store.resolve(by_name("cats")).digest == "d2"

    def test_the_last_registration_decides_even_with_the_same_bytes(self, store):
        register(store, "cats", staged("d1"))
        register(store, "cats", staged("d1"), origin=VersionOrigin.CONFIGURED, replace=True)
        assert store.apply_configuration("m", "t", {}).removed
        assert store.list("t") == []

    def test_takes_names_and_task_ids(self, store):
        register(store, "cats", staged("d1"), task_id=7)
        dogs = register(store, "dogs", staged("d2"), task_id=8).version
        store.alias(by_name("dogs"), "pets")
        change = store.apply_configuration("m", "t", {"pets": 8, "cats": 7})
        assert (change.removed, change.aliases, change.task_ids) == ((), ("pets",), (dogs,))
        register(store, "pets", staged("d3"), task_id=8, origin=VersionOrigin.CONFIGURED)
        assert store.resolve(by_task(8)).name == "pets"
        assert store.resolve(by_task(7)).name == "cats"
        assert store.resolve(by_name("dogs")).task_id is None

    def test_two_adapters_may_swap_their_task_ids(self, store):
        for name, task_id in (("cats", 7), ("dogs", 8)):
            register(store, name, staged(name), task_id=task_id, origin=VersionOrigin.CONFIGURED)
        swapped = {"cats": 8, "dogs": 7}
        assert len(store.apply_configuration("m", "t", swapped).task_ids) == 2
        for name, task_id in swapped.items():
            register(store, name, staged(name), task_id=task_id, replace=True)
        assert [(v.name, v.task_id, v.number) for v in store.list("t")] == [
            ("cats", 8, 1),
            ("dogs", 7, 1),
        ]

    def test_an_id_that_it_no_longer_gives_is_free(self, store):
        register(store, "cats", staged("d1"), task_id=7, origin=VersionOrigin.CONFIGURED)
        store.apply_configuration("m", "t", {"cats": None})
        register(store, "dogs", staged("d2"), task_id=7)


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
    def test_a_name_lists_the_nearest_first(self, store):
        for name in ("zebras", "capitals", "cats"):
            add(store, name)
        with pytest.raises(AdapterNotFoundError) as caught:
            store.resolve(by_name("capitels"))
        assert re.search(
            naming("capitels", "m", "'capitals', 'cats', 'zebras'"), caught.value.message
        )

    def test_many_names_are_cut_off(self, store):
        for i in range(14):
            add(store, f"n{i:02}")
        with pytest.raises(AdapterNotFoundError, match=r"and 4 more$"):
            store.resolve(by_name("other"))

    def test_of_very_many_the_near_ones_are_found_among_those_that_begin_alike(self, store):
        for i in range(600):
            add(store, f"customer-{i}")
        add(store, "zebra")
        with pytest.raises(AdapterNotFoundError, match=naming("zebra", "customer-0")):
            store.resolve(by_name("zebras"))

    def test_a_task_id_says_the_sentence_that_clients_look_for(self, store):
        sentence = "LoRA task 5 not found in cache. Please send LoRA weights with request"
        with pytest.raises(AdapterNotFoundError) as caught:
            store.resolve(by_task(5))
        assert sentence in caught.value.message


@pytest.mark.parametrize("name", ["a", "a.b-c_d", "/etc/passwd", "...", "日本語", "a b", "x" * 256])
def test_names_are_free_text_and_never_paths(store, name):
    assert add(store, name).name == name
    assert store.resolve(by_name(name)).name == name


BAD_NAMES = ["", "x" * 257, "a\nb", "\0", "a\x7f", "a\u2028b", "\ud800"]
OTHER_IN_A_URL = ["..", ".", "../../etc/passwd", "team/../zh", "team/."]
OTHER_ON_A_SCREEN = ["a\u202eb", "\u2066zh\u2069", "zh\u200f", "zh\u061c"]


@pytest.mark.parametrize("name", [*BAD_NAMES, *OTHER_IN_A_URL, *OTHER_ON_A_SCREEN])
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
