"""A folder is changed while a model is served from it."""

import asyncio
import json
import logging
import os
import re
import shutil

import pytest

from loraplex.adapters.sources.policy import SourcePolicy
from loraplex.core.adapter import AdapterRef, ByName, ByTaskId
from loraplex.core.clock import SystemClock
from loraplex.core.config import AdapterConfig
from loraplex.core.errors import (
    AdapterLoadError,
    AdapterNotFoundError,
    ConfigError,
    InvalidAdapterError,
    LoraplexError,
)
from loraplex.core.principal import LOCAL
from loraplex.serving.adapter_cards import UnloadMode
from loraplex.serving.adapters import folder_follower
from loraplex.serving.adapters.folder_follower import FolderFollower
from loraplex.serving.adapters.loading import AdapterLoad, CatalogLoader
from loraplex.serving.catalog import ModelCatalog
from support.naming import naming, refused


class Watched:
    """A served model, its folder, and the one who follows it."""

    def __init__(self, folder, staging, make_model) -> None:
        self.folder = folder
        self.staging = staging
        self.catalog = ModelCatalog(())
        self.loading = CatalogLoader(staging, self.catalog, SystemClock())
        self.follower = FolderFollower(self.loading, self.catalog, 0.01, SourcePolicy(roots=()))
        self._make_model = make_model

    async def start(self, *, validates=True, **config) -> None:
        self.model = self.catalog.models["base"] = self._make_model("base", **config)
        await self.model.start()
        await self.follower.load(self.model)
        if validates:
            await self.follower.validate()

    def put(self, name, digest="", where=None):
        """An adapter of that name in the folder; another digest is other bytes."""
        place = (where or self.folder) / name
        place.mkdir(parents=True, exist_ok=True)
        (place / "adapter_config.json").write_text(digest)
        self.staging.put(str(place), digest or f"digest of {name}")
        return place

    def take(self, name):
        shutil.rmtree(self.folder / name)

    async def look(self, times=2):
        for _ in range(times):
            await self.follower.run_once()

    @property
    def served(self):
        return {v.name: v.digest for v in self.model.store.list("default")}

    def find(self, key):
        return self.model.store.find(AdapterRef("base", "default", key))


@pytest.fixture
async def watched(tmp_path, staging, make_model):
    (tmp_path / "adapters").mkdir()
    made = Watched(tmp_path / "adapters", staging, make_model)
    yield made
    await made.follower.close()
    if hasattr(made, "model"):
        await made.model.engine.close()


async def test_added_changed_removed(watched):
    watched.put("zh", "one")
    await watched.start(adapter_dirs=(str(watched.folder),))
    assert watched.served == {"zh": "one"}
    watched.put("7", "seven")
    await watched.look()
    assert watched.served == {"zh": "one", "7": "seven"}
    assert watched.find(ByTaskId(7)).name == "7"
    watched.put("zh", "another")
    await watched.look()
    assert watched.served == {"zh": "another", "7": "seven"}
    assert watched.find(ByName("zh")).number == 2
    watched.take("7")
    await watched.look()
    assert watched.served == {"zh": "another"}
    watched.put("ja.v1.2", "ja")
    await watched.look()
    assert watched.served == {"zh": "another", "ja.v1.2": "ja"}


async def test_folders_are_read_again_only_after_a_change(watched, monkeypatch):
    scans = []
    scan = folder_follower.wanted_adapters
    monkeypatch.setattr(
        folder_follower, "wanted_adapters", lambda *a, **k: scans.append(1) or scan(*a, **k)
    )

    def age():
        """What has just changed may change again unseen: it is not trusted yet."""
        for path in (watched.folder, *watched.folder.rglob("*")):
            os.utime(path, (1, 1))

    async def num_scans(looks):
        scans.clear()
        await watched.look(looks)
        return len(scans)

    for name in ("zh", "ja"):
        watched.put(name, "one")
    age()
    await watched.start(adapter_dirs=(str(watched.folder),))
    assert await num_scans(5) == 1
    watched.put("zh", "two")
    assert await num_scans(3) == 3
    assert watched.served == {"zh": "two", "ja": "one"}
    age()
    assert await num_scans(5) == 1
    watched.take("ja")
    os.utime(watched.folder, (1, 2))
    assert await num_scans(5) == 1
    assert watched.served == {"zh": "two"}
    watched.catalog.models["zh"] = watched.model  # its name now means a base model
    assert await num_scans(5) == 1
    del watched.catalog.models["zh"]
    assert watched.served == {}


