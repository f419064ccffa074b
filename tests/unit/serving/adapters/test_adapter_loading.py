"""Adapters are loaded from a path and registered, through the API and at the start."""

import asyncio
import logging
import re

import pytest

from loraplex.adapters.sources.policy import SourcePolicy
from loraplex.core.adapter import AdapterRef, ByName, ByTaskId
from loraplex.core.clock import SystemClock
from loraplex.core.config import AdapterConfig, ModelConfig
from loraplex.core.errors import (
    AdapterExistsError,
    AdapterLoadError,
    AdapterMismatchError,
    AdapterNotFoundError,
    AdapterTooLargeError,
    ConfigError,
    InvalidAdapterError,
    InvalidRequestError,
)
from loraplex.core.principal import LOCAL, Principal
from loraplex.core.rank_limits import RankLimits
from loraplex.serving.adapters.configured import log_adapter_warning
from loraplex.serving.adapters.folder_follower import FolderFollower
from loraplex.serving.adapters.folders import FolderScan, find_adapters
from loraplex.serving.adapters.loading import AdapterLoad, CatalogLoader
from loraplex.serving.catalog import ModelCatalog
from support.naming import naming, refused

ROUNDING = "tensors in F32 are rounded to the bfloat16 that this server computes in"


@pytest.fixture
def catalog():
    return ModelCatalog(())


@pytest.fixture
def loading(staging, catalog):
    return CatalogLoader(staging, catalog, SystemClock())


@pytest.fixture
def configure(loading, catalog):
    """A function (model) that loads and validates what the model's configuration names."""

    async def load(model):
        follower = FolderFollower(loading, catalog, 0, SourcePolicy())
        await follower.load(model)
        await follower.validate()

    return load


@pytest.fixture
async def start(make_model):
    """A function (**config) -> a started model."""
    models = []

    async def start_model(**config):
        models.append(make_model("base", **config))
        await models[-1].start()
        return models[-1]

    yield start_model
    for model in models:
        await model.engine.close()


@pytest.fixture
def adapter_dir(tmp_path, staging):
    """A function (*names) -> a folder with these adapters, which staging knows."""

    def make(*names: str):
        for name in names:
            folder = tmp_path / "adapters" / name
            folder.mkdir(parents=True)
            (folder / "adapter_config.json").write_text("{}")
            staging.put(str(folder))
        return tmp_path / "adapters"

    return make


def names_of(model) -> list[str]:
    return [version.name for version in model.store.list("default")]


async def test_a_load_reports_what_it_loaded(loading, staging, start):
    model = await start(max_lora_rank=32)
    staging.put("/zh", "d1", num_pages=3, num_bytes=500, warnings=("hm",))
    card = await loading.load(
        model, Principal("acme"), AdapterLoad(name="zh", path="/zh", task_id=4)
    )
    assert (card.name, card.model, card.task_id, card.digest) == ("zh", "base", 4, "d1")
    assert (card.rank, card.num_bytes, card.source, card.warnings) == (1, 500, "/zh", ("hm",))
    assert staging.requests == [
        {
            "path": "/zh",
            "shapes": model.shapes,
            "max_ranks": RankLimits(32),
            "base_model": "base",
            "base_path": model.card.path,
            "base_check": "auto",
            "pool_dtype": model.card.dtype,
            "reads_again": False,
            "is_trusted": False,
            "tenant": "acme",
            "upload": None,
        }
    ]
    version = model.store.resolve(AdapterRef("base", "acme", ByTaskId(4)))
    assert version.digest == "d1"
    assert names_of(model) == []  # it is acme's, not the default tenant's


async def test_a_reload_reads_what_looks_unchanged(loading, staging, start):
    model = await start(adapter_base_check="error")
    await loading.load(model, LOCAL, AdapterLoad(name="zh", path=staging.put("/zh")))
    version = model.store.resolve(AdapterRef("base", "default", ByName("zh")))
    assert not await loading.reload(model, version)
    assert [each["reads_again"] for each in staging.requests] == [False, True]
    assert {each["base_check"] for each in staging.requests} == {"error"}


