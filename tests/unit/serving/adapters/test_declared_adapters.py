"""Servers that share declarations of adapters: what one declares, all of them serve."""

import asyncio
import json
import threading

import pytest

from loraplex.adapters.declaration_places import open_place
from loraplex.adapters.shared_declarations import SharedDeclarations
from loraplex.adapters.staging import RequestTensor
from loraplex.adapters.store import AdapterStore
from loraplex.core.adapter import AdapterChoice, AdapterRef, ByName, ByTaskId, LoadPolicy
from loraplex.core.config import AdapterConfig
from loraplex.core.errors import (
    AdapterExistsError,
    AdapterLoadError,
    AdapterNotFoundError,
    InvalidAdapterError,
    InvalidParameterError,
    LoraplexError,
    ModelNotFoundError,
    PermissionDeniedError,
    RateLimitedError,
    UnsupportedFeatureError,
)
from loraplex.core.principal import LOCAL, Names, Principal, Rights
from loraplex.core.request import GenerateRequest
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.task import Generate
from loraplex.frontends.ops.engine_families import declaration_collector
from loraplex.serving.adapter_cards import UnloadMode
from loraplex.serving.adapters import declared_adapters
from loraplex.serving.adapters.declared_adapters import MAX_PER_SECOND
from loraplex.serving.request_metrics import RequestMetrics
from loraplex.serving.service import Service
from loraplex.testing.fake_clock import FakeClock
from support.naming import naming, refused

ZH = AdapterRef("base", "default", ByName("zh"))
ACME = Principal("acme", Rights(operator=False))


class Replica:
    """One server. Its declarations are read when a request needs them, or by look()."""

    def __init__(self, service, store, clock) -> None:
        self.service = service
        self.store = store
        self.clock = clock
        self.declared = service.declared

    async def look(self) -> None:
        await self.declared.refresh()
        await self.declared.update()

    async def load(self, name="zh", path="/zh", principal=LOCAL, **options):
        return await self.service.adapter_admin.load(
            principal, model="base", name=name, path=path, **options
        )

    async def unload(self, name="zh", mode=UnloadMode.DRAIN, principal=LOCAL):
        ref = AdapterRef("base", principal.tenant, ByName(name))
        return await self.service.adapter_admin.unload(principal, ref, mode)

    async def use(self, key="zh", principal=LOCAL, policy=LoadPolicy.AUTO):
        key = ByName(key) if isinstance(key, str) else key
        request = GenerateRequest(
            request_id=self.service.new_request_id(),
            model="base",
            prompt="hello",
            task=Generate(SamplingParams(max_tokens=1)),
            adapters=(AdapterChoice(key),),
            load_policy=policy,
        )
        async with asyncio.timeout(60):
            outputs = [one async for one in await self.service.generate(request, principal)]
        return outputs[-1].adapters[0].digest

    def bound(self, tenant="default"):
        return {one.name: (one.number, one.digest) for one in self.store.list(tenant)}

    def states(self, principal=LOCAL):
        return {card.name: card.state.value for card in self.service.adapters(principal)}


@pytest.fixture
async def replica(make_model, staging, tmp_path):
    """A function (store, **config) -> a started Replica on the one shared folder."""
    (tmp_path / "truth").mkdir()
    services = []

    async def start(store=None, **config) -> Replica:
        model = make_model("base", **config)
        model.store = store = store or AdapterStore()
        folder, clock = str(tmp_path / "truth"), FakeClock()
        shared = SharedDeclarations(open_place(folder), folder, 100)
        metrics = RequestMetrics({"base": None})
        service = Service([model], staging, metrics, clock, declarations=shared)
        services.append(service)
        await service.start()
        return Replica(service, store, clock)

    yield start
    for service in services:
        await service.close()


@pytest.fixture
def put(tmp_path):
    def write(name="zh", version=1, uri="/zh", **fields):
        fields = {"name": name, "version": version, "uri": uri} | fields
        (tmp_path / "truth" / f"{name}.json").write_text(json.dumps(fields))

    return write


@pytest.fixture(autouse=True)
def sources(staging):
    for path in ("/zh", "/zh2", "/de"):
        staging.put(path)