async def test_while_it_changes_it_is_left_alone(watched):
    await watched.start(adapter_dirs=(str(watched.folder),))
    for size in range(1, 4):
        watched.put("zh", "z" * size)
        await watched.look(1)
        assert watched.served == {}
    await watched.look(1)
    assert watched.served == {"zh": "zzz"}
    watched.take("zh")
    await watched.look(1)
    assert watched.served == {"zh": "zzz"}
    await watched.look(1)
    assert watched.served == {}


async def test_a_short_absence_is_none(watched):
    place = watched.put("zh", "one")
    await watched.start(adapter_dirs=(str(watched.folder),))
    place.rename(watched.folder / ".away")
    await watched.look(1)
    (watched.folder / ".away").rename(place)
    await watched.look()
    assert watched.served == {"zh": "one"}
    assert len(watched.staging.requests) == 1


async def test_what_is_unchanged_is_not_staged_again(watched):
    watched.put("zh")
    await watched.start(adapter_dirs=(str(watched.folder),))
    await watched.look(5)
    assert len(watched.staging.requests) == 1


async def test_a_change_between_the_look_and_the_load(watched, staging):
    """The look comes first: at worst an adapter is staged twice."""
    watched.put("zh", "one")
    stage = staging.stage

    async def change_meanwhile(path, **options):
        staged = await stage(path, **options)
        watched.put("zh", "another")
        staging.stage = stage
        return staged

    staging.stage = change_meanwhile
    await watched.start(adapter_dirs=(str(watched.folder),))
    assert watched.served == {"zh": "one"}
    await watched.look()
    assert watched.served == {"zh": "another"}


async def test_it_takes_away_only_what_it_brought(watched, caplog):
    caplog.set_level(logging.INFO)
    watched.put("zh", "one")
    watched.put("ja", "two")
    await watched.start(adapter_dirs=(str(watched.folder),))
    path = watched.staging.put("/elsewhere", "three")
    await watched.loading.load(
        watched.model, LOCAL, AdapterLoad(name="zh", path=path, replace=True)
    )
    await watched.loading.load(watched.model, LOCAL, AdapterLoad(name="mine", path=path))
    watched.take("zh")
    watched.take("ja")
    await watched.look()
    assert watched.served == {"zh": "three", "mine": "three"}
    assert "'zh' left its folder; what the API loaded stays" in caplog.text


async def test_what_the_api_loaded_from_the_same_place_stays(watched):
    place = watched.put("zh", "one")
    await watched.start(adapter_dirs=(str(watched.folder),))
    watched.staging.put(str(place), "two")
    await watched.loading.load(
        watched.model, LOCAL, AdapterLoad(name="zh", path=str(place), replace=True)
    )
    watched.take("zh")
    await watched.look()
    assert watched.served == {"zh": "two"}


async def test_an_alias_of_that_name_stays(watched, tmp_path):
    place = str(watched.put("one"))
    listing = tmp_path / "multi_lora.json"
    listing.write_text(json.dumps({"zh": place, "ja": place}))
    await watched.start(multi_lora=str(listing))
    zh, ja = (AdapterRef("base", "default", ByName(name)) for name in ("zh", "ja"))
    watched.model.store.remove(zh)
    watched.model.store.alias(ja, "zh")
    listing.write_text(json.dumps({"ja": place}))
    await watched.look()
    assert watched.find(ByName("zh")).name == "ja"


async def test_what_was_unloaded_comes_back_when_it_changes(watched):
    watched.put("zh", "one")
    await watched.start(adapter_dirs=(str(watched.folder),))
    watched.model.store.remove(AdapterRef("base", "default", ByName("zh")))
    await watched.look(3)
    assert watched.served == {}
    watched.put("zh", "another")
    await watched.look()
    assert watched.served == {"zh": "another"}


