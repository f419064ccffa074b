"""Guarantees of a load, an unload, a rollback and a request, with a fake engine."""

import asyncio
import itertools
import shutil
import threading

import pytest

from loraplex.adapters.shapes import BaseShapes
from loraplex.adapters.state_files import canonical_path
from loraplex.adapters.store import AdapterStore
from loraplex.core.adapter import (
    AdapterChoice,
    AdapterRef,
    ByDigest,
    ByName,
    LoadPolicy,
    Residency,
)
from loraplex.core.clock import SystemClock
from loraplex.core.errors import (
    AdapterExistsError,
    AdapterLoadError,
    AdapterMismatchError,
    AdapterNotFoundError,
    AdapterTooLargeError,
    InvalidAdapterError,
    InvalidRequestError,
    RowFailedError,
)
from loraplex.core.principal import LOCAL
from loraplex.core.request import GenerateRequest
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.task import Generate
from loraplex.serving.adapter_cards import AdapterState, UnloadMode
from loraplex.serving.adapters import canary
from loraplex.serving.catalog import ModelCatalog
from loraplex.serving.request_metrics import RequestMetrics
from loraplex.serving.service import Service
from loraplex.serving.tenant_threads import TenantThreads
from support.fake_engine_process import FakeEngineSettings
from support.naming import naming, refused
from support.wire_requests import of_tenant

ZH = AdapterRef("a", "default", ByName("zh"))


@pytest.fixture
async def make_service(make_model, staging):
    services = []

    async def make(step_seconds=0.0, store=None, **config) -> Service:
        model = make_model("a", FakeEngineSettings(step_seconds=step_seconds), **config)
        if store is not None:
            model.store = store
        service = Service([model], staging, RequestMetrics(["a"]), SystemClock())
        services.append(service)
        await service.start()
        return service

    yield make
    for service in services:
        await service.close()


@pytest.fixture
async def service(make_service, staging):
    service = await make_service()
    for path in ("/1", "/2"):
        staging.put(path)
    return service


_REQUEST_IDS = itertools.count(1)


def request(key="zh", max_tokens=4, **fields) -> GenerateRequest:
    return GenerateRequest(
        request_id=next(_REQUEST_IDS),
        model="a",
        prompt="What is the capital of France?",
        task=Generate(SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)),
        adapters=(AdapterChoice(ByName(key) if isinstance(key, str) else key),),
        **fields,
    )


async def load(service, path="/1", name="zh", **fields):
    return await service.adapter_admin.load(LOCAL, model="a", name=name, path=path, **fields)


async def digest_of(service, generation) -> str:
    outputs = [output async for output in await service.generate(generation, LOCAL)]
    return outputs[-1].adapters[0].digest


async def becomes(condition) -> None:
    async with asyncio.timeout(60):
        while not await condition():
            await asyncio.sleep(0.002)


def is_at(service, digest, *wanted):
    async def check():
        found = await service.model("a").adapter_residency()
        return found.get(digest, Residency.ABSENT) in wanted

    return check


class TestReport:
    async def test_it_reports_what_was_applied_and_how_much_memory_it_takes(self, service, staging):
        staging.put("/big", num_pages=3, num_bytes=700, num_tensors=6, seconds={"read": 0.1})
        report = await load(service, "/big", task_id=4)
        assert (report.name, report.version, report.task_id) == ("zh", 1, 4)
        content = report.content
        assert content.ranks == {"q": (1, 1)}
        assert content.layers == (0, 1, 2)
        assert (content.num_tensors, content.dtypes) == (6, ("F32",))
        assert (content.host_bytes, content.device_pages, content.device_bytes) == (700, 3, 768)
        assert report.seconds.keys() == {"read", "register"}
        assert not report.is_unchanged
        again = await load(service, "/big", replace=True)
        assert (again.is_unchanged, again.version, again.task_id) == (True, 1, 4)

    async def test_a_dry_run_changes_nothing(self, service):
        report = await load(service, dry_run=True, task_id=4)
        assert (report.is_dry_run, report.version, report.task_id) == (True, 1, 4)
        assert service.adapters(LOCAL) == []
        await load(service, task_id=4)
        other = await load(service, "/2", dry_run=True, replace=True)
        assert (other.version, other.task_id, other.is_unchanged) == (2, 4, False)
        same = await load(service, "/1", dry_run=True, replace=True)
        assert (same.version, same.is_unchanged) == (1, True)
        with pytest.raises(AdapterExistsError):
            await load(service, "/2", dry_run=True)

    async def test_a_canary_shows_the_difference(self, service):
        report = await load(service, canary=True)
        assert report.canary.largest_difference >= report.canary.mean_difference > 0
        assert report.canary.num_compared > 5
        assert report.canary.base_token_id != report.canary.adapter_token_id
        assert report.seconds["canary"] > 0
        assert await digest_of(service, request()) == "digest of /1"

    async def test_a_canary_without_a_difference_keeps_it_out(self, service, monkeypatch):
        monkeypatch.setattr(
            canary,
            "admit",
            lambda generation, ids, *, adapters, **more: _admit_base(generation, ids, **more),
        )
        with pytest.raises(InvalidAdapterError, match=naming("log probabilities")):
            await load(service, canary=True)
        assert service.adapters(LOCAL) == []
        await becomes(is_at(service, "digest of /1", Residency.ABSENT))

    async def test_a_canary_whose_row_fails_is_the_adapter_s_fault(self, service, monkeypatch):
        scores = canary._scores

        async def failing(model, principal, request, token_ids, source, now_ns):
            if source is not None:
                raise RowFailedError("logits that are NaN or inf")
            return await scores(model, principal, request, token_ids, source, now_ns)

        monkeypatch.setattr(canary, "_scores", failing)
        with refused(InvalidAdapterError, "NaN", param="path"):
            await load(service, canary=True)
        assert service.adapters(LOCAL) == []

    async def test_after_a_dry_run_with_a_canary_the_engine_forgets(self, service):
        await load(service, canary=True, dry_run=True)
        await becomes(is_at(service, "digest of /1", Residency.ABSENT))
        assert service._models["a"].engine.registered == frozenset()