async def test_a_load_through_one_serves_the_first_request_to_another(replica, staging):
    one, other = await replica(), await replica()
    report = await one.load()
    assert (report.version, report.digest, report.is_unchanged) == (1, "digest of /zh", False)
    assert await other.service.find("zh", LOCAL) == (other.service.models()[0], ByName("zh"))
    assert other.states() == {"zh": "unvalidated"}
    assert await other.use() == "digest of /zh"
    assert other.bound() == one.bound() == {"zh": (1, "digest of /zh")}
    assert other.states() == {"zh": "ready"}
    assert not staging.requests[-1]["is_trusted"]


async def test_a_request_that_names_it_apart_from_the_model_finds_it_too(replica):
    one, other = await replica(), await replica()
    await one.load(task_id=7)
    assert await other.use(ByTaskId(7)) == "digest of /zh"


async def test_replacements_wait_until_they_are_complete(replica, staging):
    one, other = await replica(), await replica()
    await one.load()
    await other.use()
    await one.load(path="/zh2", replace=True)
    assert await other.use() == "digest of /zh"
    staging.staged["/zh2"] = AdapterLoadError("the source is away")
    await other.look()
    assert await other.use() == "digest of /zh"
    staging.put("/zh2")
    await other.look()
    assert await other.use() == "digest of /zh"  # the pause is not over
    other.clock.advance_seconds(6)
    await other.look()
    assert await other.use() == "digest of /zh2"
    assert other.bound() == one.bound() == {"zh": (2, "digest of /zh2")}


async def test_an_unload_through_one_unloads_in_all(replica):
    one, other, third = await replica(), await replica(), await replica()
    await one.load()
    await other.use()
    unloaded = await third.unload()  # which never served it
    assert (unloaded.version, unloaded.digest) == (2, "digest of /zh")
    for each in (one, other, third):
        await each.look()
        assert each.bound() == {}
        assert each.states() == {}
        with pytest.raises(ModelNotFoundError):
            await each.service.find("zh", LOCAL)
    report = await other.load(path="/zh2")
    assert report.version == 3
    with pytest.raises(AdapterNotFoundError):
        await one.unload("nothing")


async def test_loads_that_meet_have_one_winner(replica):
    one, other = await replica(), await replica()
    results = await asyncio.gather(one.load(), other.load(path="/zh2"), return_exceptions=True)
    (lost,) = [each for each in results if isinstance(each, LoraplexError)]
    assert isinstance(lost, AdapterExistsError)
    (won,) = [each for each in results if each is not lost]
    for each in (one, other):
        await each.look()
        assert await each.use() == won.digest


async def test_a_replacement_that_another_made_meanwhile_is_a_conflict_of_versions(
    replica, staging
):
    one, other = await replica(), await replica()
    await one.load()
    arrived, go_on = asyncio.Event(), asyncio.Event()
    stage = staging.stage

    async def slow(path, **options):
        if path == "/de":
            arrived.set()
            await go_on.wait()
        return await stage(path, **options)

    staging.stage = slow
    late = asyncio.create_task(one.load(path="/de", replace=True))
    await arrived.wait()
    await other.load(path="/zh2", replace=True)
    go_on.set()
    with refused(AdapterExistsError, "version 2", "'zh'", "digest of /z", param="name"):
        await late
    await one.look()
    assert await one.use() == await other.use() == "digest of /zh2"


async def test_a_name_that_is_taken_elsewhere_is_taken_here(replica):
    one, other = await replica(), await replica()
    await one.load()
    with refused(AdapterExistsError, "'zh'", "version 1", param="name"):
        await other.load(path="/zh2")
    report = await other.load(replace=True)
    assert (report.version, report.is_unchanged) == (1, True)


async def test_a_dry_run_and_a_bad_adapter_declare_nothing(replica, tmp_path, staging):
    one = await replica()
    await one.load(dry_run=True)
    staging.staged["/bad"] = InvalidAdapterError("torn")
    with pytest.raises(InvalidAdapterError, match="torn"):
        await one.load(path="/bad")
    with refused(InvalidAdapterError, "'./zh'", param="path"):
        await one.load(path="./zh")
    with refused(InvalidParameterError, "U+000A", param="name"):
        await one.load(name="a\nb")
    assert list((tmp_path / "truth").iterdir()) == []


