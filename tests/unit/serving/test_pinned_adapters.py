"""Pinned adapters stay on the device of an engine, from pin to unpin, whatever happens between."""

import asyncio
import threading

import pytest

from loraplex.core.adapter import AdapterRef, ByName
from loraplex.core.clock import SystemClock
from loraplex.core.errors import AdapterTooLargeError, NotReadyError
from loraplex.core.principal import LOCAL
from loraplex.serving.request_metrics import RequestMetrics
from loraplex.serving.service import Service
from support.naming import naming

ZH = AdapterRef("a", "default", ByName("zh"))


@pytest.fixture
async def service(make_model, staging):
    staging.put("/1", num_pages=6)
    staging.put("/2", num_pages=6)
    staging.put("/big", num_pages=11)
    service = Service(
        [make_model("a", max_lora_rank=1)], staging, RequestMetrics(["a"]), SystemClock()
    )
    yield service
    await service.close()


async def held(service):
    return set((await service.model("a").adapter_activity()).pinned)


async def load(service, path, name="zh", **options):
    await service.adapter_admin.load(LOCAL, model="a", name=name, path=path, **options)


async def never_replies(source):
    raise NotReadyError("the engine did not reply")


async def test_from_pin_to_unpin(service):
    await service.start()
    await load(service, "/1")
    assert (await service.adapter_admin.pin(LOCAL, ZH, None, is_pinned=True)).is_pinned
    assert await held(service) == {"digest of /1"}
    assert not (await service.adapter_admin.pin(LOCAL, ZH, None, is_pinned=False)).is_pinned
    assert await held(service) == set()


async def test_what_would_starve_others_is_not_pinned(service):
    await service.start()
    await load(service, "/1")
    await load(service, "/big", name="big")
    with pytest.raises(AdapterTooLargeError, match=naming(6, 16)):
        await service.adapter_admin.pin(LOCAL, ZH, None, is_pinned=True)
    details = await service.adapter_admin.describe(LOCAL, ZH)
    assert [version.is_pinned for version in details.versions] == [False]


async def test_a_pin_is_of_the_version_not_of_the_name(service):
    await service.start()
    await load(service, "/1")
    await service.adapter_admin.pin(LOCAL, ZH, None, is_pinned=True)
    await load(service, "/2", replace=True)
    assert await held(service) == set()
    await service.adapter_admin.pin(LOCAL, ZH, 1, is_pinned=True)
    assert await held(service) == set()


async def test_a_load_that_ends_meanwhile_does_not_take_the_hold_away(service, monkeypatch):
    await service.start()
    await load(service, "/1")
    model = service._models["a"]
    register, begun, may_end = model.store.register, threading.Event(), threading.Event()

    def slow(*arguments, **options):
        begun.set()
        assert may_end.wait(60)
        return register(*arguments, **options)

    monkeypatch.setattr(model.store, "register", slow)
    other = asyncio.create_task(load(service, "/2", name="ja"))
    await asyncio.to_thread(begun.wait, 20)
    pin = asyncio.create_task(service.adapter_admin.pin(LOCAL, ZH, None, is_pinned=True))
    while await held(service) != {"digest of /1"}:
        await asyncio.sleep(0.001)
    may_end.set()
    await asyncio.gather(other, pin)
    assert await held(service) == {"digest of /1"}


@pytest.mark.parametrize("is_pinned", [True, False])
async def test_a_cancelled_change_leaves_store_and_engine_together(service, is_pinned, monkeypatch):
    await service.start()
    await load(service, "/1")
    await service.adapter_admin.pin(LOCAL, ZH, None, is_pinned=not is_pinned)
    store = service.model("a").store
    method = "pin" if is_pinned else "unpin"
    change, begun, may_end = getattr(store, method), threading.Event(), threading.Event()

    def slow(*arguments):
        begun.set()
        assert may_end.wait(60)
        return change(*arguments)

    monkeypatch.setattr(store, method, slow)
    leaving = asyncio.create_task(service.adapter_admin.pin(LOCAL, ZH, None, is_pinned=is_pinned))
    await asyncio.to_thread(begun.wait, 20)
    leaving.cancel()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    await asyncio.gather(*service._catalog._pinning)
    assert store.resolve(ZH).is_pinned == is_pinned
    assert await held(service) == ({"digest of /1"} if is_pinned else set())