async def test_a_broken_one_is_reported_once_and_the_old_goes_on(watched, caplog):
    place = watched.put("zh", "one")
    await watched.start(adapter_dirs=(str(watched.folder),))
    watched.put("zh", "torn!")
    watched.staging.staged[str(place)] = InvalidAdapterError("torn")
    await watched.look(5)
    assert watched.served == {"zh": "one"}
    assert [r.message for r in caplog.records] == ["left out adapter 'zh': torn"]
    watched.put("zh", "mended")
    await watched.look()
    assert watched.served == {"zh": "mended"}


async def test_what_may_pass_is_tried_again(watched):
    await watched.start(adapter_dirs=(str(watched.folder),))
    place = watched.put("zh", "one")
    watched.staging.staged[str(place)] = AdapterLoadError("the worker died")
    await watched.look()
    assert watched.served == {}
    watched.staging.put(str(place), "one")
    await watched.look(1)
    assert watched.served == {"zh": "one"}


async def test_it_is_tried_less_and_less_often_until_it_changes(watched):
    await watched.start(adapter_dirs=(str(watched.folder),))
    place = watched.put("zh", "one")
    watched.staging.staged[str(place)] = AdapterLoadError("the worker died")
    await watched.look()
    watched.staging.requests.clear()
    await watched.look(16)
    assert len(watched.staging.requests) == 4  # 1, 3, 7 and 15 looks after the first try
    watched.put("zh", "two")
    await watched.look(2)
    assert watched.served == {"zh": "two"}


async def test_a_folder_that_is_away_takes_nothing_with_it(watched, caplog):
    watched.put("zh", "one")
    await watched.start(adapter_dirs=(str(watched.folder),))
    away = watched.folder.rename(watched.folder.with_name("away"))
    await watched.look(3)
    assert watched.served == {"zh": "one"}
    assert caplog.text.count("are not followed for now") == 1
    away.rename(watched.folder)
    watched.put("ja", "two")
    await watched.look()
    assert watched.served == {"zh": "one", "ja": "two"}


async def test_what_is_named_one_by_one_is_not_taken_over(watched):
    path = watched.staging.put("/zh", "named")
    await watched.start(adapters={"zh": AdapterConfig(path)}, adapter_dirs=(str(watched.folder),))
    watched.put("zh", "found")
    watched.put("base", "found")
    await watched.look()
    assert watched.served == {"zh": "named"}
    watched.take("zh")
    await watched.look()
    assert watched.served == {"zh": "named"}


async def test_a_root_with_folders_in_it(watched):
    watched.put("team/v1.2", "one")
    await watched.start(lora_root=str(watched.folder))
    file = watched.folder / "team" / "v2.0.safetensors"
    file.write_text("x")
    watched.staging.put(str(file), "two")
    await watched.look()
    assert watched.served == {"team/v1.2": "one", "team/v2.0": "two"}


async def test_a_list(watched, tmp_path):
    listing = tmp_path / "multi_lora.json"
    zh = watched.put("zh", "one")
    ja = watched.put("ja", "two")
    listing.write_text(json.dumps({"alpaca": str(zh)}))
    await watched.start(multi_lora=str(listing))
    assert watched.served == {"alpaca": "one"}
    assert watched.find(ByName("alpaca")).task_id is None
    listing.write_text(json.dumps({"alpaca": str(ja), "v1.2": str(zh)}))
    await watched.look()
    assert watched.served == {"alpaca": "two", "v1.2": "one"}
    listing.write_text("{")
    await watched.look()
    assert watched.served == {"alpaca": "two", "v1.2": "one"}
    listing.write_text("{}")
    await watched.look()
    assert watched.served == {}


async def test_a_list_that_cannot_be_kept_stops_the_start(watched, tmp_path):
    listing = tmp_path / "multi_lora.json"
    with refused(ConfigError, "multi_lora", listing):
        await watched.start(multi_lora=str(listing))
    await watched.model.engine.close()
    listing.write_text(json.dumps({"zh": "/nowhere"}))
    with pytest.raises(ConfigError, match=naming("zh", "/nowhere")):
        await watched.start(multi_lora=str(listing))


async def test_it_runs_by_itself(watched):
    await watched.start(adapter_dirs=(str(watched.folder),))
    watched.follower.start()
    watched.put("zh", "one")
    async with asyncio.timeout(60):
        while watched.served != {"zh": "one"}:
            await asyncio.sleep(0.01)
    await watched.follower.close()
    watched.put("ja", "two")
    await asyncio.sleep(0.1)
    assert watched.served == {"zh": "one"}