async def test_a_read_only_folder_refuses_changes_by_name(replica, put, monkeypatch):
    put()
    one = await replica()

    def refuse(name, body):
        raise PermissionError(30, "Read-only file system")

    monkeypatch.setattr(one.declared._shared._place, "create", refuse)
    assert await one.use() == "digest of /zh"
    for change in (
        one.load(path="/zh2", replace=True),
        one.load(name="de", path="/de"),
        one.unload(),
        one.service.adapter_admin.alias(LOCAL, ZH, "cn"),
    ):
        with pytest.raises(PermissionDeniedError, match=naming("[Errno 30]")):
            await change
    assert await one.use() == "digest of /zh"
    assert one.bound() == {"zh": (1, "digest of /zh")}


async def test_a_deleted_folder_leaves_what_is_there(replica, put, tmp_path, caplog):
    put()
    one = await replica()
    await one.use()
    (tmp_path / "truth").rename(tmp_path / "away")
    for _ in range(2):
        with refused(AdapterLoadError, tmp_path / "truth"):
            await one.look()
    assert caplog.text.count("the adapters stay as they are") == 1
    assert await one.use() == "digest of /zh"
    with refused(AdapterLoadError, tmp_path / "truth"):
        await one.service.find("de", LOCAL)
    with refused(AdapterLoadError, tmp_path / "truth"):
        await one.load(name="de", path="/de")
    (tmp_path / "away").rename(tmp_path / "truth")
    put("de", uri="/de")
    assert await one.use("de") == "digest of /de"


async def test_another_digest_than_the_declared_one_is_refused(replica, put):
    put(digest="digest of something else")
    one = await replica()
    with refused(
        InvalidAdapterError,
        "'zh'",
        "digest of something else",
        "digest of /zh",
        param="path",
    ):
        await one.use()
    assert one.bound() == {}
    put(version=2, digest="digest of /zh")
    await one.look()
    assert await one.use() == "digest of /zh"
    put(version=3, uri="/zh2", digest="digest of something else")
    await one.look()
    assert await one.use() == "digest of /zh"


async def test_a_restarted_server_stages_nothing_again(replica, put, staging):
    put()
    put("de", uri="/de")
    one = await replica()
    await one.use()
    await one.use("de")
    num_staged = len(staging.requests)
    put("de", 2, uri="/zh2")
    put("zh", 1)
    again = await replica(one.store)
    assert again.bound()["zh"] == (1, "digest of /zh")
    await again.look()
    assert again.bound() == {"zh": (1, "digest of /zh"), "de": (2, "digest of /zh2")}
    assert len(staging.requests) == num_staged + 1


async def test_a_restarted_server_forgets_what_is_declared_no_longer(replica, put, tmp_path):
    put()
    put("de", uri="/de")
    one = await replica()
    await one.use()
    (tmp_path / "truth" / "zh.json").unlink()
    again = await replica(one.store)
    assert again.bound() == {}
    assert again.states() == {"de": "unvalidated"}


async def test_the_truth_goes_back_and_so_does_the_name(replica, put):
    put(version=7, uri="/zh2")
    one = await replica()
    await one.use()
    put(version=2)
    await one.look()
    assert one.bound() == {"zh": (2, "digest of /zh")}
    details = await one.service.adapter_admin.describe(LOCAL, ZH)
    assert [each.version for each in details.versions] == [2]


async def test_aliases_are_those_of_the_declaration(replica, put):
    put(aliases=["cn", "de"])
    put("de", uri="/de", aliases=["cn"])
    one, other = await replica(), await replica()
    assert await one.use("cn") == "digest of /de"  # `de` sorts first; its name is no alias
    assert await one.use("de") == "digest of /de"
    await one.service.adapter_admin.alias(LOCAL, ZH, "chinese")
    assert await other.use("chinese") == "digest of /zh"
    await other.unload("chinese")
    await one.look()
    with pytest.raises(AdapterNotFoundError):
        await one.use("chinese")
    assert await one.use("zh") == "digest of /zh"
    with refused(AdapterExistsError, "'cn'", "'de'", param="alias"):
        await one.service.adapter_admin.alias(LOCAL, ZH, "cn")
    with refused(AdapterExistsError, "'cn'", "'de'", "alias", param="name"):
        await one.load(name="cn", path="/zh2")


