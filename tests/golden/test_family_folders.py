"""Folders of every family: planned, packed and kept in the cache, converted and built."""

import logging
from pathlib import Path

import pytest
import torch
from peft import LoraConfig

from loraplex.app.plan import plan_memory
from loraplex.compat.convert.checkpoint import convert_checkpoint
from loraplex.compat.convert.engine import build_engine_folder
from loraplex.compat.convert.flag_tables import BUILD_FLAGS, CHECKPOINT_FLAGS
from loraplex.compat.flags import read_flags
from loraplex.core.config import ModelConfig
from loraplex.core.errors import UnsupportedModelError
from loraplex.execution.weights.loading import load_weights
from loraplex.execution.weights.packed_cache import PackedCache
from loraplex.execution.weights.packing import PackedWeights, WeightFormat, pack_checkpoint
from loraplex.execution.weights.stored_head import read_model
from loraplex.kernels.dispatch import select_kernels
from loraplex.models.specs.attention import AttentionSpec
from support.checkpoints import add_random_adapters
from support.families import every
from support.families.case import FamilyCase
from support.naming import naming

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # PEFT gives experts that transformers keeps fused ranks of their own, also if none is adapted.
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning"),
]

CASES = every.CASES
IN_EVERY_RUN = ("gemma2-no-caps", "opt-350m")
"""Cases that `make test` runs: a null that is no default, tensors of their own."""
FORM = WeightFormat(dtype=torch.float32)
GIB = 1 << 30


def save(folder: Path, case: FamilyCase) -> Path:
    """Save a random model and an adapter; return the adapter's folder."""
    torch.manual_seed(0)
    model = case.model_class.from_config(case.config())
    model.save_pretrained(folder)
    config = LoraConfig(r=4, target_modules=case.all_targets)
    add_random_adapters(model, {"all": config}).save_pretrained(folder / "adapters")
    if case.convert is not None:
        case.convert(folder)
        case.convert(folder / "adapters" / "all")
    return folder / "adapters" / "all"


def assert_same(weights: PackedWeights, wanted: PackedWeights) -> None:
    for one, other in zip(weights.entries, wanted.entries, strict=True):
        assert one.numbers == other.numbers
        for left, right in zip(one.tensors, other.tensors, strict=True):
            assert (left is None) == (right is None)
            assert left is None or right is None or torch.equal(left, right)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in IN_EVERY_RUN else pytest.mark.slow)
        for name, case in CASES.items()
        if case.is_quick or name in IN_EVERY_RUN
    ],
)
def test_a_family(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    folder, kernels = tmp_path / "model", select_kernels(torch.device("cpu"))
    adapter = save(folder, CASES[name])
    spec = read_model(folder)
    wanted = pack_checkpoint(folder, spec, kernels, FORM)

    config = ModelConfig(path=str(folder), dtype="float32", memory_bytes=GIB)
    plan = plan_memory(config, [str(adapter)])
    assert [found.problem for found in plan.adapters.adapters] == [""]
    assert plan.memory.kv.tokens > 0
    assert 0 < plan.memory.weights_bytes <= wanted.num_bytes

    (tmp_path / "cache").mkdir()
    cache = PackedCache(tmp_path / "cache", GIB, min_free_bytes=0)
    weights = load_weights(folder, spec, kernels, FORM, cache)
    assert_same(weights, wanted)
    assert weights.storing is not None
    weights.storing.wait()
    caplog.clear()
    assert_same(load_weights(folder, spec, kernels, FORM, cache), wanted)
    assert f"from {cache.folder}" in caplog.text

    words = ("--model_dir", str(folder), "--output_dir", str(tmp_path / "checkpoint"))
    flags = read_flags(CHECKPOINT_FLAGS, (*words, "--dtype", "float32"), "convert")
    if not all(isinstance(layer.mixer, AttentionSpec) for layer in spec.layers):
        with pytest.raises(UnsupportedModelError, match=naming("layers of another kind")):
            convert_checkpoint(flags)
        return
    checkpoint = convert_checkpoint(flags)
    assert_same(load_weights(checkpoint, read_model(checkpoint), kernels, FORM, None), wanted)
    words = ("--checkpoint_dir", str(checkpoint), "--output_dir", str(tmp_path / "engine"))
    engine = build_engine_folder(read_flags(BUILD_FLAGS, words, "build"))
    assert engine is not None
    assert read_model(engine) == spec
    assert_same(load_weights(engine, spec, kernels, FORM, None), wanted)
