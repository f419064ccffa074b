"""Adapters that come with a request: what they are called, and what their ids mean afterwards."""

import asyncio

import pytest

from loraplex.adapters.staging import RequestTensor
from loraplex.core.adapter import AdapterRef, ByDigest, ByName, ByTaskId
from loraplex.core.clock import SystemClock
from loraplex.core.errors import (
    AdapterExistsError,
    AdapterLoadError,
    AdapterNotFoundError,
    AdapterTooLargeError,
    InvalidAdapterError,
    InvalidRequestError,
    NotReadyError,
    PermissionDeniedError,
)
from loraplex.core.principal import LOCAL, NONE, Principal, Rights
from loraplex.core.rank_limits import RankLimits
from loraplex.serving.adapters.loading import AdapterLoad, CatalogLoader
from loraplex.serving.catalog import ModelCatalog
from loraplex.serving.request_metrics import RequestMetrics
from loraplex.serving.service import Service
from support.naming import naming, refused

CONFIG = RequestTensor("INT32", (1, 3), b"\x01\x00\x00\x00\x00\x00\x00\x00\x08\x00\x00\x00")


@pytest.fixture
async def model(make_model):
    model = make_model("base", lora_host_bytes=1000, max_lora_rank=32)
    await model.start()
    yield model
    await model.engine.close()


@pytest.fixture
def catalog(model):
    return ModelCatalog([model])


@pytest.fixture
def loading(staging, catalog):
    return CatalogLoader(staging, catalog, SystemClock())


@pytest.fixture
def add(loading, staging, model):
    """A function (weights, task id, tenant) -> the key; staging knows these weights."""

    async def add_tensors(weights, task_id=None, tenant="t", **staged):
        staging.put(weights, **staged)
        tensor = RequestTensor("FP16", (1, 1), weights.encode())
        return await loading.load_tensors(model, tenant, task_id, tensor, CONFIG)

    return add_tensors


@pytest.fixture
def known(model):
    """A function (tenant) -> what is registered: name -> (task id, digest, version)."""

    def registered(tenant="t"):
        versions = model.store.list(tenant, "base")
        return {v.name: (v.task_id, v.digest, v.number) for v in versions}

    return registered


def resolve(model, key, tenant="t"):
    return model.store.resolve(AdapterRef("base", tenant, key))


async def test_it_is_staged_against_the_base_as_a_folder_is(add, staging, model):
    await add("zh", 5)
    [requested] = staging.requests
    assert requested == {
        "path": "zh",
        "config": CONFIG,
        "shapes": model.shapes,
        "max_ranks": RankLimits(32),
        "pool_dtype": model.card.dtype,
        "tenant": "t",
    }


@pytest.mark.parametrize("task_id", [0, 101, 2**64 - 1])
async def test_it_is_called_by_its_task_id(add, known, model, task_id):
    assert await add("zh", task_id, digest="d1") == ByTaskId(task_id)
    assert known() == {str(task_id): (task_id, "d1", 1)}
    assert resolve(model, ByTaskId(task_id)).digest == "d1"
    assert resolve(model, ByName(str(task_id))).path == "a request's lora_weights"


async def test_without_a_task_id_it_is_called_by_its_digest(add, known):
    digest = "0123456789abcdef"
    for _ in range(2):
        assert await add("zh", digest=digest) == ByDigest(digest)
    assert known() == {"inline-0123456789ab": (None, digest, 1)}


async def test_the_same_bytes_change_nothing(add, known):
    for _ in range(3):
        await add("zh", 5, digest="d1")
    assert known() == {"5": (5, "d1", 1)}


async def test_other_bytes_are_the_next_version(add, known):
    await add("zh", 5, digest="d1")
    await add("ja", 5, digest="d2")
    assert known() == {"5": (5, "d2", 2)}
    await add("zh", 5, digest="d1")
    assert known() == {"5": (5, "d1", 3)}


async def test_a_task_id_of_a_named_adapter(add, known, loading, staging, model):
    """The name and its task id stay; a folder's path stays while its bytes do."""
    staging.put("/zh", "d1")
    await loading.load(model, Principal("t"), AdapterLoad(name="zh", path="/zh", task_id=5))
    await add("same", 5, digest="d1")
    assert resolve(model, ByTaskId(5)).path == "/zh"
    await add("other", 5, digest="d2")
    assert known() == {"zh": (5, "d2", 2)}


async def test_bytes_that_have_a_name_already(add, known, loading, staging, model):
    staging.put("/zh", "d1")
    await loading.load(model, Principal("t"), AdapterLoad(name="zh", path="/zh"))
    assert await add("zh", digest="d1") == ByDigest("d1")
    assert known() == {"zh": (None, "d1", 1)}
    await add("zh", 5, digest="d1")
    assert known() == {"zh": (None, "d1", 1), "5": (5, "d1", 1)}