async def test_tenants_have_names_of_their_own(replica, put):
    put()
    one, other = await replica(), await replica()
    await one.load(path="/zh2", principal=ACME)
    await other.look()
    assert await other.use(principal=ACME) == "digest of /zh2"
    assert await other.use() == "digest of /zh"
    assert await other.use(principal=Principal("globex")) == "digest of /zh"
    await other.unload(principal=ACME)
    await one.look()
    assert one.bound("acme") == {}
    assert await one.use(principal=ACME) == "digest of /zh"
    with pytest.raises(AdapterNotFoundError):
        await one.unload("nothing", principal=ACME)


async def test_an_own_adapter_that_cannot_be_staged_is_not_replaced_by_the_servers(replica, put):
    put()
    one = await replica()
    await one.use()
    put("own", tenant="acme", uri="/nothing")
    with pytest.raises(InvalidAdapterError, match=naming("/nothing")):
        await one.use("own", principal=ACME)


async def test_rights_hold_for_declared_names(replica, put):
    put()
    one = await replica()
    blind = Principal("acme", Rights(operator=False, use=Names(("pets",)), list=Names(())))
    with pytest.raises(AdapterNotFoundError):
        await one.use(principal=blind)
    assert one.states(blind) == {}
    narrow = Principal("acme", Rights(operator=False, manage=Names(("pets",))))
    with pytest.raises(PermissionDeniedError):
        await one.load(path="/zh2", principal=narrow)


async def test_the_configuration_of_a_server_wins(replica, put, caplog):
    put(uri="/zh2")
    one = await replica(adapters={"zh": AdapterConfig("/zh")})
    assert await one.use() == "digest of /zh"
    assert "the configuration of this server has an adapter of this name" in caplog.text
    with refused(AdapterExistsError, "'zh'", "configured", param="name"):
        await one.load(path="/de", replace=True)


async def test_what_declarations_cannot_express_is_refused(replica):
    one = await replica()
    await one.load(task_id=7)
    await one.load(path="/zh2", replace=True)
    with refused(UnsupportedFeatureError, "'zh'", "replace"):
        await one.service.adapter_admin.rollback(LOCAL, ZH)
    assert one.bound() == {"zh": (2, "digest of /zh2")}


async def test_a_missed_name_is_looked_up_once_a_second(replica, monkeypatch):
    one = await replica()
    reads = []
    documents = one.declared._shared._place.documents
    monkeypatch.setattr(
        one.declared._shared._place, "documents", lambda: reads.append(1) or documents()
    )
    for _ in range(3):
        with pytest.raises(ModelNotFoundError):
            await one.service.find("nothing", LOCAL)
    assert len(reads) == 1
    one.clock.advance_seconds(1)
    with pytest.raises(ModelNotFoundError):
        await one.service.find("nothing", LOCAL)
    assert len(reads) == 2


async def test_one_tenant_cannot_look_up_without_end(replica):
    one = await replica()
    for number in range(MAX_PER_SECOND):
        with pytest.raises(ModelNotFoundError):
            await one.service.find(f"nothing {number}", ACME)
    with pytest.raises(RateLimitedError, match=naming("acme", 32)) as caught:
        await one.service.find("nothing else", ACME)
    assert caught.value.retry_after_seconds == 1.0
    with pytest.raises(ModelNotFoundError):
        await one.service.find("nothing else", LOCAL)
    one.clock.advance_seconds(1)
    with pytest.raises(ModelNotFoundError):
        await one.service.find("nothing else", ACME)


async def test_requests_that_come_together_share_a_reading(replica, monkeypatch):
    one = await replica()
    reads = []
    documents = one.declared._shared._place.documents
    monkeypatch.setattr(
        one.declared._shared._place, "documents", lambda: reads.append(1) or documents()
    )
    tasks = [asyncio.create_task(one.service.find(f"n{i}", LOCAL)) for i in range(20)]
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(each) for each in results} == {ModelNotFoundError}
    assert len(reads) <= 2


