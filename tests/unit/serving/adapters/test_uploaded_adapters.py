"""Adapters that clients sent: tried out, loaded once, and without a source afterwards."""

import pytest

from loraplex.adapters.uploads import UploadLimits, Uploads
from loraplex.core.adapter import AdapterRef, ByName
from loraplex.core.errors import (
    AdapterLoadError,
    AdapterMismatchError,
    PermissionDeniedError,
    UnsupportedFeatureError,
    UploadNotFoundError,
)
from loraplex.core.principal import LOCAL, Names, Principal, Rights
from loraplex.core.stats import AdapterTierStats, EngineStats
from loraplex.serving.adapters.canary import NoEffectError
from loraplex.serving.adapters.upkeep import CatalogUpkeep
from loraplex.serving.request_metrics import RequestMetrics
from loraplex.serving.service import Service
from loraplex.testing.fake_clock import FakeClock
from support.naming import naming, refused

LIMITS = UploadLimits(max_bytes=100, max_tenant_bytes=100, max_uploads=9, max_seconds=60)


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def uploads(tmp_path, clock):
    return Uploads(tmp_path / "uploads", LIMITS, clock)


@pytest.fixture
async def service(make_model, staging, uploads, clock):
    service = Service([make_model("a")], staging, RequestMetrics(["a"]), clock, uploads=uploads)
    await service.start()
    yield service
    await service.close()


@pytest.fixture
async def upload(uploads, staging):
    """The path of an upload that can be staged."""
    card = await uploads.create(LOCAL.tenant)
    with uploads.begin_file(card.id, LOCAL.tenant, "adapter_config.json") as file:
        await file.add(b"{}")
        await file.finish()
    return staging.put(card.path)


def load(service, path, principal=LOCAL, **fields):
    return service.adapter_admin.load(principal, model="a", name="zh", path=path, **fields)


def try_out(service, path, **fields):
    return service.adapter_admin.try_out(LOCAL, model="a", name="zh", path=path, **fields)


async def test_a_load_takes_the_upload_and_a_dry_run_does_not(service, staging, upload, uploads):
    place = uploads.place(upload, LOCAL.tenant)
    for _ in range(2):
        assert (await load(service, upload, dry_run=True)).is_dry_run
    report = await load(service, upload)
    assert report.source == upload
    assert {request["upload"] for request in staging.requests} == {place}
    assert not place.exists()
    with pytest.raises(UploadNotFoundError):
        await load(service, upload, replace=True)


async def test_a_load_that_fails_keeps_the_upload(service, staging, upload, uploads):
    staging.staged[upload] = AdapterMismatchError("of another base")
    with pytest.raises(AdapterMismatchError):
        await load(service, upload)
    assert uploads.place(upload, LOCAL.tenant).exists()


async def test_another_tenant_and_a_name_without_the_right(service, upload):
    with pytest.raises(UploadNotFoundError):
        await load(service, upload, Principal("other"))
    limited = Principal(LOCAL.tenant, Rights(manage=Names(("acme-*",))))
    with pytest.raises(PermissionDeniedError):
        await load(service, upload, limited)


async def test_there_is_no_source_to_read_again(service, upload, staging):
    await load(service, upload)
    model = service.model("a")
    (version,) = model.store.present("a")
    num_requests = len(staging.requests)
    assert await service._loader.reload(model, version) is False
    with pytest.raises(AdapterLoadError, match=naming("weights", "again")):
        await service._loader.repair(model, version)
    assert len(staging.requests) == num_requests


async def test_where_there_are_none(make_model, staging, clock):
    service = Service([make_model("a")], staging, RequestMetrics(["a"]), clock)
    await service.start()
    with refused(UnsupportedFeatureError, "uploads", param="path"):
        await load(service, "upload://x")
    await service.close()


async def test_the_upkeep_removes_old_ones(service, uploads, upload, clock):
    place = uploads.place(upload, LOCAL.tenant)
    upkeep = CatalogUpkeep([], service._loader, uploads=uploads)
    await upkeep.run_once()
    assert place.exists()
    clock.advance_seconds(61)
    await upkeep.run_once()
    assert not place.exists()


class TestDetails:
    async def test_of_a_good_adapter(self, service, upload):
        trial = await try_out(service, upload)
        assert (trial.is_ok, trial.refusal, trial.fits_now) == (True, None, True)
        assert (trial.examination.num_tensors, trial.changes_base) == (2, None)
        assert trial.adapter is not None
        assert trial.adapter.is_dry_run
        assert service.model("a").store.find(AdapterRef("a", LOCAL.tenant, ByName("zh"))) is None

    async def test_of_one_that_is_refused(self, service, staging, upload):
        staging.staged[upload] = AdapterMismatchError("of another base")
        trial = await try_out(service, upload)
        assert (trial.is_ok, trial.adapter, trial.fits_now) == (False, None, None)
        assert trial.refusal is not None
        assert trial.refusal.message == "of another base"

    async def test_of_one_that_changes_nothing(self, service, staging):
        path = staging.put("/silent", changes_nothing=True)
        trial = await try_out(service, path)
        assert (trial.is_ok, trial.changes_base) == (False, False)
        with pytest.raises(NoEffectError):
            await load(service, path, dry_run=True)

    async def test_of_one_whose_pages_are_not_free(self, service, staging, monkeypatch):
        capacity = service.model("a").engine.capacity
        path = staging.put("/large", num_pages=capacity.num_adapter_pages)
        stats = EngineStats(adapters=AdapterTierStats(device_pages_used=1))
        monkeypatch.setattr(service.model("a").engine, "stats", stats)
        trial = await try_out(service, path)
        assert (trial.is_ok, trial.fits_now) == (True, False)
        assert trial.free_pages == capacity.num_adapter_pages - 1

    async def test_errors_that_are_not_about_the_adapter_are_raised(self, service, staging):
        staging.staged["/away"] = AdapterLoadError("the source does not respond")
        with pytest.raises(AdapterLoadError):
            await try_out(service, "/away")
