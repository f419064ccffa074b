"""Lists and use of adapters in the service: each tenant sees its own."""

import asyncio
import itertools
import threading

import pytest

from loraplex.core.adapter import AdapterChoice, AdapterRef, ByName, Residency
from loraplex.core.errors import (
    AdapterNotFoundError,
    AdapterTooLargeError,
    PermissionDeniedError,
    PromptTooLongError,
    RateLimitedError,
)
from loraplex.core.principal import LOCAL, Names, Principal, Rights, TenantLimits
from loraplex.core.request import GenerateRequest
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.task import Generate
from loraplex.serving import listed_adapters
from loraplex.serving.access.tenant_adapters import ConfiguredAdapter
from loraplex.serving.adapter_cards import AdapterState
from loraplex.serving.adapter_list import AdapterQuery, AdapterSort
from loraplex.serving.adapter_usage import UsedAdapter
from loraplex.serving.request_metrics import RequestMetrics
from loraplex.serving.service import Service
from loraplex.testing.fake_clock import FakeClock

_REQUEST_IDS = itertools.count(1)
ACME = Principal("acme", Rights(operator=False))
OTHER = Principal("other", Rights(operator=False))
ZH = UsedAdapter("a", "default", "zh")
PETS = UsedAdapter("a", "acme", "pets")


@pytest.fixture
async def service(make_model, staging):
    """The server's adapter zh, and acme's pets, which is large, pinned and has an alias."""
    service = Service([make_model("a")], staging, RequestMetrics(), FakeClock())
    await service.start()
    staging.put("/zh")
    staging.put("/pets", num_pages=2, num_bytes=900)
    admin = service.adapter_admin
    await admin.load(LOCAL, model="a", name="zh", path="/zh")
    await admin.load(ACME, model="a", name="pets", path="/pets")
    pets = AdapterRef("a", "acme", ByName("pets"))
    await admin.alias(ACME, pets, "animals")
    await admin.pin(ACME, pets, None, is_pinned=True)
    yield service
    await service.close()


def request(*names, max_tokens=4, prompt=(1, 2, 3)):
    return GenerateRequest(
        request_id=next(_REQUEST_IDS),
        model="a",
        prompt=prompt,
        task=Generate(SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)),
        adapters=tuple(AdapterChoice(ByName(name)) for name in names),
    )


async def generate(service, principal, *names, **fields):
    async with asyncio.timeout(60):
        async for _ in await service.generate(request(*names, **fields), principal):
            pass


async def page(service, principal, **query):
    return await service.adapter_page(principal, AdapterQuery(**query))


async def test_an_entry(service):
    await generate(service, ACME, "animals")
    pets, zh = (await page(service, ACME)).data
    assert (pets.name, pets.source, pets.aliases, pets.pinned) == (
        "pets",
        "/pets",
        ("animals",),
        True,
    )
    assert (pets.device_pages, pets.residency) == (2, Residency.DEVICE)
    assert (pets.requests, pets.errors, pets.num_running) == (1, 0, 0)
    assert pets.last_used
    assert (zh.source, zh.num_running, zh.requests, zh.last_used) == ("", None, 0, None)


async def test_running_requests_are_counted(service):
    outputs = await service.generate(request("zh", max_tokens=2000), LOCAL)
    await anext(outputs)
    [zh] = (await page(service, LOCAL)).data
    assert zh.num_running == 1
    await outputs.aclose()
    async with asyncio.timeout(60):
        while zh.num_running:  # the engine aborts it between two steps
            [zh] = (await page(service, LOCAL)).data
    assert zh.requests == 1


async def test_tenants_see_their_own_use(service):
    await generate(service, ACME, "zh")
    await generate(service, OTHER, "zh")
    shown = {
        caller.tenant: {card.name: card.requests for card in (await page(service, caller)).data}
        for caller in (ACME, OTHER, LOCAL)
    }
    assert shown == {
        "acme": {"pets": 0, "zh": 1},
        "other": {"zh": 1},
        "default": {"zh": 2},
    }
    hidden = Principal("acme", Rights(list=Names(("p*",)), operator=False))
    assert [card.name for card in (await page(service, hidden)).data] == ["pets"]


