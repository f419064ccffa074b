"""The cache of packed weights: what it gives is what a fresh reading gives, or it gives nothing."""

import errno
import multiprocessing
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from loraplex.core.errors import ConfigError
from loraplex.core.weight_precision import WeightPrecision
from loraplex.execution.weights import loading as weight_loading
from loraplex.execution.weights import packed_file
from loraplex.execution.weights.file_locks import use
from loraplex.execution.weights.loading import load_weights
from loraplex.execution.weights.packed_cache import PackedCache
from loraplex.execution.weights.packed_file import PackedFile
from loraplex.execution.weights.packing import (
    PackedWeights,
    WeightFormat,
    pack_checkpoint,
)
from loraplex.kernels.dispatch import select_kernels
from loraplex.kernels.ops import Kernels
from loraplex.kernels.reference import ReferenceKernels
from support.examples import examples
from support.naming import naming
from support.tiny_model import TinyCheckpoint

CPU = torch.device("cpu")
FLOAT32 = WeightFormat(dtype=torch.float32)
GIB = 1 << 30


@pytest.fixture(params=["native", "reference"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return select_kernels(CPU) if request.param == "native" else ReferenceKernels(CPU)


@pytest.fixture
def checkpoint(tiny_checkpoint: TinyCheckpoint) -> TinyCheckpoint:
    tiny_checkpoint.save()
    return tiny_checkpoint


@pytest.fixture
def cache(tmp_path: Path) -> PackedCache:
    opened = PackedCache.usable(tmp_path / "cache", GIB)
    assert opened is not None
    return opened


@pytest.fixture
def packings(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders that were read and packed, in order."""
    folders: list[Path] = []

    def note(folder: Path, *arguments: object) -> PackedWeights:
        folders.append(folder)
        return pack_checkpoint(folder, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(weight_loading, "pack_checkpoint", note)
    return folders


def load(
    checkpoint: TinyCheckpoint,
    cache: PackedCache | None,
    kernels: Kernels | None = None,
    form: WeightFormat = FLOAT32,
) -> PackedWeights:
    """Load the weights, and wait until they are stored."""
    kernels = kernels or ReferenceKernels(CPU)
    weights = load_weights(checkpoint.folder, checkpoint.config, kernels, form, cache)
    if weights.storing is not None:
        weights.storing.wait()
    return weights


def assert_same_bits(one: PackedWeights, other: PackedWeights) -> None:
    assert [entry.numbers for entry in one.entries] == [entry.numbers for entry in other.entries]
    pairs = [
        pair
        for mine, theirs in zip(one.entries, other.entries, strict=True)
        for pair in zip(mine.tensors, theirs.tensors, strict=True)
    ]
    for mine, theirs in pairs:
        if mine is None or theirs is None:
            assert mine is theirs
            continue
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        assert torch.equal(bits(mine), bits(theirs))
    assert one.summary == other.summary


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def weight_file(cache: PackedCache) -> Path:
    (path,) = weight_files(cache)
    return path


def weight_files(cache: PackedCache) -> list[Path]:
    return sorted(cache.folder.glob("*.weights"))


def test_the_second_reading_packs_nothing(
    checkpoint: TinyCheckpoint, cache: PackedCache, kernels: Kernels, packings: list[Path]
) -> None:
    fresh = load(checkpoint, None, kernels)
    for _ in range(3):
        assert_same_bits(load(checkpoint, cache, kernels), fresh)
    assert len(packings) == 2


@examples(0.15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    hidden=st.sampled_from([16, 32, 48]),
    inner=st.sampled_from([24, 33, 64]),
    vocab=st.integers(17, 70),
    seed=st.integers(0, 5),
    tied=st.booleans(),
    has_bias=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_what_is_mapped_has_the_bits_of_a_fresh_packing(
    tmp_path_factory: pytest.TempPathFactory,
    hidden: int,
    inner: int,
    vocab: int,
    seed: int,
    tied: bool,
    has_bias: bool,
    dtype: torch.dtype,
) -> None:
    folder = tmp_path_factory.mktemp("model")
    fields = {"hidden_size": hidden, "intermediate_size": inner, "vocab_size": vocab}
    switches = {"tie_word_embeddings": tied, "attention_bias": has_bias}
    checkpoint = TinyCheckpoint(folder, seed=seed, **fields, **switches)
    checkpoint.save()
    kernels, form = select_kernels(CPU), WeightFormat(dtype=dtype)
    cache = PackedCache(folder / "cache", GIB, min_free_bytes=0)
    cache.folder.mkdir()
    fresh = load(checkpoint, None, kernels, form)
    for _ in range(2):
        assert_same_bits(load(checkpoint, cache, kernels, form), fresh)
    shutil.rmtree(folder)


def test_what_is_mapped_is_aligned_for_the_kernels(
    checkpoint: TinyCheckpoint, cache: PackedCache, kernels: Kernels
) -> None:
    weights = load(checkpoint, cache, kernels)
    tensors = [t for entry in weights.entries for t in entry.tensors if t is not None]
    assert {tensor.data_ptr() % 64 for tensor in tensors} == {0}


def test_each_format_has_its_own_file(checkpoint: TinyCheckpoint, cache: PackedCache) -> None:
    forms = [
        FLOAT32,
        WeightFormat(dtype=torch.bfloat16),
        WeightFormat(dtype=torch.float32, precision=WeightPrecision.INT8),
    ]
    for form in [*forms, *forms]:
        expected = load(checkpoint, None, form=form)
        assert_same_bits(load(checkpoint, cache, form=form), expected)
    assert len(weight_files(cache)) == 3


def test_each_backend_has_its_own_file(checkpoint: TinyCheckpoint, cache: PackedCache) -> None:
    load(checkpoint, cache, ReferenceKernels(CPU))
    load(checkpoint, cache, select_kernels(CPU))
    assert len(weight_files(cache)) == len({"torch", select_kernels(CPU).packed_layout})


def test_changed_weights_are_other_weights(
    checkpoint: TinyCheckpoint, cache: PackedCache, packings: list[Path]
) -> None:
    load(checkpoint, cache)
    checkpoint.tensors["model.norm.weight"][3] += 1
    checkpoint.save()
    norm = load(checkpoint, cache).parameters.final_norm.weight
    assert torch.equal(norm, checkpoint.tensors["model.norm.weight"])
    assert len(packings) == 2


def test_a_copy_of_the_model_is_the_same_model(
    checkpoint: TinyCheckpoint, cache: PackedCache, packings: list[Path], tmp_path: Path
) -> None:
    load(checkpoint, cache)
    copy = TinyCheckpoint(tmp_path, seed=0)
    copy.folder = tmp_path / "copy"
    copy.folder.mkdir()
    shutil.copy(checkpoint.folder / "model.safetensors", copy.folder)
    load(copy, cache)
    assert packings == [checkpoint.folder]


def test_another_reading_of_the_same_tensors_is_another_key(
    checkpoint: TinyCheckpoint, cache: PackedCache
) -> None:
    """A tied lm_head is packed from the embedding, another one from its own tensor."""
    load(checkpoint, cache)
    tied = TinyCheckpoint(checkpoint.folder, tie_word_embeddings=True)
    load(tied, cache)
    assert len(weight_files(cache)) == 2


DAMAGES: dict[str, tuple[str, Callable[[bytearray], bytes | bytearray]]] = {
    "empty": ("not a file of packed weights", lambda data: b""),
    "foreign": ("not a file of packed weights", lambda data: b"something else" * 100),
    "cut in the head": ("not a file of packed weights", lambda data: data[:20]),
    "cut in the header": ("header is damaged", lambda data: data[:80]),
    "cut in the payload": ("and should have", lambda data: data[:-64]),
    "longer": ("and should have", lambda data: data + bytes(64)),
    "a huge header": ("claims", lambda data: data[:8] + b"\xff" * 8 + data[16:]),
    "a bit of the header": ("header is damaged", lambda data: flipped(data, 60)),
    "a bit of the header's digest": ("header is damaged", lambda data: flipped(data, 20)),
    "a bit of the payload": ("content is damaged", lambda data: flipped(data, -200)),
}


def flipped(data: bytearray, position: int) -> bytearray:
    data[position] ^= 4
    return data


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_made_again(
    checkpoint: TinyCheckpoint,
    cache: PackedCache,
    packings: list[Path],
    caplog: pytest.LogCaptureFixture,
    damage: str,
) -> None:
    fresh = load(checkpoint, None)
    load(checkpoint, cache)
    path = weight_file(cache)
    reason, change = DAMAGES[damage]
    path.write_bytes(change(bytearray(path.read_bytes())))
    assert_same_bits(load(checkpoint, cache), fresh)
    assert re.search(f"{path} is not used but made again: .*{reason}", caplog.text)
    assert len(packings) == 3
    caplog.clear()
    assert_same_bits(load(checkpoint, cache), fresh)
    assert len(packings) == 3
    assert not [r for r in caplog.records if r.levelname == "WARNING"]


def test_a_file_under_another_name_is_not_believed(
    checkpoint: TinyCheckpoint, cache: PackedCache, packings: list[Path]
) -> None:
    load(checkpoint, cache, form=WeightFormat(dtype=torch.bfloat16))
    bfloat16 = weight_file(cache)
    load(checkpoint, cache)
    (float32,) = set(weight_files(cache)) - {bfloat16}
    shutil.copy(bfloat16, float32)
    assert_same_bits(load(checkpoint, cache), load(checkpoint, None))


def test_a_file_that_was_touched_is_read_in_full_once(
    checkpoint: TinyCheckpoint, cache: PackedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(checkpoint, cache)
    os.utime(weight_file(cache))
    checks = []
    check = PackedFile.check_payload

    def note(file: PackedFile) -> None:
        checks.append(file.path)
        check(file)

    monkeypatch.setattr(PackedFile, "check_payload", note)
    for _ in range(3):
        load(checkpoint, cache)
    assert checks == [weight_file(cache)]


def test_a_checkpoint_that_changes_while_it_is_read_is_not_kept(
    checkpoint: TinyCheckpoint, cache: PackedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def touch_and_pack(folder: Path, *arguments: object) -> PackedWeights:
        os.utime(folder / "model.safetensors", (1, 1))
        return pack_checkpoint(folder, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(weight_loading, "pack_checkpoint", touch_and_pack)
    assert_same_bits(load(checkpoint, cache), load(checkpoint, None))
    assert weight_files(cache) == []


def test_weights_that_cannot_be_read_are_named(
    checkpoint: TinyCheckpoint, cache: PackedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a folder: it can be opened, and not be read."""
    load(checkpoint, cache)
    file = checkpoint.folder / "model.safetensors"
    file.unlink()
    file.mkdir()
    monkeypatch.setattr(weight_loading, "weight_files", lambda _: [file])
    with pytest.raises(ConfigError, match=naming("model.safetensors", "directory")):
        load(checkpoint, cache)


def test_a_checkpoint_that_cannot_be_hashed_is_served(
    checkpoint: TinyCheckpoint,
    cache: PackedCache,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No other weights of its form are there: it is hashed in the background."""

    def fail(*arguments: object, **options: object) -> str:
        raise ConfigError("cannot read model.safetensors: Input/output error")

    fresh = load(checkpoint, None)
    monkeypatch.setattr(weight_loading, "_file_digest", fail)
    assert_same_bits(load(checkpoint, cache), fresh)
    assert "not kept for the next start: cannot read model.safetensors" in caplog.text
    assert list(cache.folder.glob("*.lock")) == []


def full_disk(*arguments: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def refuse_locks(*arguments: object) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


@pytest.mark.parametrize("target", ["os.fsync", "pathlib.Path.replace"])
def test_a_full_disk_costs_the_cache_only(
    checkpoint: TinyCheckpoint,
    cache: PackedCache,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    target: str,
) -> None:
    monkeypatch.setattr(target, full_disk)
    assert_same_bits(load(checkpoint, cache), load(checkpoint, None))
    assert "not kept for the next start: No space left on device" in caplog.text
    monkeypatch.undo()
    assert [path for path in cache.folder.glob("*weights*") if path.suffix != ".lock"] == []


@pytest.mark.parametrize(
    ("max_bytes", "min_free_bytes", "message"),
    [(100, 0, "weights_cache_bytes is 100 B: raise it to"), (GIB, 1 << 62, "free space there")],
)
def test_too_little_space_is_reported(
    checkpoint: TinyCheckpoint,
    cache: PackedCache,
    caplog: pytest.LogCaptureFixture,
    max_bytes: int,
    min_free_bytes: int,
    message: str,
) -> None:
    small = PackedCache(cache.folder, max_bytes, min_free_bytes=min_free_bytes)
    assert_same_bits(load(checkpoint, small), load(checkpoint, None))
    assert message in caplog.text
    assert weight_files(cache) == []


def test_a_folder_that_cannot_be_written_is_no_cache(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    assert PackedCache.usable(tmp_path / "file" / "cache", GIB) is None
    assert "cannot write to" in caplog.text


@pytest.fixture
def three_models(tmp_path: Path) -> list[TinyCheckpoint]:
    models = []
    for seed in range(3):
        folder = tmp_path / f"model{seed}"
        folder.mkdir()
        models.append(TinyCheckpoint(folder, seed=seed))
        models[-1].save()
    return models


def test_what_was_used_longest_ago_goes_first(
    three_models: list[TinyCheckpoint], cache: PackedCache, packings: list[Path]
) -> None:
    first, second, third = three_models
    load(first, cache)
    size = weight_file(cache).stat().st_size
    small = PackedCache(cache.folder, 2 * size, min_free_bytes=0)
    (lock,) = cache.folder.glob("*.lock")
    load(second, small)
    for path in cache.folder.glob("*.lock"):
        os.utime(path, (1000, 1000) if path == lock else (2000, 2000))
    load(first, small)  # now the second is the older one
    load(third, small)
    assert len(weight_files(cache)) == 2
    packings.clear()
    load(first, small)
    load(third, small)
    assert packings == []
    load(second, small)
    assert packings == [second.folder]
    assert len(list(cache.folder.glob("*.lock"))) == 2


@pytest.mark.parametrize("has_locks", [True, False])
def test_what_a_killed_writer_left_goes(
    checkpoint: TinyCheckpoint,
    cache: PackedCache,
    monkeypatch: pytest.MonkeyPatch,
    has_locks: bool,
) -> None:
    ages = {"new": 0, "dead": 3600, "used": 3600, "old": 48 * 3600}
    paths = {name: cache.folder / f".{name}.weights.123.tmp" for name in ages}
    for name, age in ages.items():
        paths[name].write_bytes(b"half")
        os.utime(paths[name], (time.time() - age,) * 2)
    with paths["used"].open("rb") as file:
        use(file.fileno())
        if not has_locks:
            monkeypatch.setattr("fcntl.flock", refuse_locks)
        load(checkpoint, cache)
    left = [name for name, path in paths.items() if path.exists()]
    assert left == (["new", "used"] if has_locks else ["new", "dead", "used"])


class HaltedStore:
    """A writer that stops in the middle of its file until it may go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began, self.may_go_on = threading.Event(), threading.Event()
        write = packed_file._payload

        def halting(*arguments: Any) -> Iterator[memoryview | bytes]:
            for piece in write(*arguments):
                self.began.set()
                assert self.may_go_on.wait(60)
                yield piece

        monkeypatch.setattr(packed_file, "_payload", halting)


def test_weights_are_served_before_they_are_written(
    checkpoint: TinyCheckpoint, cache: PackedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh, halted = load(checkpoint, None), HaltedStore(monkeypatch)
    first = load_weights(
        checkpoint.folder, checkpoint.config, ReferenceKernels(CPU), FLOAT32, cache
    )
    assert halted.began.wait(60)
    assert_same_bits(first, fresh)
    assert weight_files(cache) == []
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(load, checkpoint, cache)
        halted.may_go_on.set()
        assert_same_bits(second.result(60), fresh)
    assert first.storing is not None
    assert second.result().storing is None
    assert len(weight_files(cache)) == 1


def test_a_stop_leaves_half_a_file_nowhere(
    checkpoint: TinyCheckpoint,
    cache: PackedCache,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    packings: list[Path],
) -> None:
    caplog.set_level("INFO")
    halted = HaltedStore(monkeypatch)
    weights = load_weights(
        checkpoint.folder, checkpoint.config, ReferenceKernels(CPU), FLOAT32, cache
    )
    assert weights.storing is not None
    assert halted.began.wait(60)
    with ThreadPoolExecutor(1) as pool:
        closed = pool.submit(weights.storing.close)
        halted.may_go_on.set()
        closed.result(60)
    assert [path for path in cache.folder.glob("*weights*") if path.suffix != ".lock"] == []
    assert "the server ends before they are written" in caplog.text
    load(checkpoint, cache)
    assert len(packings) == 2


def test_links_that_lead_nowhere_are_no_files_of_the_cache(
    checkpoint: TinyCheckpoint, cache: PackedCache, packings: list[Path]
) -> None:
    for name in ("loop.weights", ".loop.weights.123.tmp"):
        (cache.folder / name).symlink_to(name)
    load(checkpoint, cache)
    packings.clear()
    load(checkpoint, cache)
    assert packings == []


def test_a_waiting_process_finds_what_the_other_stored(
    checkpoint: TinyCheckpoint, cache: PackedCache, packings: list[Path]
) -> None:
    fresh = load(checkpoint, None)
    packings.clear()
    with ThreadPoolExecutor(4) as pool:
        loaded = list(pool.map(lambda _: load(checkpoint, cache), range(4)))
    for weights in loaded:
        assert_same_bits(weights, fresh)
    assert packings == [checkpoint.folder]


def test_without_locks_several_writers_do_no_harm(
    checkpoint: TinyCheckpoint, cache: PackedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fcntl.flock", refuse_locks)
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=load, args=(checkpoint, cache)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert_same_bits(load(checkpoint, cache), load(checkpoint, None))
    assert len(weight_files(cache)) == 1


def test_a_removed_file_stays_in_use(checkpoint: TinyCheckpoint, cache: PackedCache) -> None:
    weights = load(checkpoint, cache)
    weight_file(cache).unlink()
    assert_same_bits(weights, load(checkpoint, None))
