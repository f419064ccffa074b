"""Rights and limits hold in the service, whichever frontend a request comes from."""

import asyncio
import itertools

import msgspec
import pytest

from loraplex.core.adapter import AdapterChoice, AdapterRef, ByName, ByTaskId
from loraplex.core.errors import (
    AdapterNotFoundError,
    InvalidParameterError,
    ModelNotFoundError,
    PermissionDeniedError,
    RateLimitedError,
    UnsupportedFeatureError,
)
from loraplex.core.principal import (
    DEFAULT_TENANT,
    LOCAL,
    NONE,
    Names,
    Principal,
    Rights,
    TenantLimits,
)
from loraplex.core.request import GenerateRequest
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.task import Generate, Pool, PoolKind
from loraplex.serving.request_metrics import RequestMetrics
from loraplex.serving.service import Service
from loraplex.testing.fake_clock import FakeClock
from support.fake_engine_process import FakeEngineSettings
from support.naming import refused

_REQUEST_IDS = itertools.count(1)


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
async def service(make_model, staging, clock):
    """Models a and b; zh of the server's on a, pets of acme's on a, with the same task id."""
    models = [make_model("a", fair_share="tenant"), make_model("b", FakeEngineSettings())]
    service = Service(models, staging, RequestMetrics(), clock)
    await service.start()
    for path in ("/zh", "/pets"):
        staging.put(path)
    await service.adapter_admin.load(LOCAL, model="a", name="zh", path="/zh", task_id=1)
    await service.adapter_admin.load(ACME, model="a", name="pets", path="/pets", task_id=1)
    yield service
    await service.close()


ACME = Principal("acme", Rights(operator=False))
OTHER = Principal("other", Rights(operator=False))


def tenant(limits=None, **rights):
    return Principal("acme", Rights(operator=False, **rights), limits or TenantLimits())


def request(model="a", *keys, prompt=(1, 2, 3), max_tokens=4, n=1):
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, n=n)
    adapters = tuple(AdapterChoice(key) for key in keys)
    return GenerateRequest(
        request_id=next(_REQUEST_IDS),
        model=model,
        prompt=prompt,
        task=Generate(sampling),
        adapters=adapters,
    )


async def last_output_of(service, generation, principal):
    async with asyncio.timeout(60):
        outputs = [output async for output in await service.generate(generation, principal)]
    return outputs[-1]