async def test_filters_and_orders(service):
    await generate(service, ACME, "zh")
    by_size = await page(service, ACME, sort=AdapterSort.SIZE, is_descending=True)
    assert [card.name for card in by_size.data] == ["pets", "zh"]
    by_traffic = await page(service, ACME, sort=AdapterSort.TRAFFIC, is_descending=True)
    assert [card.name for card in by_traffic.data] == ["zh", "pets"]
    assert (await page(service, ACME, search="ANIMAL")).total == 1
    assert (await page(service, ACME, residency=Residency.FAILED)).total == 0


async def test_unvalidated_ones_of_folders(service):
    model = service.model("a")
    model.discovered.put(ConfiguredAdapter("new", "/folder/new", None, is_named=False))
    [new] = (await page(service, OTHER, state=AdapterState.UNVALIDATED)).data
    assert (new.name, new.digest, new.device_pages, new.source) == ("new", "", None, "")
    assert (await page(service, OTHER)).total == 2


async def test_one_that_fits_no_page_is_listed(service, monkeypatch):
    def refuse(targets, geometry):
        raise AdapterTooLargeError("it was stored with larger limits")

    monkeypatch.setattr(listed_adapters, "most_pages", refuse)
    assert [card.device_pages for card in (await page(service, LOCAL)).data] == [None]


async def test_thousands_are_searched_in_a_thread(service, monkeypatch):
    threads = []
    page_of = listed_adapters.page_of

    def noting(rows, query):
        threads.append(threading.current_thread())
        return page_of(rows, query)

    monkeypatch.setattr(listed_adapters, "page_of", noting)
    await page(service, LOCAL)
    assert threads != [threading.main_thread()]


class TestUse:
    async def test_by_tenant_and_adapter(self, service):
        await generate(service, ACME, "pets")
        await generate(service, ACME, "pets", "zh")
        await generate(service, OTHER, "zh", max_tokens=7)
        await generate(service, OTHER)
        acme, other = (
            service.adapter_usage.of_tenant("acme"),
            service.adapter_usage.of_tenant("other"),
        )
        assert {used: count.requests for used, count in acme.items()} == {PETS: 2, ZH: 1}
        assert (acme[PETS].prompt_tokens, acme[PETS].output_tokens) == (6, 8)
        assert {used: count.output_tokens for used, count in other.items()} == {
            ZH: 7,
            UsedAdapter("a"): 4,
        }

    async def test_refused_requests_are_errors(self, service):
        with pytest.raises(PromptTooLongError):
            await generate(service, ACME, "pets", prompt=(1,) * 10_000)
        only_listed = Principal("acme", Rights(use=Names(("x",)), operator=False))
        with pytest.raises(PermissionDeniedError):
            await generate(service, only_listed, "zh")
        acme = service.adapter_usage.of_tenant("acme")
        assert {used: (count.requests, count.errors) for used, count in acme.items()} == {
            PETS: (1, 1),
            ZH: (1, 1),
        }
        assert acme[PETS].prompt_tokens == 0

    async def test_what_is_unknown_or_limited_counts_nowhere(self, service):
        with pytest.raises(AdapterNotFoundError):
            await generate(service, ACME, "nothing")
        with pytest.raises(AdapterNotFoundError):
            await generate(service, OTHER, "pets")
        limited = Principal("acme", limits=TenantLimits(tokens_per_minute=10))
        await generate(service, limited, "pets")
        with pytest.raises(RateLimitedError):
            await generate(service, limited, "pets")
        assert service.adapter_usage.of_tenant("acme")[PETS].requests == 1
        assert service.adapter_usage.of_tenant("other") == {}