async def test_a_version_that_was_replaced_while_it_was_staged_is_not_bound(replica, staging):
    one, other = await replica(), await replica()
    await one.load()
    await other.look()
    arrived, go_on = asyncio.Event(), asyncio.Event()
    stage = staging.stage

    async def slow(path, **options):
        staged = await stage(path, **options)
        if path == "/zh":
            arrived.set()
            await go_on.wait()
        return staged

    staging.stage = slow
    request = asyncio.create_task(other.use())
    await arrived.wait()
    await one.load(path="/zh2", replace=True)
    await other.declared.refresh()
    go_on.set()
    assert await request == "digest of /zh2"
    assert other.bound() == {"zh": (2, "digest of /zh2")}


async def test_a_load_of_the_same_bytes_declares_nothing(replica, tmp_path):
    one = await replica()
    await one.load(task_id=7)
    report = await one.load(replace=True)
    assert (report.version, report.is_unchanged, report.task_id) == (1, True, 7)
    assert len(list((tmp_path / "truth").iterdir())) == 1
    assert (await one.load(replace=True, task_id=8)).version == 2


async def test_tensors_of_a_request_do_not_replace_a_declared_adapter(replica, staging):
    one = await replica()
    await one.load(task_id=7)
    for path, refusal in (("/zh", None), ("/zh2", "'zh' is declared for several servers")):
        tensor = RequestTensor("FP16", (1, 1), path.encode())
        upload = one.service.adapter_admin.load_tensors(
            LOCAL, model="base", task_id=7, weights=tensor, config=tensor
        )
        if refusal is None:
            assert await upload == ByTaskId(7)
        else:
            with pytest.raises(AdapterExistsError, match=refusal):
                await upload
    assert await one.use(ByTaskId(7)) == "digest of /zh"


async def test_a_source_that_is_read_always_changes_by_its_declaration(replica, staging):
    one = await replica()
    await one.load()
    staging.put("/zh", "other bytes")
    assert await one.use(policy=LoadPolicy.ALWAYS) == "digest of /zh"


async def test_metrics_show_what_is_outdated_and_how_old_the_reading_is(replica, put, staging):
    put()
    put("de", uri="/de")
    one = await replica()
    await one.use()
    put(version=2, uri="/zh2")
    staging.staged["/zh2"] = AdapterLoadError("the source is away")
    await one.look()
    one.clock.advance_seconds(3)
    families = declaration_collector(one.declared.status).collect()
    samples = {(s.name, *s.labels.values()): s.value for f in families for s in f.samples}
    assert samples == {
        ("loraplex_declared_adapters", "all"): 2,
        ("loraplex_declared_adapters", "outdated"): 1,
        ("loraplex_declared_adapters", "failing"): 1,
        ("loraplex_adapter_declarations_age_seconds",): 3.0,
    }


async def test_a_reading_that_is_cancelled_does_not_count(replica, put, monkeypatch):
    one = await replica()
    put()
    begun, go_on = threading.Event(), threading.Event()
    place = one.declared._shared._place
    documents = place.documents

    def slow():
        begun.set()
        go_on.wait(60)
        return documents()

    monkeypatch.setattr(place, "documents", slow)
    first = asyncio.create_task(one.service.find("zh", LOCAL))
    await asyncio.to_thread(begun.wait, 10)
    second = asyncio.create_task(one.service.find("zh", ACME))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    go_on.set()
    assert (await second)[1] == ByName("zh")


async def test_a_place_that_hangs_holds_nothing_else_up(replica, put, monkeypatch):
    put()
    one = await replica()
    await one.use()
    go_on = threading.Event()
    place = one.declared._shared._place
    documents = place.documents
    monkeypatch.setattr(place, "documents", lambda: go_on.wait(60) and documents())
    monkeypatch.setattr(declared_adapters, "MAX_SECONDS", 0.05)
    for name in ("x", "y"):
        with refused(AdapterLoadError, 0.05):
            await one.service.find(name, LOCAL)
    with refused(AdapterLoadError, 0.05):
        await one.load(name="de", path="/de")
    assert await one.use() == "digest of /zh"
    monkeypatch.setattr(declared_adapters, "MAX_SECONDS", 60.0)
    go_on.set()
    assert (await one.load(name="de", path="/de")).version == 1


async def test_an_unload_at_once_ends_what_runs_here(replica):
    one = await replica()
    await one.load()
    unloaded = await one.unload(mode=UnloadMode.IMMEDIATE)
    assert (unloaded.num_ended, unloaded.version) == (0, 2)
