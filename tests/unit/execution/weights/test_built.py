"""The packed weights of an engine folder: the bits of a fresh packing, or passed over."""

import json
from pathlib import Path

import pytest
import torch

from loraplex.core.weight_precision import WeightPrecision
from loraplex.execution.weights.loading import build_weights, load_weights, open_built
from loraplex.execution.weights.packed_cache import PackedCache
from loraplex.execution.weights.packing import (
    PackedWeights,
    WeightFormat,
    pack_checkpoint,
)
from loraplex.kernels.dispatch import select_kernels
from loraplex.models.engine_folder import PACKED_NAME
from support.tiny_model import TinyCheckpoint

KERNELS = select_kernels(torch.device("cpu"))
FLOAT32 = WeightFormat(dtype=torch.float32)


@pytest.fixture
def engine(tiny_checkpoint: TinyCheckpoint) -> TinyCheckpoint:
    """The folder is native and built at once."""
    folder = tiny_checkpoint.save()
    digest = build_weights(folder, folder, tiny_checkpoint.config, KERNELS, FLOAT32)
    table = {"format": 1, "weights_digest": digest}
    (folder / "hf_config.json").write_text((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"build_config": {}, "loraplex": table}))
    return tiny_checkpoint


@pytest.fixture
def cache(tmp_path: Path) -> PackedCache:
    opened = PackedCache.usable(tmp_path / "cache", 1 << 30)
    assert opened is not None
    return opened


def assert_same(found: PackedWeights, wanted: PackedWeights) -> None:
    for one, other in zip(found.entries, wanted.entries, strict=True):
        assert one.numbers == other.numbers
        for left, right in zip(one.tensors, other.tensors, strict=True):
            assert (left is None) == (right is None)
            assert left is None or right is None or torch.equal(left, right)


@pytest.mark.parametrize("has_cache", [False, True])
def test_the_bits_of_a_fresh_packing(
    engine: TinyCheckpoint, cache: PackedCache, has_cache: bool
) -> None:
    folder, config = engine.folder, engine.config
    file = open_built(folder, config, KERNELS, FLOAT32, cache if has_cache else None)
    assert file is not None
    loaded = load_weights(folder, config, KERNELS, FLOAT32, cache if has_cache else None)
    assert_same(loaded, pack_checkpoint(folder, config, KERNELS, FLOAT32))
    assert not list(cache.folder.glob("*.weights"))


def test_another_precision_is_packed_anew(
    engine: TinyCheckpoint, caplog: pytest.LogCaptureFixture
) -> None:
    form = WeightFormat(dtype=torch.float32, precision=WeightPrecision.INT8)
    assert open_built(engine.folder, engine.config, KERNELS, form, None) is None
    assert "is not used" in caplog.text
    loaded = load_weights(engine.folder, engine.config, KERNELS, form, None)
    assert_same(loaded, pack_checkpoint(engine.folder, engine.config, KERNELS, form))


def test_weights_of_another_checkpoint_are_passed_over(engine: TinyCheckpoint) -> None:
    table = {"format": 1, "weights_digest": "0" * 64}
    (engine.folder / "config.json").write_text(json.dumps({"loraplex": table}))
    assert open_built(engine.folder, engine.config, KERNELS, FLOAT32, None) is None


@pytest.mark.parametrize("has_cache", [False, True])
def test_a_damaged_file_is_passed_over(
    engine: TinyCheckpoint, cache: PackedCache, has_cache: bool
) -> None:
    path = engine.folder / PACKED_NAME
    content = bytearray(path.read_bytes())
    content[-70] ^= 1
    path.write_bytes(content)
    used = cache if has_cache else None
    assert open_built(engine.folder, engine.config, KERNELS, FLOAT32, used) is None
    loaded = load_weights(engine.folder, engine.config, KERNELS, FLOAT32, used)
    assert_same(loaded, pack_checkpoint(engine.folder, engine.config, KERNELS, FLOAT32))


def test_a_folder_that_was_not_built(tiny_checkpoint: TinyCheckpoint) -> None:
    folder = tiny_checkpoint.save()
    assert open_built(folder, tiny_checkpoint.config, KERNELS, FLOAT32, None) is None