_real_admit = canary.admit


def _admit_base(generation, ids, **more):
    return _real_admit(generation, ids, adapters=(), **more)


class TestVersions:
    async def test_back_and_forth(self, service):
        for path in ("/1", "/2"):
            await load(service, path, replace=True)
        back = await service.adapter_admin.rollback(LOCAL, ZH)
        assert (back.version, back.digest) == (3, "digest of /1")
        assert await digest_of(service, request()) == "digest of /1"
        forth = await service.adapter_admin.rollback(LOCAL, ZH, 2)
        assert (forth.version, forth.digest) == (4, "digest of /2")
        pinned = await service.adapter_admin.pin(LOCAL, ZH, 1, is_pinned=True)
        assert (pinned.version, pinned.is_pinned) == (1, True)
        details = await service.adapter_admin.describe(LOCAL, ZH)
        assert [(v.version, v.restored, v.is_pinned) for v in details.versions] == [
            (4, 2, False),
            (3, 1, False),
            (2, None, False),
            (1, None, True),
        ]
        with refused(AdapterNotFoundError, "'zh'", 9, "4, 3, 2, 1", param="version"):
            await service.adapter_admin.rollback(LOCAL, ZH, 9)

    async def test_a_rollback_to_what_does_not_fit_any_longer(self, service):
        for path in ("/1", "/2"):
            await load(service, path, replace=True)
        served = service._models["a"]
        served.shapes = BaseShapes(20, {"q": (64, 65)})
        with refused(AdapterMismatchError, "q", 0, "[64, 64]", "[64, 65]"):
            await service.adapter_admin.rollback(LOCAL, ZH)
        assert await digest_of(service, request()) == "digest of /2"

    async def test_aliases(self, service):
        await load(service)
        assert (await service.adapter_admin.alias(LOCAL, ZH, "live")).name == "zh"
        assert await digest_of(service, request("live")) == "digest of /1"
        await load(service, "/2", replace=True)
        assert await digest_of(service, request("live")) == "digest of /2"
        with refused(InvalidRequestError, "'a'", "base model", param="name"):
            await service.adapter_admin.alias(LOCAL, ZH, "a")
        live = AdapterRef("a", "default", ByName("live"))
        unloaded = await service.adapter_admin.unload(LOCAL, live)
        assert (unloaded.is_alias, unloaded.name) == (True, "live")
        assert await digest_of(service, request()) == "digest of /2"

    async def test_details(self, service):
        await load(service)
        await service.adapter_admin.alias(LOCAL, ZH, "live")
        await becomes(is_at(service, "digest of /1", Residency.DEVICE))
        details = await service.adapter_admin.describe(LOCAL, ZH)
        assert details.aliases == ("live",)
        assert (details.residency, details.state) == (Residency.DEVICE, AdapterState.READY)
        assert details.num_running == 0
        assert details.content.device_pages == 1