async def test_a_name_that_someone_else_has_is_not_taken_over(
    add, known, loading, staging, model, make_model, catalog
):
    for name, task_id in (("5", None), ("6", 60)):
        path = staging.put("/x", "x")
        await loading.load(
            model, Principal("t"), AdapterLoad(name=name, path=path, task_id=task_id)
        )
        with refused(AdapterExistsError, repr(name), param="name"):
            await add("zh", int(name), digest="d1")
    assert known() == {"5": (None, "x", 1), "6": (60, "x", 1)}
    catalog.models["7"] = make_model("7")
    with refused(InvalidRequestError, "'7'", "base model", param="name"):
        await add("zh", 7)


async def test_each_tenant_has_its_own_task_ids(add, known):
    await add("zh", 5, "a", digest="d1")
    await add("ja", 5, "b", digest="d2")
    assert (known("a"), known("b")) == ({"5": (5, "d1", 1)}, {"5": (5, "d2", 1)})


@pytest.mark.parametrize("weights", [("zh", "zh"), ("zh", "ja"), ("zh", "ja", "zh", "ja")])
async def test_first_requests_of_a_task_at_once(add, known, model, weights):
    """All requests succeed, and one of the adapters is registered whole."""
    keys = await asyncio.gather(*(add(one, 5, digest=f"d-{one}") for one in weights))
    assert set(keys) == {ByTaskId(5)}
    [(task_id, digest, number)] = known().values()
    assert task_id == 5
    assert digest == f"d-{weights[-1]}"
    assert number == (1 if len(set(weights)) == 1 else len(weights))
    assert resolve(model, ByTaskId(5)).source.digest == digest


@pytest.mark.parametrize("task_id", [None, 5])
async def test_a_file_that_is_gone_comes_back(
    add, known, loading, staging, model, monkeypatch, task_id
):
    def gone(_):
        raise AdapterLoadError("the canonical adapter file is gone")

    staging.put("/zh", "d1")
    await loading.load(model, Principal("t"), AdapterLoad(name="zh", path="/zh", task_id=5))
    await add("other", 6, digest="d2")
    with monkeypatch.context() as patch:
        patch.setattr(model.store, "resolve", gone)
        patch.setattr(model.store, "missing_digests", frozenset({"d1"}))
        key = await add("zh", task_id, digest="d1")
    assert known() == {"zh": (5, "d1", 1), "6": (6, "d2", 1)}
    assert resolve(model, key).path == "a request's lora_weights", "it was registered again"


@pytest.mark.parametrize(
    ("staged", "error", "named"),
    [
        ({"num_pages": 17}, AdapterTooLargeError, ("lora_device_bytes", 17)),
        ({"num_bytes": 1001}, AdapterTooLargeError, ("lora_host_bytes", 1001)),
        ({"changes_nothing": True}, InvalidAdapterError, ("lora_weights",)),
    ],
)
async def test_what_cannot_be_served_changes_nothing(add, known, staged, error, named):
    await add("zh", 5, digest="d1")
    for task_id in (5, 6, None):
        with pytest.raises(error, match=naming(*named)):
            await add("bad", task_id, digest="d2", **staged)
    assert known() == {"5": (5, "d1", 1)}


class TestService:
    @pytest.fixture
    async def service(self, make_model, staging):
        metrics = RequestMetrics(["base"])
        service = Service([make_model("base")], staging, metrics, SystemClock())
        yield service
        await service.close()

    async def add(self, service, principal=LOCAL, weights=b"zh"):
        tensor = RequestTensor("FP16", (1, 1), weights)
        return await service.adapter_admin.load_tensors(
            principal, model="base", task_id=1, weights=tensor, config=CONFIG
        )

    async def test_added(self, service, staging):
        staging.put("zh")
        await service.start()
        assert await self.add(service) == ByTaskId(1)
        [card] = service.adapters(LOCAL)
        assert (card.name, card.task_id) == ("1", 1)

    async def test_callers_without_the_right(self, service, staging):
        await service.start()
        with refused(PermissionDeniedError, "'t'", "'manage'"):
            await self.add(service, Principal("t", rights=Rights(manage=NONE)))
        assert staging.requests == []

    async def test_not_yet(self, service, staging):
        with pytest.raises(NotReadyError):
            await self.add(service)
        assert staging.requests == []

    async def test_a_refused_adapter_is_a_failed_request(self, service):
        await service.start()
        with pytest.raises(InvalidAdapterError):
            await self.add(service, weights=b"bad")
        assert service.adapters(LOCAL) == []
        with pytest.raises(AdapterNotFoundError):
            service._models["base"].store.resolve(AdapterRef("base", LOCAL.tenant, ByTaskId(1)))