async def test_an_error_of_ours_does_not_stop_it(watched, caplog, monkeypatch):
    await watched.start(adapter_dirs=(str(watched.folder),))
    run_once, num_failures = watched.follower.run_once, 0

    async def fail_once():
        nonlocal num_failures
        num_failures += 1
        if num_failures == 1:
            raise RuntimeError("ours")
        await run_once()

    monkeypatch.setattr(watched.follower, "run_once", fail_once)
    watched.follower.start()
    watched.put("zh", "one")
    async with asyncio.timeout(60):
        while watched.served != {"zh": "one"}:
            await asyncio.sleep(0.01)
    assert "it is tried again" in caplog.text


async def test_nothing_to_follow(watched):
    await watched.start()
    watched.follower.start()
    assert watched.follower._task is None


async def test_a_new_adapter_of_the_root_is_taken_when_it_is_named(watched):
    await watched.start(lora_root=str(watched.folder))
    watched.put("team/v1.2", "one")
    await asyncio.gather(*(watched.follower.take_named(watched.model, "team/v1.2") for _ in "ab"))
    assert watched.served == {"team/v1.2": "one"}
    assert len(watched.staging.requests) == 1
    await watched.look(3)
    assert len(watched.staging.requests) == 1
    watched.put("team/v1.2", "another")
    await watched.look()
    assert watched.served == {"team/v1.2": "another"}
    watched.take("team")
    await watched.look()
    assert watched.served == {}


async def test_what_is_not_below_the_root_is_not_taken(watched):
    await watched.start(lora_root=str(watched.folder))
    watched.put("out", where=watched.folder.parent)
    for name in ("gone", "../out", str(watched.folder.parent / "out")):
        await watched.follower.take_named(watched.model, name)
    assert watched.served == {}
    assert watched.staging.requests == []


async def test_without_a_root_nothing_is_looked_for(watched):
    await watched.start(adapter_dirs=(str(watched.folder),))
    watched.put("zh")
    await watched.follower.take_named(watched.model, "zh")
    assert watched.served == {}


async def test_a_broken_one_is_read_once_until_it_changes(watched):
    await watched.start(lora_root=str(watched.folder))
    place = watched.put("zh", "one")
    watched.staging.staged[str(place)] = InvalidAdapterError("broken")
    for _ in range(3):
        with pytest.raises(InvalidAdapterError, match="broken"):
            await watched.follower.take_named(watched.model, "zh")
    assert len(watched.staging.requests) == 1
    watched.put("zh", "another")
    await watched.follower.take_named(watched.model, "zh")
    assert watched.served == {"zh": "another"}


async def test_what_may_work_later_is_tried_with_every_request(watched):
    await watched.start(lora_root=str(watched.folder))
    place = watched.put("zh", "one")
    watched.staging.staged[str(place)] = AdapterLoadError("busy")
    with pytest.raises(AdapterLoadError):
        await watched.follower.take_named(watched.model, "zh")
    watched.staging.put(str(place), "one")
    await watched.follower.take_named(watched.model, "zh")
    assert watched.served == {"zh": "one"}


async def test_no_adapter_is_called_as_a_base(watched):
    await watched.start(lora_root=str(watched.folder))
    watched.put("base")
    with pytest.raises(LoraplexError, match="base"):
        await watched.follower.take_named(watched.model, "base")


def optional(place):
    return {"zh": AdapterConfig(str(place), optional=True)}


async def request_change(watched, name="zh"):
    await watched.follower.take_named(watched.model, name)


async def test_an_optional_one_that_loads_is_there(watched):
    await watched.start(adapters=optional(watched.put("zh", "one")))
    await request_change(watched)
    assert watched.served == {"zh": "one"}
    assert len(watched.staging.requests) == 1


@pytest.mark.parametrize("by_request", [True, False])
async def test_an_optional_one_is_reported_until_it_is_mended(watched, by_request):
    place = watched.put("zh", "one")
    watched.staging.staged[str(place)] = InvalidAdapterError("torn")
    await watched.start(adapters=optional(place))
    assert watched.served == {}
    for _ in range(2):
        with pytest.raises(AdapterNotFoundError) as raised:
            await request_change(watched)
        assert re.search(naming("adapter", "zh", "torn"), raised.value.message)
        assert (raised.value.param, raised.value.reason) == ("adapter", "torn")
        await watched.look()
    assert len(watched.staging.requests) == 1
    watched.put("zh", "mended")
    await (request_change(watched) if by_request else watched.look())
    assert watched.served == {"zh": "mended"}
    await request_change(watched)


