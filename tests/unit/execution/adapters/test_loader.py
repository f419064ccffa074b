import dataclasses
import time

import numpy as np
import pytest
import torch

from loraplex.adapters.canonical import CanonicalRow, RowKind, digest, write_canonical
from loraplex.adapters.shapes import BaseShapes
from loraplex.adapters.targets import source_of
from loraplex.adapters.tensor_file import RawTensor
from loraplex.core.adapter import AdapterSource
from loraplex.core.errors import AdapterMismatchError
from loraplex.core.rank_limits import RankLimits
from loraplex.engine.runner import AdapterLoader
from loraplex.execution.adapters.host_adapters import HostAdapter, HostAdapters
from loraplex.execution.adapters.layout import pieces_of
from loraplex.execution.adapters.loader import FileAdapterLoader, read_host_adapter


def staged(folder, seed=0) -> AdapterSource:
    """A canonical adapter file with a float32 and a bfloat16 row; its values are its seed."""
    rows = []
    for layer, (dtype, bits) in enumerate([("F32", "f4"), ("BF16", "u2")]):
        value = np.float32(seed + 1) if bits == "f4" else np.uint16(0x3F80)
        tensors = {
            "a": RawTensor(dtype, (2, 3), np.full((2, 3), value, bits).tobytes()),
            "b": RawTensor(dtype, (5, 2), np.arange(10, dtype=bits).tobytes()),
        }
        rows.append(CanonicalRow(layer, "q_proj", None, RowKind.LORA, 0.5 + layer, tensors))
    path = folder / f"{seed}.safetensors"
    write_canonical(rows, digest(rows), path)
    return source_of(digest(rows), path, rows, BaseShapes(2, {}), RankLimits(64))


@pytest.fixture
def host() -> HostAdapters:
    return HostAdapters()


@pytest.fixture
def loader(host):
    made = FileAdapterLoader(host)
    yield made
    made.close()


def wait_for(loader: AdapterLoader, count: int) -> list:
    finished = []
    deadline = time.monotonic() + 60
    while len(finished) < count:
        assert time.monotonic() < deadline
        finished += loader.poll()
        time.sleep(0.001)
    return finished


def test_a_file_becomes_tensors_as_they_came(tmp_path):
    source = staged(tmp_path, seed=3)
    adapter = read_host_adapter(source)
    assert adapter.digest == source.digest
    assert tuple(sorted(pieces_of(adapter))) == source.targets
    assert adapter.num_bytes == source.num_bytes
    single, half = adapter.weights
    assert torch.equal(single.a, torch.full((2, 3), 4.0))
    assert torch.equal(single.b, torch.arange(10).float().view(5, 2))
    assert half.a.dtype is torch.bfloat16
    assert torch.equal(half.a, torch.ones(2, 3, dtype=torch.bfloat16))
    assert (single.scale, half.scale) == (0.5, 1.5)


def test_loads_end_in_the_host_table(loader, host, tmp_path):
    for handle in range(3):
        loader.start(handle, staged(tmp_path, handle))
    finished = wait_for(loader, 3)
    assert [(load.handle, load.error) for load in finished] == [(0, None), (1, None), (2, None)]
    assert len(host) == 3
    assert float(host.get(2).weights[0].a[0, 0]) == 3.0
    loader.discard(1)
    loader.discard(1)
    assert host.get(1) is None
    assert len(host) == 2
    assert loader.poll() == []


def test_bad_files_are_errors_and_the_thread_goes_on(loader, host, tmp_path):
    good, other = staged(tmp_path, 1), staged(tmp_path, 2)
    (tmp_path / "broken").write_bytes(b"broken")
    swapped = AdapterSource(good.digest, other.path, good.num_bytes, good.targets)
    missing = AdapterSource(good.digest, str(tmp_path / "none"), 1, good.targets)
    broken = AdapterSource(good.digest, str(tmp_path / "broken"), 1, good.targets)
    for handle, source in enumerate((swapped, missing, broken, good)):
        loader.start(handle, source)
    finished = wait_for(loader, 4)
    assert [load.error is None for load in finished] == [False, False, False, True]
    for load in finished[:3]:
        assert load.error.code == "adapter_load_failed"
        assert good.digest in load.error.message
    assert len(host) == 1


def test_an_unexpected_exception_is_an_error_too(loader, host, tmp_path, monkeypatch):
    def explode(source):
        raise ZeroDivisionError("surprise")

    monkeypatch.setattr("loraplex.execution.adapters.loader.read_host_adapter", explode)
    loader.start(5, staged(tmp_path))
    (load,) = wait_for(loader, 1)
    assert (load.handle, load.error.code) == (5, "adapter_load_failed")
    assert "surprise" in load.error.message


def test_targets_that_differ_from_the_plan_are_refused(loader, tmp_path):
    source = staged(tmp_path)
    wrong = AdapterSource(source.digest, source.path, source.num_bytes, source.targets[:1])
    loader.start(1, wrong)
    (load,) = wait_for(loader, 1)
    assert load.error is not None


def test_close_drops_what_waits(host, tmp_path):
    loader = FileAdapterLoader(host)
    loader.close()
    loader.start(1, staged(tmp_path))
    assert loader.poll() == []
    assert len(host) == 0


def test_an_adapter_is_prepared_before_it_is_there_or_fails(host, tmp_path):
    def prepare(adapter: HostAdapter) -> HostAdapter:
        if adapter.weights[0].a[0, 0] == 1.0:
            raise AdapterMismatchError("its base is another")
        return dataclasses.replace(adapter, factors={(0, "q_proj"): torch.ones(5)})

    loader = FileAdapterLoader(host, prepare)
    try:
        loader.start(1, staged(tmp_path, seed=0))
        loader.start(2, staged(tmp_path, seed=1))
        failed, loaded = wait_for(loader, 2)
    finally:
        loader.close()
    assert (failed.handle, failed.error.code) == (1, "adapter_mismatch")
    assert (loaded.error, host.get(1)) == (None, None)
    assert host.get(2).factors[0, "q_proj"].tolist() == [1] * 5