class TestEngine:
    """It knows what is named, and what runs."""

    async def test_an_unloaded_adapter_leaves_it(self, service):
        await load(service)
        await becomes(is_at(service, "digest of /1", Residency.DEVICE))
        await service.adapter_admin.unload(LOCAL, ZH)
        await becomes(is_at(service, "digest of /1", Residency.ABSENT))
        adapters = service.model("a").stats.adapters
        assert adapters.num_on_device in (0, 1)  # updated with the next step
        await load(service)
        assert await digest_of(service, request()) == "digest of /1"

    async def test_bytes_with_another_name_stay(self, service):
        await load(service)
        await load(service, name="too")
        await service.adapter_admin.unload(LOCAL, ZH)
        assert service._models["a"].engine.registered == {"digest of /1"}

    async def test_a_replaced_one_leaves_after_its_last_request(self, make_service, staging):
        service = await make_service(step_seconds=0.005)
        await load(service, staging.put("/1"))
        running = await service.generate(request(max_tokens=40), LOCAL)
        await anext(running)
        await load(service, staging.put("/2"), replace=True)
        assert (await service.adapter_admin.describe(LOCAL, ZH)).num_running == 1
        residency = await service.model("a").adapter_residency()
        assert residency["digest of /1"] is Residency.DEVICE
        outputs = [output async for output in running]
        assert outputs[-1].num_output_tokens == 40
        assert outputs[-1].adapters[0].digest == "digest of /1"
        await becomes(is_at(service, "digest of /1", Residency.ABSENT))

    async def test_an_immediate_unload_ends_its_requests_alone(self, make_service, staging):
        service = await make_service(step_seconds=0.005)
        await load(service, staging.put("/1"))
        await load(service, "/1", name="too")
        mine = await service.generate(request(max_tokens=2000), LOCAL)
        others = await service.generate(request("too", max_tokens=20), LOCAL)
        await anext(mine)
        unloaded = await service.adapter_admin.unload(LOCAL, ZH, UnloadMode.IMMEDIATE)
        assert unloaded.num_ended == 1
        with refused(AdapterNotFoundError, "'zh'", "unloaded"):
            [output async for output in mine]
        assert [output async for output in others][-1].num_output_tokens == 20
        assert (
            await service.adapter_admin.describe(LOCAL, _ref("too"))
        ).residency is Residency.DEVICE

    async def test_a_late_request_does_not_keep_it_for_ever(self, service):
        await load(service)
        served = service._models["a"]
        version = served.store.resolve(ZH)
        await service.adapter_admin.unload(LOCAL, ZH)
        served.engine.preload(version.source)  # as a request that resolved it before
        assert served.engine.registered == {"digest of /1"}
        await service._upkeep.run_once()
        assert served.engine.registered == frozenset()

    async def test_residency_without_an_engine(self, service):
        await load(service)
        await service._models["a"].engine.close()
        assert await service.model("a").adapter_residency() == {}


def _ref(name):
    return AdapterRef("a", "default", ByName(name))


async def test_a_signed_address_is_fetched_again_and_never_shown(service, staging):
    signed = staging.put("https://h/zh.safetensors?sig=secret")
    report = await load(service, signed)
    details = await service.adapter_admin.describe(LOCAL, ZH)
    shown = {report.source, details.source, details.versions[0].source}
    assert shown == {"https://h/zh.safetensors"}
    staging.requests.clear()
    await digest_of(service, request(load_policy=LoadPolicy.ALWAYS))
    assert [each["path"] for each in staging.requests] == [signed]


class TestLoadPolicy:
    async def test_never(self, service, staging):
        await load(service)
        await becomes(is_at(service, "digest of /1", Residency.DEVICE))
        never = {"load_policy": LoadPolicy.NEVER}
        assert await digest_of(service, request(**never)) == "digest of /1"
        served = service._models["a"]
        served.engine.forget_adapter("digest of /1")
        with refused(AdapterNotFoundError, "digest of /1", "load_lora_weights"):
            await digest_of(service, request(**never))
        assert await digest_of(service, request()) == "digest of /1"
        assert await digest_of(service, request(**never)) == "digest of /1"

    async def test_never_waits_for_what_is_on_its_way(self, service):
        await load(service)  # its preload has begun, and may not have ended
        assert await digest_of(service, request(load_policy=LoadPolicy.NEVER)) == "digest of /1"

    async def test_never_looks_for_no_file(self, make_service, staging, tmp_path):
        service = await make_service(lora_root=str(tmp_path))
        (tmp_path / "zh").mkdir()
        (tmp_path / "zh" / "adapter_config.json").write_text("")
        staging.put(str(tmp_path / "zh"), "from the root")
        for _ in range(2):
            with refused(AdapterNotFoundError, "'zh'", "load_lora_weights"):
                await digest_of(service, request(load_policy=LoadPolicy.NEVER))
        assert staging.requests == []
        assert await digest_of(service, request()) == "from the root"
        assert await digest_of(service, request(load_policy=LoadPolicy.NEVER)) == "from the root"

    async def test_always_looks_at_the_source(self, service, staging):
        await load(service, task_id=5)
        always = {"load_policy": LoadPolicy.ALWAYS}
        staging.requests.clear()
        assert await digest_of(service, request(**always)) == "digest of /1"
        assert [each["path"] for each in staging.requests] == ["/1"]
        staging.put("/1", "changed")
        assert await digest_of(service, request()) == "digest of /1"
        assert await digest_of(service, request(**always)) == "changed"
        assert await digest_of(service, request()) == "changed"
        assert service.adapters(LOCAL)[0].task_id == 5
        staging.staged["/1"] = InvalidAdapterError("torn")
        with pytest.raises(InvalidAdapterError, match="torn"):
            await service.generate(request(**always), LOCAL)


