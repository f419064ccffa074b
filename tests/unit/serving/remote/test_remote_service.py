"""Serving over a connection to its owner, both ends in one loop, on a fake engine."""

import asyncio
import contextlib

import msgspec
import pytest

from loraplex.core.adapter import AdapterChoice, ByName
from loraplex.core.clock import SystemClock
from loraplex.core.errors import (
    AdapterNotFoundError,
    InvalidParameterError,
    ModelNotFoundError,
    NotReadyError,
    PromptTooLongError,
    RateLimitedError,
    UnsupportedFeatureError,
)
from loraplex.core.principal import LOCAL, NONE, Names, Principal, Rights, TenantLimits
from loraplex.core.request import GenerateRequest
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.task import Generate, Pool, PoolKind
from loraplex.frontends.ops.frontend_numbers import encoded_families
from loraplex.frontends.streams import gather_all
from loraplex.serving.adapter_usage import UsedAdapter
from loraplex.serving.backend import close_outputs
from loraplex.serving.local_texts import LocalTexts
from loraplex.serving.remote.messages import (
    Count,
    ListedRequests,
    ListRequests,
    Numbers,
    StopProcess,
)
from loraplex.serving.remote.owner import FrontendDesks
from loraplex.serving.remote.remote_service import RemoteService
from loraplex.serving.request_metrics import RequestMetrics
from loraplex.serving.service import Service
from support.fake_engine_process import FakeEngineSettings
from support.naming import refused

SLOW = FakeEngineSettings(step_seconds=0.005)


class Ends:
    """The owner's service, and that of a front-end process."""

    def __init__(self, service: Service, texts: LocalTexts) -> None:
        self.service = service
        self.opened = asyncio.Event()
        self.lost = asyncio.Event()
        self.commands = []
        self.desks = FrontendDesks(service, lambda _: self.opened.set(), lambda _: self.lost.set())
        self.metrics = RequestMetrics(["a"])
        self.remote = RemoteService(
            1, {"a": texts}, self.metrics, self.commands.append, lambda: None
        )

    async def completion(self, prompt="hello", principal=LOCAL, **fields):
        (output,) = await gather_all(self.remote, [self.request(prompt, **fields)], principal)
        return output

    def request(self, prompt="hello", max_tokens=3, model="a", n=1, **fields):
        sampling = SamplingParams(max_tokens=max_tokens, n=n, seed=0, temperature=0)
        request_id = self.remote.new_request_id()
        return GenerateRequest(
            request_id=request_id, model=model, prompt=prompt, task=Generate(sampling), **fields
        )

    def pooled(self, prompt="hello", model="a", **task):
        request_id = self.remote.new_request_id()
        return GenerateRequest(request_id=request_id, model=model, prompt=prompt, task=Pool(**task))

    async def until_idle(self):
        async with asyncio.timeout(60):
            while self.service.draining.num_in_flight:
                await asyncio.sleep(0.005)


@pytest.fixture
async def make_ends(make_model, staging, tmp_path):
    async with contextlib.AsyncExitStack() as stack:

        async def make(settings=None) -> Ends:
            model = make_model("a", settings)
            service = Service([model], staging, RequestMetrics(["a"]), SystemClock())
            stack.push_async_callback(service.close)
            await service.start()
            card = msgspec.structs.replace(model.card, max_model_len=1)
            ends = Ends(service, LocalTexts(card, model.tokenizer, model.chats))
            await stack.enter_async_context(ends.desks.listening(str(tmp_path / "owner")))
            await ends.remote.connect(str(tmp_path / "owner"))
            stack.callback(ends.remote.connection.close)
            ends.remote.opened()
            await ends.opened.wait()
            async with asyncio.timeout(60):
                while ends.remote.model("a").card.max_model_len != model.card.max_model_len:
                    await asyncio.sleep(0.005)
            return ends

        yield make


@pytest.fixture
async def ends(make_ends):
    return await make_ends()


async def test_outputs_are_those_of_the_owner(ends):
    for prompt in ("hello", (5, 6, 7), "x" * 1500):
        (expected,) = await gather_all(ends.service, [ends.request(prompt, n=2)], LOCAL)
        output = await ends.completion(prompt, n=2)
        assert output.prompt_token_ids == expected.prompt_token_ids
        assert output.sequences == expected.sequences
    await ends.until_idle()
    labels = {"model": "a", "adapter": "", "finish_reason": "length"}
    assert ends.metrics.registry.get_sample_value("loraplex_requests_total", labels) == 3