async def test_an_optional_one_that_breaks_goes_on_as_it_was(watched):
    place = watched.put("zh", "one")
    await watched.start(adapters=optional(place))
    watched.put("zh", "changed")
    watched.staging.staged[str(place)] = InvalidAdapterError("torn")
    await watched.look()
    assert watched.served == {"zh": "one"}
    watched.put("zh", "mended again")
    await watched.look()
    assert watched.served == {"zh": "mended again"}


async def test_an_optional_one_whose_folder_comes_later(watched):
    watched.staging.staged[str(watched.folder / "zh")] = InvalidAdapterError("there is none")
    await watched.start(adapters=optional(watched.folder / "zh"))
    with refused(AdapterNotFoundError, "'zh'", param="adapter"):
        await request_change(watched)
    watched.put("zh", "one")
    await watched.look()
    assert watched.served == {"zh": "one"}
    watched.take("zh")
    watched.staging.staged[str(watched.folder / "zh")] = InvalidAdapterError("there is none")
    await watched.look()
    assert watched.served == {"zh": "one"}


async def test_an_optional_one_that_may_work_later_is_tried_again(watched):
    place = watched.put("zh", "one")
    watched.staging.staged[str(place)] = AdapterLoadError("busy")
    await watched.start(adapters=optional(place))
    watched.staging.put(str(place), "one")
    await watched.look(1)
    assert watched.served == {"zh": "one"}


async def test_what_was_unloaded_stays_so(watched):
    """A request that names it does not bring it back."""
    place = watched.put("zh", "one")
    adapters = optional(place) | {"ja": AdapterConfig(str(watched.put("ja", "two")))}
    await watched.start(adapters=adapters)
    for name in ("zh", "ja"):
        ref = AdapterRef("base", "default", ByName(name))
        await watched.catalog.remove(watched.model, ref, UnloadMode.DRAIN)
        await request_change(watched, name)
    assert watched.served == {}


async def test_changes_are_seen_while_thousands_are_validated(watched, monkeypatch):
    monkeypatch.setattr(folder_follower, "_MAX_AT_ONCE", 2)
    for i in range(6):
        watched.put(f"a{i}")
    await watched.start(adapter_dirs=(str(watched.folder),))
    assert sorted(watched.served) == ["a0", "a1"]
    watched.take("a5")
    await watched.look(1)
    assert sorted(watched.served) == ["a0", "a1", "a2", "a3"]
    await watched.look(1)
    assert sorted(watched.served) == ["a0", "a1", "a2", "a3", "a4"]
    assert list(watched.model.discovered) == []


async def test_one_that_disappears_before_it_was_validated(watched):
    watched.put("zh", "one")
    await watched.start(adapter_dirs=(str(watched.folder),))
    await watched.model.engine.close()
    await watched.start(validates=False, adapter_dirs=(str(watched.folder),))
    assert [adapter.name for adapter in watched.model.discovered] == ["zh"]
    watched.take("zh")
    watched.follower._followed[-1].due.clear()
    await watched.look()
    assert watched.served == {}
    assert list(watched.model.discovered) == []


async def test_links_that_lead_out_are_reported_once_each(watched, tmp_path, caplog):
    watched.put("zh", "one")
    (watched.folder / "ja").symlink_to(watched.put("ja", where=tmp_path / "store"))
    await watched.start(lora_root=str(watched.folder))
    assert watched.served == {"zh": "one"}
    assert [one.is_link for one in watched.model.left_out] == [True]
    (watched.folder / "fr").symlink_to(tmp_path / "gone")
    await watched.look()
    assert len(watched.model.left_out) == 2
    assert [r.message.split(",")[0] for r in caplog.records] == [
        f"left out {tmp_path / 'store' / 'ja'}",
        f"left out symbolic link {watched.folder / 'fr'}: it leads nowhere",
    ]
    (watched.folder / "ja").unlink()
    (watched.folder / "fr").unlink()
    await watched.look()
    assert watched.model.left_out == []