class TestStored:
    """What an earlier server left: names, versions, and canonical adapter files."""

    @pytest.fixture
    def state_dir(self, tmp_path):
        return tmp_path / "state"

    @pytest.fixture
    def put(self, staging, state_dir):
        """A function (path) -> a digest; the canonical adapter file is there once it was staged."""

        def put_file(path, content=None, **fields):
            digest = (content or path).encode().hex().rjust(64, "0")
            staging.put(path, digest, **fields)
            file = canonical_path(state_dir, digest)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(digest)
            return digest

        return put_file

    async def test_a_lost_file_is_made_again_from_its_source(
        self, make_service, put, state_dir, staging, caplog
    ):
        service = await make_service(store=AdapterStore.open(state_dir))
        digests = [put("/1"), put("/2"), put("/3")]
        for path in ("/1", "/2", "/3"):
            await load(service, path, name=path)
        await service.close()
        shutil.rmtree(state_dir / "adapters")
        put("/1")  # staging will write it again; here it has done so already
        canonical_path(state_dir, digests[0]).unlink()
        put("/2", "other bytes")
        staging.staged["/3"] = InvalidAdapterError("gone, too")
        stage = staging.stage

        async def stage_and_write(path, **options):
            staged = await stage(path, **options)
            canonical_path(state_dir, staged.source.digest).parent.mkdir(
                parents=True, exist_ok=True
            )
            canonical_path(state_dir, staged.source.digest).write_text("")
            return staged

        staging.stage = stage_and_write
        service = await make_service(store=AdapterStore.open(state_dir))
        await service._upkeep.run_once()
        states = {card.name: card.state for card in service.adapters(LOCAL)}
        assert states == {"/1": "ready", "/2": "missing", "/3": "missing"}
        assert await digest_of(service, request("/1")) == digests[0]
        with refused(AdapterLoadError, "'/2'", "version 1", "/2"):
            await service.generate(request("/2"), LOCAL)
        assert "its source has another adapter now" in caplog.text
        assert caplog.text.count("gone, too") == 1, "logged once, however often it is tried"

    async def test_what_does_not_fit_is_refused_with_the_reason(
        self, make_service, put, state_dir, caplog
    ):
        service = await make_service(store=AdapterStore.open(state_dir))
        put("/1", num_pages=3)
        put("/2")
        for path in ("/1", "/2"):
            await load(service, path, name=path)
        await service.close()
        smaller = AdapterStore.open(state_dir)
        service = await make_service(store=smaller, lora_host_bytes=99)
        with refused(AdapterTooLargeError, "'/1'", "lora_host_bytes", "99 B"):
            await service.generate(request("/1"), LOCAL)
        assert [card.state for card in service.adapters(LOCAL)] == ["unfit", "unfit"]
        assert "raise lora_host_bytes" in caplog.text

    async def test_what_did_not_fit_is_served_once_it_was_loaded_again(
        self, make_service, put, state_dir, staging
    ):
        service = await make_service(store=AdapterStore.open(state_dir))
        digest = put("/1")
        await load(service)
        await service.adapter_admin.pin(LOCAL, ZH, None, is_pinned=True)
        await service.close()
        service = await make_service(store=AdapterStore.open(state_dir), lora_host_bytes=99)
        with pytest.raises(AdapterTooLargeError):
            await service.generate(request(), LOCAL)
        assert service._models["a"].engine.pinned == frozenset()
        put("/1", num_bytes=98)  # as staging cuts it for this server
        await load(service, replace=True)
        assert [card.state for card in service.adapters(LOCAL)] == ["ready"]
        assert await digest_of(service, request()) == digest
        assert service._models["a"].engine.pinned == {digest}

    async def test_garbage_is_collected_and_what_runs_is_not(
        self, make_service, put, state_dir, monkeypatch
    ):
        store = AdapterStore.open(state_dir)
        collect = store.collect_garbage
        monkeypatch.setattr(store, "collect_garbage", lambda in_use: collect(in_use, -1))
        service = await make_service(step_seconds=0.005, store=store)
        first = put("/1")
        await load(service)
        running = await service.generate(request(max_tokens=30), LOCAL)
        await anext(running)
        version = store.resolve(ZH)
        await service.adapter_admin.unload(LOCAL, ZH)
        service._models["a"].engine.preload(version.source)
        in_use = service._models["a"].engine.registered
        assert store.collect_garbage(in_use).num_files == 0
        [output async for output in running]
        await service._upkeep.run_once()
        assert not canonical_path(state_dir, first).exists()

    async def test_in_memory_nothing_is_kept_or_collected(self, make_service, put, state_dir):
        owner = await make_service(store=AdapterStore.open(state_dir))
        guest = await make_service(store=AdapterStore.in_memory(state_dir))
        put("/1")
        await load(owner)
        assert guest.adapters(LOCAL) == []
        with pytest.raises(AdapterNotFoundError):
            await guest.generate(request(ByDigest("x")), LOCAL)
        for service in (owner, guest):
            store = service._models["a"].store
            assert (await asyncio.to_thread(store.collect_garbage, (), -1)).is_refused