class TestAdapters:
    async def test_the_servers_and_the_own(self, service):
        for name in ("zh", "pets"):
            last = await last_output_of(service, request("a", ByName(name)), ACME)
            assert last.adapters[0].name == name
        assert [card.name for card in service.adapters(ACME)] == ["pets", "zh"]
        assert [card.name for card in service.adapters(OTHER)] == ["zh"]
        by_task = [
            (await last_output_of(service, request("a", ByTaskId(1)), caller)).adapters[0].name
            for caller in (ACME, OTHER, LOCAL)
        ]
        assert by_task == ["pets", "zh", "zh"]

    async def test_the_sources_of_the_servers_adapters_are_not_shown(self, service):
        pets, zh = service.adapters(ACME)
        assert (pets.source, zh.source) == ("/pets", "")
        assert service.adapters(LOCAL)[0].source == "/zh"
        described = await service.adapter_admin.describe(
            ACME, AdapterRef("a", "acme", ByName("zh"))
        )
        assert described.source == described.versions[0].source == ""
        assert described.num_running is None

    async def test_a_reference_cannot_name_another_tenant(self, service):
        """The caller's tenant determines which adapter is meant."""
        stolen = AdapterRef("a", "acme", ByName("pets"))
        with pytest.raises(AdapterNotFoundError):
            await service.adapter_admin.describe(OTHER, stolen)
        for change in (
            service.adapter_admin.unload(OTHER, stolen),
            service.adapter_admin.rollback(OTHER, stolen),
            service.adapter_admin.pin(OTHER, stolen, None, is_pinned=True),
            service.adapter_admin.alias(OTHER, stolen, "mine"),
        ):
            with pytest.raises(AdapterNotFoundError):
                await change
        assert await last_output_of(service, request("a", ByName("pets")), ACME)

    async def test_the_servers_are_not_changed_by_others(self, service):
        theirs = AdapterRef("a", DEFAULT_TENANT, ByName("zh"))
        for change in (
            service.adapter_admin.unload(ACME, theirs),
            service.adapter_admin.rollback(ACME, theirs),
            service.adapter_admin.pin(ACME, theirs, None, is_pinned=True),
            service.adapter_admin.alias(ACME, theirs, "mine"),
        ):
            with refused(PermissionDeniedError, "'zh'", "'acme'", "server's own"):
                await change

    async def test_managing_by_names(self, service, staging):
        manager = tenant(manage=Names(("pets", "own-*")))
        path = staging.put("/x")
        await service.adapter_admin.load(manager, model="a", name="own-1", path=path)
        ref = AdapterRef("a", "acme", ByName("own-1"))
        for change in (
            service.adapter_admin.load(manager, model="a", name="x", path=path),
            service.adapter_admin.alias(manager, ref, "x"),
        ):
            with refused(PermissionDeniedError, "'x'", "manage"):
                await change
        await service.adapter_admin.alias(manager, ref, "own-too")
        await service.adapter_admin.unload(manager, ref)

    async def test_a_forbidden_one_is_an_unknown_one(self, service):
        blind = tenant(use=Names(("pets",)), list=NONE)
        texts = []
        for name in ("zh", "qq"):
            with pytest.raises(AdapterNotFoundError) as raised:
                await service.generate(request("a", ByName(name)), blind)
            texts.append(raised.value.message.replace(name, "?"))
            with pytest.raises(ModelNotFoundError) as found:
                await service.find(name, blind)
            texts.append(found.value.message.replace(name, "?"))
        assert texts[:2] == texts[2:]
        assert "zh" not in "".join(texts).replace("?", "")


class TestModels:
    async def test_those_of_the_right_are_there(self, service):
        narrow = tenant(models=Names(("b",)))
        assert [card.name for card in service.models(narrow)] == ["b"]
        assert service.adapters(narrow) == []
        texts = []
        for name in ("a", "c"):
            for call in (
                lambda name=name: service.find(name, narrow),
                lambda name=name: asyncio.to_thread(service.adapters, narrow, name),
            ):
                with pytest.raises(ModelNotFoundError) as raised:
                    await call()
                texts.append(raised.value.message.replace(f"{name!r}", "?"))
            with pytest.raises(ModelNotFoundError) as raised:
                await service.generate(request(name), narrow)
            texts.append(raised.value.message.replace(f"{name!r}", "?"))
        assert texts[:3] == texts[3:]
        assert await last_output_of(service, request("b"), narrow)

    async def test_an_adapter_of_a_hidden_model_is_hidden(self, service):
        with pytest.raises(ModelNotFoundError):
            await service.find("a:zh", tenant(models=Names(("b",))))


