"""Uploads: limits, tenants, and what is left when they end."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from loraplex.adapters.uploads import UploadLimits, Uploads
from loraplex.core.errors import (
    InvalidParameterError,
    PayloadTooLargeError,
    RateLimitedError,
    StorageFullError,
    UploadNotFoundError,
)
from loraplex.testing.fake_clock import FakeClock
from support.naming import naming

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
LIMITS = UploadLimits(max_bytes=100, max_tenant_bytes=150, max_uploads=2, max_seconds=60)


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def make(tmp_path, clock):
    """A function () -> Uploads in one state directory."""
    return lambda: Uploads(tmp_path / "uploads", LIMITS, clock)


@pytest.fixture
def uploads(make):
    return make()


async def put(uploads, upload_id, name, data, tenant="a"):
    with uploads.begin_file(upload_id, tenant, name) as file:
        await file.add(data)
        return await file.finish()


def files(tmp_path: Path) -> list[str]:
    return sorted(
        path.name for path in tmp_path.rglob("*") if path.is_file() and path.name != ".owner"
    )


async def test_files_and_their_place(uploads, clock):
    card = await uploads.create("a")
    assert (card.files, card.num_bytes, card.max_bytes) == ((), 0, 100)
    await put(uploads, card.id, WEIGHTS, b"12345")
    card = await put(uploads, card.id, CONFIG, b"{}")
    assert [(file.name, file.num_bytes) for file in card.files] == [(CONFIG, 2), (WEIGHTS, 5)]
    assert card.path == f"upload://{card.id}"
    assert (uploads.place(card.path, "a") / WEIGHTS).read_bytes() == b"12345"
    assert uploads.place(card.path, "a").stat().st_mode & 0o777 == 0o700
    assert uploads.place(card.path, "a").parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", ["adapter.safetensors", "adapter.gguf"])
async def test_a_single_file_is_its_own_place(uploads, name):
    card = await uploads.create("a")
    await put(uploads, card.id, name, b"1")
    assert uploads.place(card.path, "a").name == name


async def test_another_tenant_and_a_wrong_id_find_nothing(uploads):
    card = await uploads.create("a")
    await put(uploads, card.id, CONFIG, b"{}")
    for upload_id, tenant in ((card.id, "b"), ("0" * 32, "a"), ("../" + card.id, "a"), ("", "a")):
        with pytest.raises(UploadNotFoundError, match=naming(60)):
            uploads.describe(upload_id, tenant)
        with pytest.raises(UploadNotFoundError):
            uploads.begin_file(upload_id, tenant, CONFIG)
        with pytest.raises(UploadNotFoundError):
            uploads.place(f"upload://{upload_id}", tenant)
        with pytest.raises(UploadNotFoundError):
            await uploads.delete(upload_id, tenant)
    assert uploads.describe(card.id, "a").num_bytes == 2


@pytest.mark.parametrize("name", ["../x", "README.md", "..", "", "adapter_config.json/", "/etc/x"])
async def test_a_name_that_no_format_has(uploads, tmp_path, name):
    card = await uploads.create("a")
    with pytest.raises(InvalidParameterError, match=r"supported: adapter_config\.json, "):
        uploads.begin_file(card.id, "a", name)
    assert files(tmp_path) == []


async def test_a_client_that_leaves_half_way_leaves_nothing(uploads, tmp_path):
    card = await uploads.create("a")
    await put(uploads, card.id, CONFIG, b"old")
    with uploads.begin_file(card.id, "a", CONFIG) as file:
        await file.add(b"half")
        assert len(files(tmp_path)) == 2, "the old file and a part"
    assert files(tmp_path) == [CONFIG]
    assert uploads.place(card.path, "a").joinpath(CONFIG).read_bytes() == b"old"
    assert uploads.describe(card.id, "a").num_bytes == 3


async def test_of_two_transfers_of_one_file_the_last_to_end_counts(uploads):
    card = await uploads.create("a")
    with (
        uploads.begin_file(card.id, "a", CONFIG) as first,
        uploads.begin_file(card.id, "a", CONFIG) as second,
    ):
        await first.add(b"first")
        await second.add(b"second!")
        await second.finish()
        await first.finish()
    assert uploads.place(card.path, "a").joinpath(CONFIG).read_bytes() == b"first"
    assert uploads.describe(card.id, "a").num_bytes == 5


async def test_limits_of_an_upload_and_of_a_tenant(uploads):
    card, other = await uploads.create("a"), await uploads.create("a")
    with pytest.raises(PayloadTooLargeError, match=r"101 B; .* 100 B \(max_adapter_bytes\)"):
        uploads.begin_file(card.id, "a", CONFIG, 101)
    await put(uploads, card.id, WEIGHTS, b"x" * 90)
    with pytest.raises(PayloadTooLargeError, match="max_adapter_bytes"):
        await put(uploads, card.id, CONFIG, b"x" * 11)
    await put(uploads, other.id, WEIGHTS, b"x" * 60)
    with pytest.raises(PayloadTooLargeError, match=r"151 B; .* 150 B together \(upload_bytes\)"):
        await put(uploads, other.id, CONFIG, b"x")
    with pytest.raises(RateLimitedError, match=r"2 uploads, .*max_uploads") as caught:
        await uploads.create("a")
    assert caught.value.retry_after_seconds == 60
    theirs = await uploads.create("b")
    await put(uploads, theirs.id, WEIGHTS, b"x" * 100, "b")
    await uploads.delete(card.id, "a")
    await put(uploads, (await uploads.create("a")).id, WEIGHTS, b"x" * 90)


async def test_a_file_that_arrives_counts(uploads):
    card = await uploads.create("a")
    with uploads.begin_file(card.id, "a", WEIGHTS) as file:
        await file.add(b"x" * 60)
        with pytest.raises(PayloadTooLargeError):
            uploads.begin_file(card.id, "a", CONFIG, 41)


async def test_an_upload_that_does_not_change_goes(uploads, clock, tmp_path):
    card = await uploads.create("a")
    clock.advance_seconds(59)
    await put(uploads, card.id, CONFIG, b"{}")
    clock.advance_seconds(59)
    uploads.place(card.path, "a")
    clock.advance_seconds(59)
    assert uploads.describe(card.id, "a").num_bytes == 2
    clock.advance_seconds(2)
    with pytest.raises(UploadNotFoundError, match=naming(60)):
        uploads.describe(card.id, "a")
    await uploads.remove_old()
    assert files(tmp_path) == []


async def test_an_upload_that_is_arriving_stays(uploads, clock):
    card = await uploads.create("a")
    with uploads.begin_file(card.id, "a", CONFIG) as file:
        clock.advance_seconds(61)
        await uploads.remove_old()
        await file.add(b"{}")
        assert (await file.finish()).num_bytes == 2


async def test_a_file_of_a_deleted_upload_ends(uploads, tmp_path):
    card = await uploads.create("a")
    with uploads.begin_file(card.id, "a", CONFIG) as file:
        await file.add(b"{")
        await uploads.delete(card.id, "a")
        with pytest.raises(UploadNotFoundError):
            await file.add(b"}")
        with pytest.raises(UploadNotFoundError):
            await file.finish()
    assert files(tmp_path) == []


async def test_what_was_loaded_goes(uploads, tmp_path):
    card = await uploads.create("a")
    await put(uploads, card.id, CONFIG, b"{}")
    await uploads.discard(card.path)
    await uploads.discard(card.path)
    assert files(tmp_path) == []


async def test_the_next_server_removes_them(make, tmp_path):
    first = make()
    card = await first.create("a")
    await put(first, card.id, CONFIG, b"{}")
    os.close(first._folder._lock)  # as a kill does
    second = make()
    assert files(tmp_path) == []
    card = await second.create("a")
    await put(second, card.id, CONFIG, b"{}")
    make()
    assert files(tmp_path) == [CONFIG]
    second.close()
    assert files(tmp_path) == []


async def test_a_full_disk(uploads, monkeypatch, tmp_path):
    card = await uploads.create("a")
    usage = SimpleNamespace(free=(256 << 20) + 10)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(StorageFullError, match="disk"):
        uploads.begin_file(card.id, "a", CONFIG, 11)
    with uploads.begin_file(card.id, "a", CONFIG, 10) as file:
        await file.add(b"x" * 10)
        usage.free = 256 << 20
        with pytest.raises(StorageFullError):
            await file.add(b"x")
    assert files(tmp_path) == []


async def test_a_disk_that_is_full_in_the_middle(uploads, tmp_path):
    card = await uploads.create("a")
    with (
        Path("/dev/full").open("wb", buffering=0) as full,
        uploads.begin_file(card.id, "a", CONFIG) as file,
    ):
        file._file.close()
        file._file = full
        await file.add(b"x")
        with pytest.raises(StorageFullError):
            await file.finish()
    assert files(tmp_path) == []
