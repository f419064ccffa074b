"""The service over two models on fake engines and two tenants."""

import asyncio
import itertools
import threading
import time

import msgspec
import pytest

from loraplex.core.adapter import (
    AdapterChoice,
    AdapterRef,
    ByDigest,
    ByName,
    ByTaskId,
    LoadPolicy,
)
from loraplex.core.clock import SystemClock
from loraplex.core.config import AdapterConfig
from loraplex.core.errors import (
    AdapterExistsError,
    AdapterNotFoundError,
    ConfigError,
    InvalidParameterError,
    InvalidRequestError,
    ModelNotFoundError,
    NotReadyError,
    PermissionDeniedError,
    PromptTooLongError,
    QueueFullError,
)
from loraplex.core.output import FinishReason
from loraplex.core.principal import LOCAL, NONE, Principal, Rights
from loraplex.core.request import GenerateRequest, PromptTruncation
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.task import Generate
from loraplex.engine.messages import EngineReady
from loraplex.serving import local_texts
from loraplex.serving.access.tenant_adapters import ConfiguredAdapter
from loraplex.serving.adapter_usage import UsedAdapter
from loraplex.serving.backend import Backend
from loraplex.serving.engines.engine_state import EngineState
from loraplex.serving.request_metrics import RequestMetrics
from loraplex.serving.service import Service
from support.fake_engine_process import FakeEngineSettings
from support.naming import naming, refused

ACME, GLOBEX = Principal("acme"), Principal("globex")
SLOW = FakeEngineSettings(step_seconds=0.005)


@pytest.fixture
async def make_service(make_model, staging):
    """A function (model name=settings...) -> a service that is not started; it is closed."""
    services = []

    def make(config: dict | None = None, **settings) -> Service:
        models = [make_model(name, one, **(config or {})) for name, one in settings.items()]
        metrics = RequestMetrics(settings)
        service = Service(models, staging, metrics, SystemClock())
        service.metrics = metrics
        services.append(service)
        return service

    yield make
    for service in services:
        await service.close()


@pytest.fixture
async def service(make_service, staging):
    """Models `a` and `b`; adapters of acme: zh on both, ja on a; of globex: zh on a."""
    service: Backend = make_service(a=None, b=None)
    await service.start()
    for path in ("/zh", "/ja", "/other-zh"):
        staging.put(path)
    await service.adapter_admin.load(ACME, model="a", name="zh", path="/zh", task_id=1)
    await service.adapter_admin.load(ACME, model="b", name="zh", path="/zh")
    await service.adapter_admin.load(ACME, model="a", name="ja", path="/ja")
    await service.adapter_admin.load(GLOBEX, model="a", name="zh", path="/other-zh")
    return service


@pytest.fixture
async def slow(make_service, staging):
    """One model whose steps take long enough to act in between."""
    service = make_service(a=SLOW)
    await service.start()
    await service.adapter_admin.load(LOCAL, model="a", name="zh", path=staging.put("/zh"))
    return service


_REQUEST_IDS = itertools.count(1)


def request(model="a", *keys, prompt="What is the capital of France?", max_tokens=4, **fields):
    sampling = fields.pop("sampling", None) or SamplingParams(
        max_tokens=max_tokens, temperature=0, ignore_eos=True
    )
    return GenerateRequest(
        request_id=next(_REQUEST_IDS),
        model=model,
        prompt=prompt,
        task=Generate(sampling),
        adapters=tuple(AdapterChoice(key) for key in keys),
        **fields,
    )


async def outputs_of(service, generation, principal=ACME) -> list:
    async with asyncio.timeout(60):
        return [output async for output in await service.generate(generation, principal)]


async def tokens_of(service, generation, principal=ACME) -> list[int]:
    outputs = await outputs_of(service, generation, principal)
    return [t for output in outputs for s in output.sequences for t in s.token_ids]


