"""What a tenant sees of adapters: by each right, of its own and of the server's."""

import re

import pytest

from loraplex.adapters.staged import StagedAdapter
from loraplex.adapters.store import AdapterStore
from loraplex.core.adapter import AdapterRef, ByDigest, ByName, ByTaskId
from loraplex.core.errors import AdapterLoadError, AdapterNotFoundError, PermissionDeniedError
from loraplex.core.principal import ALL, DEFAULT_TENANT, NONE, Names, Principal, Rights
from loraplex.serving.access.tenant_adapters import DiscoveredAdapters, TenantAdapters
from support.fake_loader import fake_source
from support.fake_runner import FAKE_CAPACITY
from support.naming import naming, refused


def add(store, tenant, name, digest=None, **fields):
    source = fake_source(
        digest or f"digest of {tenant}'s {name}",
        FAKE_CAPACITY.page_geometry,
        num_pages=1,
        num_bytes=10,
    )
    staged = StagedAdapter(source=source, dtypes=("F32",), num_tensors=2)
    path = f"/{tenant}/{name}"
    return store.register("m", tenant, name, staged, path=path, **fields).version


@pytest.fixture
def store():
    """The server has fr and de, acme has cats and its own fr, umbrella has bats."""
    store = AdapterStore()
    add(store, DEFAULT_TENANT, "fr", task_id=1)
    add(store, DEFAULT_TENANT, "de", task_id=2)
    add(store, "acme", "cats", task_id=7)
    add(store, "acme", "fr", task_id=2)
    add(store, "umbrella", "bats", task_id=9, digest="shared bytes")
    return store


def seen(store, tenant="acme", **rights):
    return TenantAdapters(
        store, "m", Principal(tenant, Rights(operator=False, **rights)), DiscoveredAdapters()
    )


def names(adapters):
    return [f"{version.tenant}/{version.name}" for version in adapters.listed()]


def test_own_adapters_hide_the_servers(store):
    assert names(seen(store)) == ["acme/cats", "default/de", "acme/fr"]
    assert names(seen(store, DEFAULT_TENANT)) == ["default/de", "default/fr"]
    assert names(seen(store, "umbrella")) == ["umbrella/bats", "default/de", "default/fr"]
    assert seen(store).resolve(ByName("fr")).tenant == "acme"
    assert seen(store).resolve(ByTaskId(2)).name == "fr"
    assert seen(store).resolve(ByTaskId(1)).tenant == DEFAULT_TENANT
    assert seen(store, "umbrella").resolve(ByTaskId(2)).name == "de"


@pytest.mark.parametrize("key", [ByName("bats"), ByTaskId(9), ByDigest("shared bytes")])
def test_another_tenants_adapter_is_an_unknown_one(store, key):
    texts = []
    for have_it in (True, False):
        visible = seen(store, manage=ALL)
        assert visible.find(key) is None
        for look_up in (visible.resolve, visible.described, visible.managed):
            with pytest.raises(AdapterNotFoundError) as raised:
                look_up(key)
            texts.append(raised.value.message)
        if have_it:
            store.remove(store_ref("umbrella", "bats"))
    assert len(set(texts)) == 1
    assert "known adapters: " in texts[0]


def store_ref(tenant, name):
    return AdapterRef("m", tenant, ByName(name))


def test_the_same_bytes_of_another_tenant_are_no_way_in(store):
    add(store, "acme", "mine", digest="shared bytes")
    assert seen(store).resolve(ByDigest("shared bytes")).name == "mine"
    with pytest.raises(AdapterNotFoundError):
        seen(store, "third").resolve(ByDigest("shared bytes"))


class TestUse:
    def test_by_patterns(self, store):
        visible = seen(store, use=Names(("c*", "d?")), list=NONE)
        assert visible.resolve(ByName("cats"))
        assert visible.resolve(ByTaskId(7))
        assert visible.resolve(ByName("de")).tenant == DEFAULT_TENANT
        with pytest.raises(AdapterNotFoundError):
            visible.resolve(ByName("fr"))

    def test_what_is_only_listed_is_forbidden(self, store):
        with refused(PermissionDeniedError, "'acme'", "'de'", "use"):
            seen(store, use=Names(("c*",))).resolve(ByName("de"))

    def test_the_servers_file_is_gone(self, store, monkeypatch):
        gone = seen(store).resolve(ByName("de"))
        monkeypatch.setattr(store, "missing_digests", frozenset({gone.digest}))
        with refused(AdapterLoadError, "'de'"):
            seen(store).resolve(ByName("de"))
        assert seen(store, "umbrella").resolve(ByName("fr"))

    def test_an_own_one_that_is_only_listed_hides_none(self, store):
        visible = seen(store, use=Names(("de",)))
        assert visible.resolve(ByTaskId(2)).name == "de"
        found = visible.find(ByTaskId(2))
        assert found is not None
        assert found.name == "de"

    def test_an_alias_has_its_adapters_right(self, store):
        store.alias(store_ref(DEFAULT_TENANT, "de"), "cats-too")
        with pytest.raises(AdapterNotFoundError):
            seen(store, use=Names(("c*",)), list=NONE).resolve(ByName("cats-too"))
        assert seen(store, use=Names(("de",))).resolve(ByName("cats-too")).name == "de"


class TestList:
    def test_by_patterns(self, store):
        assert names(seen(store, list=Names(("d*",)))) == ["default/de"]
        assert names(seen(store, list=NONE)) == []

    def test_errors_name_what_is_listed(self, store):
        store.alias(store_ref(DEFAULT_TENANT, "de"), "german")
        store.alias(store_ref(DEFAULT_TENANT, "fr"), "french")
        with pytest.raises(AdapterNotFoundError) as raised:
            seen(store, list=Names(("d*",))).resolve(ByName("x"))
        assert re.search(naming("de", "german"), raised.value.message)
        with refused(AdapterNotFoundError, "'x'", "'m'", param="adapter"):
            seen(store, list=NONE).resolve(ByName("x"))

    def test_what_may_be_used_is_found_unlisted(self, store):
        assert seen(store, list=NONE, use=Names(("de",))).find(ByName("de"))
        assert seen(store, list=NONE, use=NONE).find(ByName("de")) is None
        with pytest.raises(AdapterNotFoundError):
            seen(store, list=NONE).described(ByName("de"))

    def test_where_the_listed_one_is(self, store):
        assert seen(store).described(ByName("de")).tenant == DEFAULT_TENANT
        assert seen(store).described(ByName("fr")).tenant == "acme"


class TestManage:
    def test_own_ones_by_patterns(self, store):
        visible = seen(store, manage=Names(("c*",)))
        assert visible.managed(ByName("cats")).tenant == "acme"
        visible.check_manages("cows")
        with refused(PermissionDeniedError, "'acme'", "'fr'", "manage"):
            visible.managed(ByName("fr"))
        with refused(PermissionDeniedError, "'acme'", "'dogs'", "manage"):
            visible.check_manages("dogs")

    def test_never_the_servers(self, store):
        with refused(PermissionDeniedError, "'de'", "'acme'", "server's own"):
            seen(store).managed(ByName("de"))
        with pytest.raises(AdapterNotFoundError):
            seen(store, list=NONE).managed(ByName("de"))

    def test_the_server_manages_its_own(self, store):
        assert seen(store, DEFAULT_TENANT).managed(ByName("de")).tenant == DEFAULT_TENANT
        with pytest.raises(AdapterNotFoundError):
            seen(store, DEFAULT_TENANT).managed(ByName("cats"))