async def test_a_loaded_adapter_is_brought_to_the_device(loading, staging, start):
    model = await start()
    await loading.load(model, LOCAL, AdapterLoad(name="zh", path=staging.put("/zh")))
    async with asyncio.timeout(60):
        while not model.engine.stats.adapters.num_on_device:
            await asyncio.sleep(0.001)


async def test_the_name_is_checked_before_anything_is_staged(loading, staging, start):
    model = await start()
    await loading.load(model, LOCAL, AdapterLoad(name="zh", path=staging.put("/zh"), task_id=1))
    staging.requests.clear()
    for name, task_id in (("zh", None), ("ja", 1)):
        with pytest.raises(AdapterExistsError):
            await loading.load(model, LOCAL, AdapterLoad(name=name, path="/zh", task_id=task_id))
    assert staging.requests == []


async def test_a_replacement_is_a_new_version(loading, staging, start):
    model = await start()
    await loading.load(model, LOCAL, AdapterLoad(name="zh", path=staging.put("/1"), task_id=1))
    card = await loading.load(
        model, LOCAL, AdapterLoad(name="zh", path=staging.put("/2"), replace=True)
    )
    assert (card.digest, card.task_id) == ("digest of /2", 1)


@pytest.mark.parametrize(
    "error",
    [InvalidAdapterError("torn"), AdapterMismatchError("other base"), AdapterLoadError("died")],
)
async def test_a_bad_adapter_changes_nothing(loading, staging, start, error):
    model = await start()
    await loading.load(model, LOCAL, AdapterLoad(name="zh", path=staging.put("/good")))
    staging.staged["/bad"] = error
    with pytest.raises(type(error), match=error.message):
        await loading.load(model, LOCAL, AdapterLoad(name="zh", path="/bad", replace=True))
    assert model.store.resolve(AdapterRef("base", "default", ByName("zh"))).path == "/good"


async def test_an_adapter_that_changes_nothing_is_refused(loading, staging, start):
    model = await start()
    staging.put("/zero", changes_nothing=True)
    with pytest.raises(InvalidAdapterError, match=naming("lora_B", "/zero")) as caught:
        await loading.load(model, LOCAL, AdapterLoad(name="zero", path="/zero"))
    assert caught.value.param == "path"
    assert names_of(model) == []


@pytest.mark.parametrize(
    ("size", "named"),
    [
        ({"num_pages": 17}, (17, 256, 16, "lora_device_bytes", "4352B")),
        ({"num_bytes": 1001}, (1001, 1000, "lora_host_bytes", "1001B")),
    ],
)
async def test_what_can_never_fit_is_refused_at_once(loading, staging, start, size, named):
    model = await start(lora_host_bytes=1000)
    staging.put("/huge", **size)
    with pytest.raises(AdapterTooLargeError, match=naming(*named)):
        await loading.load(model, LOCAL, AdapterLoad(name="huge", path="/huge"))
    assert names_of(model) == []


async def test_what_just_fits_is_taken(loading, staging, start):
    model = await start(lora_host_bytes=1000)
    staging.put("/large", num_pages=16, num_bytes=1000)
    await loading.load(model, LOCAL, AdapterLoad(name="large", path="/large"))
    assert names_of(model) == ["large"]


async def test_a_load_while_the_engine_restarts_waits_for_its_first_request(
    loading, staging, start
):
    model = await start()
    await model.engine.close()
    await loading.load(model, LOCAL, AdapterLoad(name="zh", path=staging.put("/zh")))
    assert names_of(model) == ["zh"]


