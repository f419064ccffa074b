"""Adapters of folders that are listed at once, and validated when they are used."""

import asyncio

import pytest

from loraplex.core.adapter import AdapterChoice, AdapterRef, ByName, ByTaskId
from loraplex.core.clock import SystemClock
from loraplex.core.errors import (
    AdapterExistsError,
    AdapterLoadError,
    AdapterNotFoundError,
    InvalidAdapterError,
)
from loraplex.core.principal import LOCAL, Principal
from loraplex.core.request import GenerateRequest
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.task import Generate
from loraplex.serving.adapter_cards import AdapterState
from loraplex.serving.adapters import folder_follower
from loraplex.serving.adapters.folder_follower import FolderFollower
from loraplex.serving.request_metrics import RequestMetrics
from loraplex.serving.service import Service
from support.naming import refused


@pytest.fixture
def folder(tmp_path, staging):
    """A function (*names) -> a folder with these adapters, which staging knows."""

    def make(*names):
        for name in names:
            place = tmp_path / "adapters" / name
            place.mkdir(parents=True)
            (place / "adapter_config.json").write_text("{}")
            staging.put(str(place))
        return tmp_path / "adapters"

    return make


@pytest.fixture
async def start(make_model, staging, monkeypatch):
    """A function (folder) -> a started service; nothing is validated in the background."""
    services = []

    async def start_service(place) -> Service:
        model = make_model("base", adapter_dirs=(str(place),))
        services.append(Service([model], staging, RequestMetrics({"base": None}), SystemClock()))
        with monkeypatch.context() as patched:
            patched.setattr(FolderFollower, "start", lambda _: None)
            await services[-1].start()
        return services[-1]

    yield start_service
    for service in services:
        await service.close()


def states(service, principal=LOCAL):
    return {card.name: card.state.value for card in service.adapters(principal)}


async def use(service, *keys, principal=LOCAL):
    request = GenerateRequest(
        request_id=service.new_request_id(),
        model="base",
        prompt="hello",
        task=Generate(SamplingParams(max_tokens=1)),
        adapters=tuple(AdapterChoice(key) for key in keys),
    )
    async with asyncio.timeout(60):
        outputs = [output async for output in await service.generate(request, principal)]
    return outputs[-1].adapters[0].digest


async def test_thousands_are_listed_at_once_and_none_is_read(start, folder, staging):
    service = await start(folder(*(f"a{i}" for i in range(2000))))
    assert service.health().ready
    assert staging.requests == []
    assert len(states(service)) == 2000
    assert set(states(service).values()) == {"unvalidated"}
    cards = service.adapters(LOCAL)
    assert [card.name for card in cards] == sorted(card.name for card in cards)


async def test_the_first_request_reads_the_one_that_it_names(start, folder, staging):
    service = await start(folder("de", "fr", "17"))
    assert await use(service, ByName("de")) == staging.staged[str(folder() / "de")].source.digest
    assert await use(service, ByTaskId(17))
    assert states(service) == {"de": "ready", "fr": "unvalidated", "17": "ready"}
    assert len(staging.requests) == 2


async def test_several_requests_share_one_read(start, folder, staging):
    service = await start(folder("de"))
    await asyncio.gather(*(use(service, ByName("de")) for _ in range(5)))
    assert len(staging.requests) == 1


async def test_a_client_that_leaves_ends_it_for_no_other(start, folder, staging):
    service = await start(folder("de"))
    first = asyncio.create_task(use(service, ByName("de")))
    second = asyncio.create_task(use(service, ByName("de")))
    while not staging.requests:
        await asyncio.sleep(0)
    first.cancel()
    assert await second
    assert len(staging.requests) == 1


async def test_it_is_read_in_the_turn_of_the_tenant_that_needs_it(start, folder, staging):
    service = await start(folder("de"))
    await use(service, ByName("de"), principal=Principal("acme"))
    assert [request["tenant"] for request in staging.requests] == ["acme"]


async def test_the_model_field_finds_it(start, folder):
    service = await start(folder("de"))
    card, key = await service.find("de", LOCAL)
    assert (card.name, key) == ("base", ByName("de"))


async def test_a_broken_one_is_refused_with_the_reason_and_no_longer_listed(start, folder, staging):
    service = await start(folder("de"))
    staging.staged[str(folder() / "de")] = InvalidAdapterError("torn")
    with refused(AdapterNotFoundError, "'de'", "torn", param="adapter"):
        await use(service, ByName("de"))
    assert states(service) == {}


async def test_one_that_may_load_later_stays_listed(start, folder, staging):
    service = await start(folder("de"))
    staged = staging.staged[str(folder() / "de")]
    staging.staged[str(folder() / "de")] = AdapterLoadError("busy")
    with pytest.raises(AdapterLoadError, match="busy"):
        await use(service, ByName("de"))
    assert states(service) == {"de": "unvalidated"}
    staging.staged[str(folder() / "de")] = staged
    assert await use(service, ByName("de"))


@pytest.mark.parametrize("error", [None, InvalidAdapterError("torn"), AdapterLoadError("busy")])
async def test_a_stored_version_is_checked_before_its_first_use(start, folder, staging, error):
    before = await start(folder("de"))
    old = await use(before, ByName("de"))
    path = str(folder() / "de")
    staging.put(path, "changed meanwhile")
    if error is not None:
        staging.staged[path] = error
    service = await start(folder())
    assert states(service) == {"de": "unvalidated"}
    # What cannot be read now leaves the stored version in use.
    assert await use(service, ByName("de")) == ("changed meanwhile" if error is None else old)


class TestChanges:
    async def test_its_name_and_its_task_id_are_taken(self, start, folder, staging):
        service = await start(folder("de", "17"))
        path = staging.put("/elsewhere")
        load = service.adapter_admin.load
        with refused(AdapterExistsError, "'de'", param="name"):
            await load(LOCAL, model="base", name="de", path=path)
        with refused(AdapterExistsError, 17, "'17'", param="task_id"):
            await load(LOCAL, model="base", name="it", path=path, task_id=17)

    async def test_it_may_be_replaced_described_and_unloaded(self, start, folder, staging):
        service = await start(folder("de", "fr", "it"))
        admin = service.adapter_admin
        path = staging.put("/elsewhere")
        report = await admin.load(LOCAL, model="base", name="de", path=path, replace=True)
        assert report.version == 2
        details = await admin.describe(LOCAL, AdapterRef("base", "default", ByName("fr")))
        assert details.state is AdapterState.READY
        await admin.unload(LOCAL, AdapterRef("base", "default", ByName("it")))
        assert states(service) == {"de": "ready", "fr": "ready"}


async def test_the_background_validates_the_others(start, folder, monkeypatch):
    monkeypatch.setattr(folder_follower, "_MAX_AT_ONCE", 2)
    service = await start(folder("de", "fr", "it", "es", "pl"))
    service._follower.start()
    async with asyncio.timeout(60):
        while "unvalidated" in states(service).values():
            await asyncio.sleep(0.01)
    assert states(service) == dict.fromkeys(["de", "es", "fr", "it", "pl"], "ready")