async def test_a_change_is_done_even_if_its_caller_leaves(service, monkeypatch):
    store = service._models["a"].store
    register, begun = store.register, asyncio.Event()
    loop = asyncio.get_running_loop()

    def slow_register(*args, **kwargs):
        loop.call_soon_threadsafe(begun.set)
        return register(*args, **kwargs)

    monkeypatch.setattr(store, "register", slow_register)
    leaving = asyncio.create_task(load(service))
    await begun.wait()
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert [card.name for card in service.adapters(LOCAL)] == ["zh"]
    assert service._models["a"].engine.registered == {"digest of /1"}, "the engine was notified"


async def test_a_change_is_completed_though_its_caller_is_cancelled_twice():
    catalog, results, release = ModelCatalog(()), [], threading.Event()
    leaving = asyncio.create_task(catalog.change(lambda: release.wait(60), results.append))
    for _ in range(2):
        await asyncio.sleep(0.01)
        leaving.cancel()
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert results == [True], "the engine learns of it"


async def test_the_next_change_waits_for_one_whose_caller_left():
    catalog, order, release = ModelCatalog(()), [], threading.Event()

    def first():
        release.wait(60)
        order.append("first")

    leaving = asyncio.create_task(catalog.change(first))
    await asyncio.sleep(0.01)
    next_one = asyncio.create_task(catalog.change(lambda: order.append("next")))
    leaving.cancel()
    await asyncio.sleep(0.05)
    assert order == []
    release.set()
    await next_one
    assert order == ["first", "next"]


async def test_a_change_waits_for_two_changes_of_another_tenant_at_most():
    catalog, order, release = ModelCatalog(()), [], threading.Event()

    def hostile():
        release.wait(60)
        order.append("hostile")

    with of_tenant("hostile"):
        changes = [asyncio.create_task(catalog.change(hostile)) for _ in range(5)]
    with of_tenant("quiet"):
        changes.append(asyncio.create_task(catalog.change(lambda: order.append("quiet"))))
    await asyncio.sleep(0)  # all wait for their turn
    release.set()
    await asyncio.gather(*changes)
    assert order.index("quiet") <= 2  # the one that ran, and the one whose turn came first


async def test_a_change_does_not_wait_for_the_other_work_of_its_tenant():
    """The changes of all others would wait with it."""
    asyncio.get_running_loop().set_default_executor(TenantThreads(2, 1))
    goes_on = threading.Event()
    with of_tenant("hostile"):
        texts = asyncio.ensure_future(asyncio.to_thread(goes_on.wait, 60))
        assert await ModelCatalog(()).change(lambda: "changed") == "changed"
    assert not texts.done()
    goes_on.set()
    await texts


def test_a_store_in_memory_collects_nothing(tmp_path):
    """Files are kept without replicas, too: a closed database may name them."""
    file = canonical_path(tmp_path, "ab" * 32)
    file.parent.mkdir(parents=True)
    file.touch()
    store = AdapterStore.in_memory(tmp_path)
    assert store.collect_garbage((), -1).is_refused
    assert file.exists()
    store.close()