class TestConfigured:
    async def test_named_and_found(self, configure, staging, start, adapter_dir, caplog):
        caplog.set_level(logging.INFO)
        adapters = {
            "zh": AdapterConfig(staging.put("/zh", warnings=("hm",)), task_id=5),
            "7": AdapterConfig(staging.put("/seven")),
            "8": AdapterConfig(staging.put("/eight"), task_id=80),
        }
        folder = adapter_dir("ja", "12")
        (folder / "not-one").mkdir()
        (folder / "file").write_text("")
        model = await start(adapters=adapters, adapter_dirs=(str(folder),))
        await configure(model)
        tasks = {version.name: version.task_id for version in model.store.list("default")}
        assert tasks == {"zh": 5, "7": 7, "8": 80, "ja": None, "12": 12}
        assert "'zh' is digest of /z" in caplog.text
        assert "'zh': hm" in caplog.text

    async def test_a_broken_one_that_is_named_stops_the_start(self, configure, start):
        model = await start(adapters={"zh": AdapterConfig("/nowhere")})
        with pytest.raises(ConfigError, match=naming("zh", "/nowhere")):
            await configure(model)

    async def test_a_broken_one_that_was_found_is_left_out(
        self, configure, staging, start, adapter_dir, caplog
    ):
        folder = adapter_dir("a", "b", "c")
        staging.staged[str(folder / "b")] = InvalidAdapterError("torn")
        model = await start(adapter_dirs=(str(folder),))
        await configure(model)
        assert names_of(model) == ["a", "c"]
        assert [r.message for r in caplog.records] == ["left out adapter 'b': torn"]

    async def test_too_large_is_reported_in_the_same_two_ways(
        self, configure, staging, start, adapter_dir, caplog
    ):
        staging.put("/huge", num_pages=17)
        model = await start(adapters={"huge": AdapterConfig("/huge")})
        with refused(ConfigError, "'huge'", 17):
            await configure(model)
        folder = adapter_dir("big")
        staging.put(str(folder / "big"), num_pages=17)
        model = await start(adapter_dirs=(str(folder),))
        await configure(model)
        assert "left out adapter 'big'" in caplog.text

    async def test_one_that_changes_nothing_is_loaded_with_a_warning(
        self, configure, staging, start, caplog
    ):
        staging.put("/zero", changes_nothing=True)
        model = await start(adapters={"zero": AdapterConfig("/zero")})
        await configure(model)
        assert names_of(model) == ["zero"]
        assert "'zero' changes nothing" in caplog.text

    async def test_a_bases_name_is_not_for_adapters(
        self, configure, staging, start, adapter_dir, caplog, make_model, catalog
    ):
        catalog.models["other"] = make_model("other")
        model = await start(adapters={"other": AdapterConfig(staging.put("/zh"))})
        with refused(ConfigError, "'other'", "base model"):
            await configure(model)
        model = await start(adapter_dirs=(str(adapter_dir("other", "zh")),))
        await configure(model)
        assert names_of(model) == ["zh"]
        assert "left out adapter 'other'" in caplog.text

    async def test_a_name_that_is_taken(self, configure, staging, start, adapter_dir, caplog):
        model = await start(
            adapters={"zh": AdapterConfig(staging.put("/zh"))},
            adapter_dirs=(str(adapter_dir("zh")),),
        )
        await configure(model)
        assert model.store.resolve(AdapterRef("base", "default", ByName("zh"))).path == "/zh"
        assert "left out adapter 'zh'" in caplog.text

    async def test_a_folder_that_is_none(self, configure, start, tmp_path):
        model = await start(adapter_dirs=(str(tmp_path / "nowhere"),))
        with refused(ConfigError, tmp_path / "nowhere"):
            await configure(model)

    async def test_a_folder_without_adapters_is_worth_a_warning(
        self, configure, start, tmp_path, caplog
    ):
        await configure(await start(lora_root=str(tmp_path)))
        assert f"no adapter is in {tmp_path}" in caplog.text

    async def test_home_folders(self, tmp_path, monkeypatch, adapter_dir):
        adapter_dir("zh")
        monkeypatch.setenv("HOME", str(tmp_path))
        found = find_adapters(type(tmp_path)("~/adapters"), FolderScan())
        assert [(name, path.is_dir()) for name, path in found] == [("zh", True)]

    async def test_a_sub_folder_that_may_not_be_entered_is_left_to_staging(
        self, tmp_path, adapter_dir, monkeypatch
    ):
        folder = adapter_dir("zh")
        is_file = type(tmp_path).is_file

        def refusing(path):
            if path.parent.name == "zh":
                raise PermissionError(13, "Permission denied")
            return is_file(path)

        monkeypatch.setattr(type(tmp_path), "is_file", refusing)
        assert [name for name, _ in find_adapters(folder, FolderScan())] == ["zh"]


def test_bases(make_model):
    catalog = ModelCatalog([make_model("base")])
    catalog.check_is_no_base("zh")
    with refused(InvalidRequestError, "'base'", "base model", param="name"):
        catalog.check_is_no_base("base")