async def test_vectors_are_those_of_the_owner(ends):
    for prompt in ("hello", (5, 6, 7), "x" * 1500):
        expected = await ends.service.pool(ends.pooled(prompt, dimensions=3), LOCAL)
        pooled = await ends.remote.pool(ends.pooled(prompt, dimensions=3), LOCAL)
        assert len(pooled.vector) == 3 * 4
        assert (pooled.vector, pooled.adapters) == (expected.vector, expected.adapters)
        assert pooled.prompt_token_ids == expected.prompt_token_ids
        assert pooled.timing.num_output_tokens == 0
    await ends.until_idle()
    labels = {"model": "a", "adapter": "", "finish_reason": "stop"}
    assert ends.metrics.registry.get_sample_value("loraplex_requests_total", labels) == 3


async def test_a_vector_is_that_of_its_adapter(ends, staging):
    admin = ends.service.adapter_admin
    await admin.load(LOCAL, model="a", name="zh", path=staging.put("/zh"))
    plain = ends.pooled()
    adapted = msgspec.structs.replace(plain, adapters=(AdapterChoice(ByName("zh")),))
    pooled = await ends.remote.pool(adapted, LOCAL)
    assert [adapter.name for adapter in pooled.adapters] == ["zh"]
    assert pooled.vector == (await ends.service.pool(adapted, LOCAL)).vector
    assert pooled.vector != (await ends.remote.pool(plain, LOCAL)).vector


async def test_errors_of_pooling_are_those_of_the_owner(ends):
    no_models = Principal("acme", Rights(models=NONE))
    for request, principal, error in (
        (ends.pooled(model="b"), LOCAL, ModelNotFoundError),
        (ends.pooled(), no_models, ModelNotFoundError),
        (ends.pooled("x " * 40_000), LOCAL, PromptTooLongError),
        (ends.pooled(dimensions=0), LOCAL, InvalidParameterError),
        (ends.pooled(kind=PoolKind.MEAN), LOCAL, UnsupportedFeatureError),
    ):
        with pytest.raises(error) as expected:
            await ends.service.pool(request, principal)
        with pytest.raises(error) as caught:
            await ends.remote.pool(request, principal)
        assert caught.value.to_info() == expected.value.to_info()
    await ends.until_idle()


async def test_pooled_requests_end_their_leases(make_ends):
    ends = await make_ends(SLOW)
    few = Principal("few", limits=TenantLimits(max_concurrent_requests=1, tokens_per_minute=9))
    pooling = asyncio.create_task(ends.remote.pool(ends.pooled((1, 2, 3)), few))
    async with asyncio.timeout(60):
        while not ends.service.draining.num_in_flight:
            await asyncio.sleep(0)
    pooling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pooling
    await ends.until_idle()
    for _ in range(2):
        await ends.remote.pool(ends.pooled((1, 2, 3)), few)
        await ends.until_idle()
    with pytest.raises(RateLimitedError):
        await ends.remote.pool(ends.pooled((1, 2, 3, 4)), few)


async def test_requests_of_a_batch_begin_together(make_ends):
    ends = await make_ends(SLOW)
    await gather_all(ends.remote, [ends.request(p, max_tokens=2) for p in ("a", "b", "c")], LOCAL)
    first = next(record for record in ends.service.model("a").engine.steps if record.request_ids)
    assert len(set(first.request_ids)) == 3


async def test_errors_are_those_of_the_owner(ends):
    no_models = Principal("acme", Rights(models=NONE))
    for request, principal, error in (
        (ends.request(model="b"), LOCAL, ModelNotFoundError),
        (ends.request(max_tokens=2**70), LOCAL, InvalidParameterError),  # larger than a message's
        (ends.request(), no_models, ModelNotFoundError),
        (ends.request("x " * 40_000), LOCAL, PromptTooLongError),
        (ends.request(adapters=(AdapterChoice(ByName("zh")),)), LOCAL, AdapterNotFoundError),
    ):
        with pytest.raises(error) as expected:
            await ends.service.generate(request, principal)
        with pytest.raises(error) as caught:
            await ends.remote.generate(request, principal)
        assert caught.value.to_info() == expected.value.to_info()
    ends.service.draining.begin()
    with refused(NotReadyError, "draining"):
        await ends.completion()
    async with asyncio.timeout(60):
        while not ends.remote.is_draining:
            await asyncio.sleep(0.005)