class TestGenerate:
    async def test_the_base_model(self, service):
        outputs = await outputs_of(service, request("b", client_request_id="mine"))
        last = outputs[-1]
        assert (last.model, last.client_request_id, last.adapters) == ("b", "mine", ())
        assert last.finished
        assert last.num_output_tokens == 4
        assert last.sequences[-1].finish_reason is FinishReason.LENGTH
        prompt = service.model("b").tokenize("What is the capital of France?")
        assert last.prompt_token_ids == tuple(prompt)

    async def test_prompts_may_be_ids_and_without_special_tokens(self, service):
        text = await outputs_of(service, request(prompt="hm", add_special_tokens=False))
        ids = service.model("a").tokenize("hm", add_special_tokens=False)
        assert text[-1].prompt_token_ids == tuple(ids)
        same = await outputs_of(service, request(prompt=tuple(ids)))
        assert same[-1].prompt_token_ids == tuple(ids)

    async def test_a_long_text_is_tokenized_beside_the_loop(self, service, monkeypatch):
        monkeypatch.setattr(local_texts, "INLINE_CHARACTERS", 10)
        text = "France is big."
        outputs = await outputs_of(service, request(prompt=text))
        assert outputs[-1].prompt_token_ids == tuple(service.model("a").tokenize(text))

    async def test_a_text_of_many_tokens_is_not_tokenized_to_its_end(self, service, monkeypatch):
        """Tokenizing 5 MB of combining characters, two tokens each, takes half a minute."""
        model = service.model("a")
        length, encoded = model.card.max_model_len, []
        encode = type(model.tokenizer).encode

        def counted(tokenizer, text, add_special_tokens=True):
            encoded.append(len(text))
            return encode(tokenizer, text, add_special_tokens)

        monkeypatch.setattr(local_texts, "INLINE_CHARACTERS", 10)
        monkeypatch.setattr(type(model.tokenizer), "encode", counted)
        text = "\u0301" * (200 * length)
        with refused(PromptTooLongError, 2 * length, "'a'", 2048, "max_model_len", param="prompt"):
            await outputs_of(service, request(prompt=text))
        assert sum(encoded) <= 3 * length
        truncation = PromptTruncation(max_tokens=5)
        cut = msgspec.structs.replace(request(prompt=text), truncation=truncation)
        with refused(PromptTooLongError, 16 * length, "'a'", param="prompt"):
            await outputs_of(service, cut)
        with refused(PromptTooLongError, 16 * length, "'a'", param="prompt"):
            model.tokenize(text)
        short = msgspec.structs.replace(cut, prompt="ab" * (5 * length))
        assert len((await outputs_of(service, short))[-1].prompt_token_ids) == 5
        num_tokens = len(model.tokenize("\u0301" * (7 * length)))
        with refused(PromptTooLongError, num_tokens, "'a'", param="prompt"):
            await outputs_of(service, request(prompt="\u0301" * (7 * length)))

    async def test_adapters_by_name_task_and_digest(self, service):
        base = await tokens_of(service, request())
        digest = service.adapters(ACME, "b")[0].digest
        by_key = [
            await tokens_of(service, request("a", key))
            for key in (ByName("zh"), ByTaskId(1), ByDigest(digest))
        ]
        assert by_key[0] == by_key[1] == by_key[2] != base
        assert await tokens_of(service, request("a", ByName("ja"))) not in (base, by_key[0])
        outputs = await outputs_of(service, request("a", ByTaskId(1)))
        (adapter,) = outputs[0].adapters
        assert (adapter.name, adapter.digest, adapter.scale) == ("zh", "digest of /zh", 1.0)

    async def test_a_kept_version_by_its_digest(self, service, staging):
        """The engine keeps it for its requests alone, no longer than they run."""
        old = request("a", ByDigest("digest of /ja"))
        before = await tokens_of(service, old)
        path = staging.put("/ja2")
        await service.adapter_admin.load(ACME, model="a", name="ja", path=path, replace=True)
        for _ in range(2):
            generation = request("a", ByDigest("digest of /ja"))
            assert await tokens_of(service, generation) == before
            used = service.adapter_usage.of_tenant("acme")
            assert used[UsedAdapter("a", "acme", "ja")].requests
            engine = service.model("a").engine
            assert "digest of /ja" not in await engine.residency()
        both = await asyncio.gather(
            *(
                tokens_of(service, request("a", ByDigest(f"digest of {source}")))
                for source in ("/ja", "/ja2")
            )
        )
        assert both[0] == before
        assert both[1] != before
        assert "digest of /ja2" in await service.model("a").engine.residency()
        always = request("a", ByDigest("digest of /ja"), load_policy=LoadPolicy.ALWAYS)
        assert await tokens_of(service, always) == before
        ref = AdapterRef("a", "acme", ByName("ja"))
        assert (await service.adapter_admin.describe(ACME, ref)).version == 2
        for principal in (GLOBEX, Principal("acme", rights=Rights(use=NONE))):
            with pytest.raises((AdapterNotFoundError, PermissionDeniedError)):
                await service.generate(request("a", ByDigest("digest of /ja")), principal)
        await service.adapter_admin.unload(ACME, ref)
        with refused(AdapterNotFoundError, "digest of /ja", param="adapter"):
            await service.generate(request("a", ByDigest("digest of /ja")), ACME)

    async def test_a_kept_version_is_described(self, service, staging):
        staging.put("/ja2", num_bytes=77, warnings=("hm",))
        await service.adapter_admin.load(ACME, model="a", name="ja", path="/ja2", replace=True)
        ref = AdapterRef("a", "acme", ByName("ja"))
        now, old = [await service.adapter_admin.describe(ACME, ref, number) for number in (None, 1)]
        assert (now.version, now.num_bytes, now.warnings) == (2, 77, ("hm",))
        assert (old.version, old.digest, old.warnings) == (1, "digest of /ja", ())
        assert old.num_bytes == old.content.host_bytes != 77
        assert old.versions == now.versions
        with refused(AdapterNotFoundError, "no version 3", "2, 1", param="version"):
            await service.adapter_admin.describe(ACME, ref, 3)

    async def test_each_tenant_has_its_own(self, service):
        acme = await outputs_of(service, request("a", ByName("zh")), ACME)
        globex = await outputs_of(service, request("a", ByName("zh")), GLOBEX)
        assert acme[0].adapters[0].digest == "digest of /zh"
        assert globex[0].adapters[0].digest == "digest of /other-zh"
        with refused(AdapterNotFoundError, "'ja'", "'a'", "'zh'", param="adapter"):
            await service.generate(request("a", ByName("ja")), GLOBEX)
        with pytest.raises(AdapterNotFoundError):
            await service.generate(request("a", ByDigest("digest of /zh")), GLOBEX)

    @pytest.mark.parametrize(
        ("generation", "error", "named"),
        [
            (request(prompt=""), InvalidRequestError, ("empty",)),
            (request(prompt=()), InvalidRequestError, ("empty",)),
            (request("c"), ModelNotFoundError, ("c", "a", "b")),
            (request("a", ByName("fr")), AdapterNotFoundError, ("fr", "a")),
            (request(prompt=(1,) * 3000), PromptTooLongError, (3000, "a")),
            (request(prompt="x" * (2048 * 256 + 1)), PromptTooLongError, (524289, "a", 2048)),
            (request(sampling=SamplingParams(top_p=7)), InvalidParameterError, ("top_p", 7)),
            (request(prompt="\ud800"), InvalidRequestError, (0, "U+D800")),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    async def test_what_is_wrong_is_raised_at_once_and_counted(
        self, service, generation, error, named
    ):
        with pytest.raises(error, match=naming(*named)):
            await service.generate(generation, ACME)
        model = generation.model if generation.model in ("a", "b") else ""
        assert service.metrics.errors.labels(model, error.code)._value.get() == 1

    async def test_as_many_bad_words_as_are_allowed(self, service):
        words = tuple(f"word{number}" for number in range(1000))
        sampling = SamplingParams(max_tokens=1, bad_words=words)
        assert await tokens_of(service, request(sampling=sampling), ACME)

    async def test_long_bad_words_delay_no_other_request(self, service, monkeypatch):
        threads = []

        def encode(text, add_special_tokens=True):
            threads.append(threading.current_thread())
            return [1]

        tokenizer = service._models["a"].tokenizer
        monkeypatch.setattr(
            type(tokenizer), "encode", lambda _, *args, **more: encode(*args, **more)
        )
        sampling = SamplingParams(max_tokens=1, bad_words=("w" * 4000, "v" * 4000))
        await tokens_of(service, request(prompt=(1,), sampling=sampling), ACME)
        assert threads
        assert threading.main_thread() not in threads

    async def test_the_models_length_is_the_engines(self, service):
        """The engine's memory may hold less than the model was made for."""
        assert service.model("a").card.max_model_len == 2048

    @pytest.mark.parametrize("jump_seconds", [-86_400, 86_400])
    async def test_a_wall_clock_that_jumps_ends_no_request(
        self, service, monkeypatch, jump_seconds
    ):
        """Deadlines and limits go by the monotonic clock."""
        outputs = await service.generate(request(timeout_seconds=60), ACME)
        wall_time = time.time
        monkeypatch.setattr(time, "time", lambda: wall_time() + jump_seconds)
        last = [output async for output in outputs][-1]
        assert last.sequences[-1].finish_reason is FinishReason.LENGTH
        assert await tokens_of(service, request(timeout_seconds=60), ACME)
        assert service.health().ready

    async def test_a_restarted_engine_may_hold_less(self, service):
        """Admission goes by the engine of now."""
        model = service.model("a")
        smaller = msgspec.structs.replace(
            model.engine.capacity, max_model_len=8, device_name="Abacus"
        )
        model.engine._handle(EngineReady(smaller), model.engine._link)
        assert (model.card.max_model_len, model.card.device_name) == (8, "Abacus")
        with refused(PromptTooLongError, 8, "'a'", "max_model_len", param="prompt"):
            await service.generate(request(prompt=(1,) * 8), ACME)

    async def test_rights(self, service):
        powerless = Principal("acme", rights=Rights(use=NONE, manage=NONE))
        assert await tokens_of(service, request(), powerless)
        with refused(PermissionDeniedError, "'acme'", "use"):
            await service.generate(request("a", ByName("zh")), powerless)
        with refused(PermissionDeniedError, "'acme'", "'manage'"):
            await service.adapter_admin.load(powerless, model="a", name="x", path="/zh")
        with refused(PermissionDeniedError, "'acme'", "'manage'"):
            await service.adapter_admin.unload(powerless, AdapterRef("a", "acme", ByName("zh")))

    async def test_closing_the_iterator_aborts(self, slow):
        outputs = await slow.generate(request(max_tokens=2000), LOCAL)
        await anext(outputs)
        await outputs.aclose()
        await slow.drain(5)
        assert slow.model("a").stats.num_running == 0
        assert slow.model("a").stats.generation_tokens < 2000

    async def test_a_deadline(self, slow):
        outputs = await slow.generate(request(max_tokens=2000, timeout_seconds=0.03), LOCAL)
        with pytest.raises(Exception, match=naming(0.03)):
            [output async for output in outputs]

    async def test_a_full_queue_is_the_iterators_first_word(self, make_service):
        settings = FakeEngineSettings(step_seconds=0.005, max_queue_size=1)
        service = make_service(a=settings)
        await service.start()
        streams = [await service.generate(request(max_tokens=50), LOCAL) for _ in range(40)]
        results = await asyncio.gather(*map(anext, streams), return_exceptions=True)
        assert any(isinstance(result, QueueFullError) for result in results)
        for stream in streams:
            await stream.aclose()

    async def test_requests_are_numbered(self, service):
        assert service.new_request_id() < service.new_request_id()


async def test_names_for_metrics_are_those_of_the_servers_own_adapters(service, staging):
    staging.put("/it")
    await service.adapter_admin.load(LOCAL, model="a", name="it", path="/it")
    service._catalog.models["a"].discovered.put(
        ConfiguredAdapter("es", "/es", None, is_named=False)
    )
    cards = service.adapters(LOCAL, "a")
    assert [card.name for card in cards] == ["es", "it"]
    names = service.model("a").adapter_names()
    assert sorted(names) == [(card.name, card.digest) for card in cards]


class TestFind:
    @pytest.mark.parametrize(
        ("name", "model", "key"),
        [
            ("a", "a", None),
            ("b", "b", None),
            ("ja", "a", ByName("ja")),
            ("a:ja", "a", ByName("ja")),
            ("a:zh", "a", ByName("zh")),
            ("b:zh", "b", ByName("zh")),
        ],
    )
    async def test_what_a_name_means(self, service, name, model, key):
        assert await service.find(name, ACME) == (service.model(model).card, key)

    @pytest.mark.parametrize("name", ["c", "b:ja", "a:", ":ja", "", "c:zh", "a:zh:zh", "A"])
    async def test_unknown_names_list_what_there_is(self, service, name):
        with refused(ModelNotFoundError, repr(name), "'a', 'b', 'ja', 'zh', 'zh'", param="model"):
            await service.find(name, ACME)

    async def test_a_name_on_two_models_must_be_qualified(self, service):
        with refused(ModelNotFoundError, "'zh'", "a:zh", "b:zh", param="model"):
            await service.find("zh", ACME)
        assert await service.find("zh", GLOBEX) == (service.model("a").card, ByName("zh"))

    async def test_tenants_do_not_see_each_other(self, service):
        with refused(ModelNotFoundError, "'ja'", "'a', 'b', 'zh'", param="model"):
            await service.find("ja", GLOBEX)

    async def test_names_with_colons(self, make_service, staging):
        models = {"org:base": None, "org": None}
        service = make_service(**models)
        await service.start()
        staging.put("/x")
        for name in ("zh", "very:odd"):
            await service.adapter_admin.load(LOCAL, model="org:base", name=name, path="/x")
        for name in ("org:base:zh", "zh"):
            assert (await service.find(name, LOCAL))[1] == ByName("zh")
        for name in ("very:odd", "org:base:very:odd"):
            assert (await service.find(name, LOCAL))[1] == ByName("very:odd")

    async def test_an_underscore_joins_names_too(self, make_service, staging):
        service = make_service(org=None, org_x=None)
        await service.start()
        staging.put("/x")
        for model, name in (("org", "zh"), ("org_x", "zh"), ("org_x", "org_ja"), ("org", "ja")):
            await service.adapter_admin.load(LOCAL, model=model, name=name, path="/x")
        assert await service.find("org_zh", LOCAL) == (service.model("org").card, ByName("zh"))
        assert await service.find("org_x_zh", LOCAL) == (service.model("org_x").card, ByName("zh"))
        # The adapter that is called so goes before the adapter `ja` of `org`.
        assert await service.find("org_ja", LOCAL) == (
            service.model("org_x").card,
            ByName("org_ja"),
        )
        assert await service.find("org_x", LOCAL) == (service.model("org_x").card, None)

    async def test_further_names_of_a_model(self, make_service, staging):
        service = make_service(llama=None)
        model = service.models()[0].name
        served = service._catalog.models[model]
        names = ("publishers/ns/models/llama", "llama-3")
        served.card = msgspec.structs.replace(served.card, served_names=names)
        await service.start()
        staging.put("/x")
        await service.adapter_admin.load(LOCAL, model="llama", name="zh", path="/x")
        for name in names:
            assert await service.find(name, LOCAL) == (served.card, None)
            assert await service.find(f"{name}:zh", LOCAL) == (served.card, ByName("zh"))
            with refused(InvalidRequestError, repr(name), "base model", param="name"):
                await service.adapter_admin.load(LOCAL, model="llama", name=name, path="/x")

    @pytest.mark.parametrize("name", ["org:zh", "org:base:zh"])
    async def test_no_name_is_that_of_an_adapter_of_a_base(self, make_service, staging, name):
        service = make_service(**{"org:base": None, "org": None})
        await service.start()
        path, base = staging.put("/x"), repr(name.removesuffix(":zh"))
        with refused(InvalidRequestError, repr(name), "'zh'", base, param="name"):
            await service.adapter_admin.load(LOCAL, model="org:base", name=name, path=path)
        await service.adapter_admin.load(LOCAL, model="org:base", name="zh", path=path)
        with refused(InvalidRequestError, repr(name), "'zh'", base, param="name"):
            await service.adapter_admin.alias(
                LOCAL, AdapterRef("org:base", "default", ByName("zh")), name
            )

    async def test_a_long_list_is_cut(self, service, staging):
        for number in range(30):
            await service.adapter_admin.load(GLOBEX, model="b", name=f"n{number:02}", path="/zh")
        with refused(ModelNotFoundError, "'x'", "'n16'", 13, param="model"):
            await service.find("x", GLOBEX)


class TestAdapters:
    async def test_listing(self, service):
        cards = service.adapters(ACME)
        assert [(card.model, card.name) for card in cards] == [
            ("a", "ja"),
            ("a", "zh"),
            ("b", "zh"),
        ]
        assert [card.name for card in service.adapters(ACME, "b")] == ["zh"]
        with pytest.raises(ModelNotFoundError):
            service.adapters(ACME, "c")

    @pytest.mark.parametrize("name", ["a", "b"])
    async def test_a_bases_name_is_taken(self, service, name):
        with refused(InvalidRequestError, repr(name), "base model", param="name"):
            await service.adapter_admin.load(ACME, model="a", name=name, path="/zh")

    async def test_loading_for_an_unknown_model(self, service):
        with pytest.raises(ModelNotFoundError):
            await service.adapter_admin.load(ACME, model="c", name="x", path="/zh")

    async def test_a_name_twice(self, service):
        with pytest.raises(AdapterExistsError):
            await service.adapter_admin.load(ACME, model="a", name="zh", path="/zh")

    async def test_unload(self, service):
        await service.adapter_admin.unload(ACME, AdapterRef("a", "acme", ByTaskId(1)))
        with pytest.raises(AdapterNotFoundError):
            await service.generate(request("a", ByName("zh")), ACME)
        with pytest.raises(AdapterNotFoundError):
            await service.adapter_admin.unload(ACME, AdapterRef("a", "acme", ByName("zh")))
        assert await tokens_of(service, request("b", ByName("zh")))  # the other model's stays
        assert await tokens_of(service, request("a", ByName("zh")), GLOBEX)

    async def test_requests_that_run_with_an_unloaded_adapter_end_normally(self, slow):
        whole = await tokens_of(slow, request("a", ByName("zh"), max_tokens=20), LOCAL)
        outputs = await slow.generate(request("a", ByName("zh"), max_tokens=20), LOCAL)
        first = await anext(outputs)
        await slow.adapter_admin.unload(LOCAL, AdapterRef("a", "default", ByName("zh")))
        rest = [output async for output in outputs]
        tokens = [t for output in [first, *rest] for s in output.sequences for t in s.token_ids]
        assert tokens == whole
        assert len(first.sequences[0].token_ids) < 20

    async def test_a_replacement_is_for_new_requests(self, slow, staging):
        old = await slow.generate(request("a", ByName("zh"), max_tokens=20), LOCAL)
        first = await anext(old)
        await slow.adapter_admin.load(
            LOCAL, model="a", name="zh", path=staging.put("/new"), replace=True
        )
        new = await outputs_of(slow, request("a", ByName("zh"), max_tokens=20), LOCAL)
        rest = [output async for output in old]
        assert {o.adapters[0].digest for o in [first, *rest]} == {"digest of /zh"}
        assert {o.adapters[0].digest for o in new} == {"digest of /new"}
        assert rest[-1].num_output_tokens == new[-1].num_output_tokens == 20


class TestLifecycle:
    async def test_before_the_start_all_is_refused_to_be_tried_again(self, make_service):
        service = make_service(a=None)
        assert (service.health().live, service.health().ready) == (True, False)
        assert service.health().reason == "the server is starting"
        assert not service.model_ready("a")
        assert (await service.find("a", LOCAL))[1] is None
        for work in (
            service.generate(request(), LOCAL),
            service.adapter_admin.load(LOCAL, model="a", name="x", path="/x"),
        ):
            with refused(NotReadyError, "starting") as caught:
                await work
            assert caught.value.retry_after_seconds
        with refused(NotReadyError, "starting"):
            await service.find("an adapter that is not loaded yet", LOCAL)

    async def test_configured_adapters_are_there_when_it_is_ready(self, make_service, staging):
        config = {"adapters": {"zh": AdapterConfig(staging.put("/zh"))}}
        service = make_service(config, a=None)
        await service.start()
        assert service.health().ready
        assert [card.name for card in service.adapters(LOCAL)] == ["zh"]

    async def test_an_adapter_named_as_another_base_stops_the_start(self, make_service, staging):
        config = {"adapters": {"b": AdapterConfig(staging.put("/zh"))}}
        service = make_service(config, a=None, b=None)
        with refused(ConfigError, "'b'", "base model"):
            await service.start()
        assert not service.health().ready

    async def test_one_engine_that_cannot_start_stops_the_start(self, make_service):
        failure = ConfigError("no weights").to_info()
        service = make_service(a=None, b=FakeEngineSettings(failure=failure))
        with pytest.raises(ConfigError, match="no weights"):
            await service.start()
        await service.close()

    async def test_drain_lets_requests_end_and_takes_no_new_ones(self, slow):
        outputs = await slow.generate(request(max_tokens=10), LOCAL)
        drain = asyncio.create_task(slow.drain(20))
        await asyncio.sleep(0)
        assert slow.health().reason == "the server is stopping"
        assert not slow.model_ready("a")
        with refused(NotReadyError, "stopping"):
            await slow.generate(request(), LOCAL)
        with refused(NotReadyError, "stopping"):
            await slow.adapter_admin.load(LOCAL, model="a", name="x", path="/zh")
        await drain
        assert [output async for output in outputs][-1].num_output_tokens == 10

    async def test_drain_gives_up_in_time_and_close_fails_the_rest(self, slow, caplog):
        outputs = await slow.generate(request(max_tokens=2000), LOCAL)
        async with asyncio.timeout(60):
            await slow.drain(0.0)
        assert "the shutdown grace period is over" in caplog.text
        await slow.close()
        with refused(NotReadyError, "stopping"):
            [output async for output in outputs]

    async def test_an_idle_service_drains_at_once(self, service):
        async with asyncio.timeout(60):
            await service.drain(600)

    async def test_close_ends_the_staging_worker_and_may_come_twice(self, service, staging):
        await service.close()
        await service.close()
        assert staging.is_closed

    @pytest.mark.parametrize(
        "part",
        [
            "draining.close",
            "_follower.close",
            "_upkeep.close",
            "_models.a.engine.close",
            "_models.a.grammars.close",
            "_models.b.chats.close",
            "_loader.close",
            "_models.a.store.close",
        ],
    )
    async def test_a_part_that_cannot_be_closed_leaves_no_other_open(
        self, service, staging, monkeypatch, part
    ):
        """Else engines, staging processes and the lock of the state directory would stay."""
        *path, method = part.split(".")
        models, owner = service._models, service
        for name in path:
            owner = owner[name] if isinstance(owner, dict) else getattr(owner, name)
        states = []

        def failing():
            async def fail_after(closing):
                await closing
                raise OSError("planted")

            closing = original()
            if asyncio.iscoroutine(closing):
                return fail_after(closing)
            raise OSError("planted")

        for name, model in models.items():
            close_store = model.store.close

            def noting(name=name, close_store=close_store):
                states.append(name)
                close_store()

            monkeypatch.setattr(model.store, "close", noting)
        original = getattr(owner, method)
        monkeypatch.setattr(owner, method, failing)
        with pytest.raises(OSError, match="planted"):
            await service.close()
        assert staging.is_closed
        assert {model.engine.state for model in models.values()} == {EngineState.CLOSED}
        assert set(states) == {"a", "b"}
        assert service.draining.is_active
        monkeypatch.undo()


class TestHealth:
    @pytest.mark.parametrize(
        ("states", "ready"),
        [
            (("ready", "ready"), True),
            (("ready", "restarting"), False),
            (("starting", "ready"), False),
            (("failed", "ready"), False),
            (("closed", "closed"), False),
        ],
    )
    async def test_ready_is_when_every_engine_is(self, service, states, ready):
        for served, state in zip(service._models.values(), states, strict=True):
            served.engine.state = EngineState(state)
        health = service.health()
        assert (health.live, health.ready) == (True, ready)
        for name, state in zip("ab", states, strict=True):
            assert service.model_ready(name) == (state == "ready")
            is_reported = f"model {name!r} is {state}" in health.reason
            assert is_reported == (state != "ready")
        assert not service.model_ready("c")

    async def test_the_reason_of_a_failure_is_reported(self, service):
        engine = service._models["b"].engine
        engine.state, engine.failure = EngineState.FAILED, ConfigError("no weights")
        assert service.health().reason == "the engine of model 'b' is failed: no weights"


class TestAsides:
    async def test_models(self, service):
        assert [card.name for card in service.models()] == ["a", "b"]
        assert service.model("b").card.path == "/models/b"
        with refused(ModelNotFoundError, "'zh'", "'a', 'b'", param="model"):
            service.model("zh")

    async def test_text_and_tokens(self, service):
        ids = service.model("a").tokenize("Paris")
        assert service.model("a").detokenize(ids) == "Paris"
        assert service.model("a").detokenize(ids, skip_special_tokens=False) != "Paris"
        assert b"".join(service.model("a").token_bytes(i) for i in ids[1:]).strip() == b"Paris"

    async def test_chat(self, service):
        messages = [{"role": "user", "content": "Capital of France?"}]
        rendered = await service.model("a").chats.render(messages)
        assert "Capital of France?" in rendered
        shorter = await service.model("a").chats.render(messages, add_generation_prompt=False)
        assert len(shorter) <= len(rendered)

    async def test_steps_and_stats(self, service):
        await tokens_of(service, request(max_tokens=5))
        newest, last = service.model("a").steps(2)
        assert (newest.step_id + 1, last.step_id) == (last.step_id, service.model("a").stats.steps)
        assert len(service.model("a").steps(99)) == last.step_id
        assert service.model("a").steps(0) == service.model("a").steps(-1) == []


async def test_a_real_service_follows_its_folder(make_model, staging, tmp_path):
    folder = tmp_path / "adapters"
    folder.mkdir()
    model = make_model("base", adapter_dirs=(str(folder),))
    service = Service([model], staging, RequestMetrics(["base"]), SystemClock(), 0.01)
    await service.start()
    staging.put(str(folder / "zh"))
    (folder / "zh").mkdir()
    (folder / "zh" / "adapter_config.json").write_text("{}")
    async with asyncio.timeout(60):
        while not staging.requests:  # it is listed earlier
            await asyncio.sleep(0.01)
    assert (await service.find("zh", LOCAL))[1] == ByName("zh")
    assert [request["is_trusted"] for request in staging.requests] == [True]
    await service.adapter_admin.load(LOCAL, model="base", name="ja", path=staging.put("/ja"))
    assert not staging.requests[-1]["is_trusted"]
    (folder / "zh" / "adapter_config.json").unlink()
    async with asyncio.timeout(60):
        while len(service.adapters(LOCAL)) > 1:
            await asyncio.sleep(0.01)
    await service.close()