async def test_close_ends_the_worker(loading, staging):
    await loading.close()
    assert staging.is_closed


async def test_nothing_is_registered_for_others(loading, staging, start):
    model = await start()
    await loading.load(model, Principal("acme"), AdapterLoad(name="zh", path=staging.put("/zh")))
    with pytest.raises(AdapterNotFoundError):
        model.store.resolve(AdapterRef("base", "default", ByName("zh")))

    async def test_it_wins_over_what_was_stored(self, loading, configure, staging, start, caplog):
        caplog.set_level(logging.INFO)
        model = await start(adapters={"zh": AdapterConfig(staging.put("/zh"), task_id=5)})
        await loading.load(
            model, LOCAL, AdapterLoad(name="mine", path=staging.put("/mine"), task_id=5)
        )
        await loading.load(model, LOCAL, AdapterLoad(name="zh", path="/mine"))
        model.store.alias(AdapterRef("base", "default", ByName("mine")), "live")
        await configure(model)
        zh = model.store.resolve(AdapterRef("base", "default", ByName("zh")))
        assert (zh.digest, zh.number, zh.task_id, zh.origin) == (
            "digest of /zh",
            2,
            5,
            "configured",
        )
        mine = model.store.resolve(AdapterRef("base", "default", ByName("live")))
        assert (mine.name, mine.task_id) == ("mine", None)
        assert "adapter 'mine' lost its task id 5" in caplog.text

    async def test_what_is_configured_no_longer_is_forgotten(
        self, loading, configure, staging, start, caplog
    ):
        caplog.set_level(logging.INFO)
        model = await start(adapters={"zh": AdapterConfig(staging.put("/zh"))})
        await loading.load(model, LOCAL, AdapterLoad(name="mine", path=staging.put("/mine")))
        await configure(model)
        assert names_of(model) == ["mine", "zh"]
        model.config = ModelConfig(path="/models/base")
        await configure(model)
        assert names_of(model) == ["mine"]
        assert "'zh' is no longer configured" in caplog.text

    async def test_one_task_id_for_two(self, configure, staging, start, adapter_dir, caplog):
        folder = adapter_dir("5")
        zh = AdapterConfig(staging.put("/zh"), task_id=5)
        model = await start(adapters={"zh": zh}, adapter_dirs=(str(folder),))
        await configure(model)
        assert names_of(model) == ["zh"]
        assert "left out adapter '5': LoRA task 5 already is adapter 'zh'" in caplog.text
        model = await start(adapters={"zh": zh, "ja": AdapterConfig("/zh", task_id=5)})
        with refused(ConfigError, "'ja'", 5, "'zh'"):
            await configure(model)


async def test_named_adapters_are_read_several_at_a_time(start, configure, staging):
    names = [f"a{i}" for i in range(30)]
    adapters = {name: AdapterConfig(staging.put(f"/{name}")) for name in names}
    model = await start(adapters=adapters)
    running = most = 0
    stage = staging.stage

    async def count(path, **options):
        nonlocal running, most
        running += 1
        most = max(most, running)
        try:
            return await stage(path, **options)
        finally:
            running -= 1

    staging.stage = count
    await configure(model)
    assert 1 < most <= 16
    assert names_of(model) == sorted(names)


async def test_one_that_cannot_be_loaded_ends_the_others(start, configure, staging):
    adapters = {name: AdapterConfig(staging.put(f"/{name}")) for name in map(str, range(40))}
    adapters["3"] = AdapterConfig("/nowhere")
    model = await start(adapters=adapters)
    with pytest.raises(ConfigError, match=naming(3, "/nowhere")):
        await configure(model)
    assert len(staging.requests) < 40


def test_adapters_share_a_line_about_what_they_have_in_common(caplog):
    caplog.set_level(logging.INFO)
    log_adapter_warning(["a", "b", "c", "d"], ROUNDING)
    log_adapter_warning(["zh"], "another base")
    (usual, unusual) = caplog.records
    assert (usual.levelname, unusual.levelname) == ("INFO", "WARNING")
    assert usual.message == f"adapters 'a', 'b', 'c' and 1 more: {ROUNDING}"
    assert re.search(naming("zh"), unusual.message)