async def test_names_are_looked_up_where_they_are(ends, staging):
    assert await ends.remote.find("a", LOCAL) == (ends.remote.model("a").card, None)
    with refused(ModelNotFoundError, "'zh'", "'a'", param="model"):
        await ends.remote.find("zh", LOCAL)
    admin = ends.service.adapter_admin
    await admin.load(LOCAL, model="a", name="zh", path=staging.put("/zh"))
    assert await ends.remote.find("zh", LOCAL) == (ends.remote.model("a").card, ByName("zh"))
    output = await ends.completion(adapters=(AdapterChoice(ByName("zh")),))
    assert [adapter.name for adapter in output.adapters] == ["zh"]
    blind = Principal("acme", Rights(models=Names(("b",))))
    assert ends.remote.models(blind) == []
    with pytest.raises(ModelNotFoundError):
        await ends.remote.find("a", blind)


async def test_limits_are_the_owners(make_ends):
    ends = await make_ends(SLOW)
    few = Principal("few", limits=TenantLimits(max_concurrent_requests=1, tokens_per_minute=40))
    outputs = await ends.remote.generate(ends.request((1, 2), max_tokens=30), few)
    with refused(RateLimitedError, "'few'", 1):
        await ends.service.generate(ends.request(), few)
    await anext(outputs)
    await close_outputs(outputs)
    await ends.until_idle()
    await ends.completion((1, 2), few, max_tokens=3)
    with refused(RateLimitedError, "'few'", 40, 8):
        await ends.completion((1, 2), few, max_tokens=38)


async def test_a_request_that_is_left_during_its_admission_ends(make_ends):
    ends = await make_ends(SLOW)
    few = Principal("few", limits=TenantLimits(max_concurrent_requests=1))
    for _ in range(5):
        admission = asyncio.create_task(ends.completion("x" * 1500, few, max_tokens=400))
        await asyncio.sleep(0)
        admission.cancel()
        with pytest.raises(asyncio.CancelledError):
            await admission
        await ends.until_idle()
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(RateLimitedError):
                await ends.completion(principal=few)
                break


async def test_the_end_of_a_process_ends_its_requests(make_ends):
    ends = await make_ends(SLOW)
    few = Principal("few", limits=TenantLimits(max_concurrent_requests=2))
    for _ in range(2):
        await anext(await ends.remote.generate(ends.request(max_tokens=1000), few))
    ends.remote.connection.close()
    await ends.lost.wait()
    await ends.until_idle()
    await gather_all(ends.service, [ends.request()], few)


async def test_numbers_and_commands(ends):
    await ends.completion()
    (desk,) = ends.desks
    counting = asyncio.create_task(desk.count())
    async with asyncio.timeout(60):
        while not ends.commands:
            await asyncio.sleep(0.005)
    (count,) = ends.commands
    assert isinstance(count, Count)
    families = encoded_families([ends.metrics.registry])
    ends.remote.connection.send(Numbers(count.query_id, families))
    await counting
    assert desk.families == families
    listing = asyncio.create_task(desk.requests(b"query"))
    async with asyncio.timeout(60):
        while len(ends.commands) == 1:
            await asyncio.sleep(0.005)
    assert ends.commands[1] == ListRequests(2, b"query")
    ends.remote.connection.send(ListedRequests(2, b"page"))
    assert await listing == b"page"
    ends.desks.send(StopProcess(3.0))
    async with asyncio.timeout(60):
        while ends.commands[-1] != StopProcess(3.0):
            await asyncio.sleep(0.005)


async def test_use_is_counted_by_the_owner(ends):
    await ends.completion((5, 6, 7))
    with pytest.raises(PromptTooLongError):
        await ends.completion((1,) * 10_000)
    await ends.until_idle()
    count = ends.service.adapter_usage.of_tenant(LOCAL.tenant)[UsedAdapter("a")]
    assert (count.requests, count.errors, count.prompt_tokens, count.output_tokens) == (2, 1, 3, 3)