class TestLimits:
    async def test_requests_come_back_with_the_clock(self, service, clock):
        limited = tenant(TenantLimits(requests_per_minute=2))
        for _ in range(2):
            await last_output_of(service, request(), limited)
        with pytest.raises(RateLimitedError):
            await service.generate(request(), limited)
        assert await last_output_of(service, request(), OTHER)
        clock.advance_seconds(61)
        await last_output_of(service, request(), limited)

    async def test_tokens_that_were_not_made_are_given_back(self, service):
        limited = tenant(TenantLimits(tokens_per_minute=100))
        use = service._gate.use("acme")
        outputs = await service.generate(request(max_tokens=97), limited)
        assert use.tokens.total(0) == service.usage(limited).tokens_last_minute == 100
        with refused(RateLimitedError, 100):
            await service.generate(request(), limited)
        await outputs.aclose()
        assert use.tokens.total(0) == 3
        last = await last_output_of(service, request(max_tokens=5, n=2), limited)
        assert use.tokens.total(0) == 3 + 3 + last.num_output_tokens == 16

    async def test_at_once(self, service):
        limited = tenant(TenantLimits(max_concurrent_requests=1))
        outputs = await service.generate(request(max_tokens=500), limited)
        with refused(RateLimitedError, "'acme'", 1):
            await service.generate(request(), limited)
        await outputs.aclose()
        await last_output_of(service, request(), limited)

    async def test_whatever_is_refused_gives_its_place_back(self, service):
        limited = tenant(TenantLimits(max_concurrent_requests=1, tokens_per_minute=100))
        for generation, error in (
            (request("c"), ModelNotFoundError),
            (request("a", ByName("no")), AdapterNotFoundError),
            (request(max_tokens=0), InvalidParameterError),
            (request(max_tokens=98), InvalidParameterError),
        ):
            with pytest.raises(error):
                await service.generate(generation, limited)
        use = service._gate.use("acme")
        assert (use.num_concurrent, use.tokens.total(0)) == (0, 0)

    async def test_a_refusal_is_counted(self, service):
        limited = tenant(TenantLimits(max_concurrent_requests=1))
        outputs = await service.generate(request(max_tokens=500), limited)
        with pytest.raises(RateLimitedError):
            await service.generate(request(), limited)
        counter = service._metrics.errors.labels("a", "rate_limited")
        assert counter._value.get() == 1
        await outputs.aclose()


async def test_the_weight_of_a_tenant_reaches_the_engine(service, monkeypatch):
    model = service._catalog.model("a")
    seen = []
    submit = model.engine.submit

    def watch(generation, **rest):
        seen.append((generation.tenant, generation.share_weight))
        return submit(generation, **rest)

    monkeypatch.setattr(model.engine, "submit", watch)
    await last_output_of(service, request(), Principal("acme", share_weight=2.5))
    await last_output_of(service, request(), ACME)
    assert seen == [("acme", 2.5), ("acme", 1.0)]


async def test_the_tenant_is_in_the_salt(service, monkeypatch):
    """Two tenants share no block, even with the same adapter, prompt and model."""
    model = service._catalog.model("a")
    salts = {}
    submit = model.engine.submit

    def watch(generation, **rest):
        salts[generation.tenant, bool(generation.adapters)] = generation.kv_salt
        return submit(generation, **rest)

    monkeypatch.setattr(model.engine, "submit", watch)
    for caller in (ACME, OTHER, LOCAL):
        await last_output_of(service, request(), caller)
        await last_output_of(service, request("a", ByName("zh")), caller)
    assert len(set(salts.values())) == len(salts) == 6


class TestPool:
    def pooled(self, prompt=(1, 2, 3), **task):
        return msgspec.structs.replace(request(prompt=prompt), task=Pool(**task))

    async def test_a_vector_and_its_use(self, service):
        found = await service.pool(self.pooled(), ACME)
        assert len(found.vector) == 4 * 16
        assert found.prompt_token_ids == (1, 2, 3)
        again = await service.pool(self.pooled(dimensions=2), ACME)
        assert again.vector == found.vector[:8]
        with pytest.raises(InvalidParameterError):
            await service.pool(self.pooled(dimensions=0), ACME)
        with pytest.raises(UnsupportedFeatureError):
            await service.pool(self.pooled(kind=PoolKind.MEAN), ACME)
        assert service.usage(ACME).concurrent_requests == 0

    async def test_only_the_prompt_counts_for_a_limit(self, service):
        limited = tenant(TenantLimits(tokens_per_minute=7))
        for _ in range(2):
            await service.pool(self.pooled(), limited)
        with pytest.raises(RateLimitedError):
            await service.pool(self.pooled(), limited)