async def test_a_pin_that_is_cancelled_before_the_store_has_it_is_undone(service, monkeypatch):
    await service.start()
    await load(service, "/1")
    engine = service.model("a").engine
    pin, is_done = engine.pin, asyncio.Event()

    async def slow(source):
        await pin(source)
        is_done.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(engine, "pin", slow)
    leaving = asyncio.create_task(service.adapter_admin.pin(LOCAL, ZH, None, is_pinned=True))
    await is_done.wait()
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert await held(service) == set()


async def test_a_cancelled_load_of_a_pinned_version_pins_it(service, monkeypatch):
    """It returns under its name with the same bytes, after its engine lost the pin."""
    await service.start()
    await load(service, "/1")
    await service.adapter_admin.pin(LOCAL, ZH, None, is_pinned=True)
    model = service.model("a")
    model.engine.unpin("digest of /1")
    register, begun, may_end = model.store.register, threading.Event(), threading.Event()

    def slow(*arguments, **options):
        begun.set()
        assert may_end.wait(60)
        return register(*arguments, **options)

    monkeypatch.setattr(model.store, "register", slow)
    leaving = asyncio.create_task(load(service, "/1", replace=True))
    await asyncio.to_thread(begun.wait, 20)
    leaving.cancel()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    await asyncio.gather(*service._catalog._pinning)
    assert await held(service) == {"digest of /1"}


async def test_unloaded_it_is_pinned_no_longer(service):
    await service.start()
    await load(service, "/1")
    await service.adapter_admin.pin(LOCAL, ZH, None, is_pinned=True)
    await service.adapter_admin.unload(LOCAL, ZH)
    assert await held(service) == set()


@pytest.mark.parametrize("replies", [True, False])
async def test_what_is_pinned_in_the_store_is_on_the_device_from_the_start(
    service, make_model, staging, monkeypatch, replies
):
    """An engine that does not reply in time pins it later."""
    await service.start()
    await load(service, "/1")
    await service.adapter_admin.pin(LOCAL, ZH, None, is_pinned=True)
    again = Service([make_model("a")], staging, RequestMetrics(["a"]), SystemClock())
    again._models["a"].store = service._models["a"].store
    if not replies:
        monkeypatch.setattr(again._models["a"].engine, "pin", never_replies)
    await again.start()
    assert await held(again) == {"digest of /1"}
    await again.close()


async def test_memory(service):
    with pytest.raises(NotReadyError):
        service.model("a").memory()
    await service.start()
    await load(service, "/1")
    await service.adapter_admin.pin(LOCAL, ZH, None, is_pinned=True)
    memory = service.model("a").memory()
    assert (memory.kv.blocks, memory.kv.tokens) == (256, 4096)
    assert memory.kv.held + memory.kv.cached + memory.kv.free == 256
    assert memory.host.num_bytes == 1 << 30
    (fit,) = memory.device.fits
    assert (fit.rank, fit.pages, fit.holds) == (1, 20, 0)
    assert (await service.model("a").stored_adapters()).adapters == 1
    assert sum(service.model("a").load_times()["stage"].counts) == 1


async def test_what_was_fetched_has_a_stage_of_its_own(service, staging):
    await service.start()
    staging.put("/far", seconds={"fetch": 2.0, "read": 0.25, "hash": 0.25})
    await load(service, "/far")
    times = service.model("a").load_times()
    assert (times["fetch"].total_ns, times["stage"].total_ns) == (2_000_000_000, 500_000_000)
