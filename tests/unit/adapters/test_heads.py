"""Classification heads in adapters: their names, copies, LoRA of the base's, and refusals."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from loraplex.adapters.base_check import check_targets
from loraplex.adapters.canonical import RowKind, read_canonical
from loraplex.adapters.formats.export_peft import peft_config
from loraplex.adapters.shapes import BaseShapes
from loraplex.core.adapter import LoraTarget, TargetPart
from loraplex.core.errors import AdapterMismatchError, InvalidAdapterError, UnsupportedFeatureError
from loraplex.core.rank_limits import RankLimits

HIDDEN, LABELS = 8, 3
SHAPES = BaseShapes(1, {"q_proj": (8, 12)}, vocab_size=50, hidden_size=HIDDEN, score_size=HIDDEN)
Q0 = "base_model.model.model.layers.0.self_attn.q_proj"


def values(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype("f4")


LORA = {f"{Q0}.lora_A.weight": values(2, 8), f"{Q0}.lora_B.weight": values(12, 2)}


@pytest.fixture
def rows_of(staged, peft_folder):
    """Return a function (tensors, config, base folder) -> the canonical rows, and the report."""

    def run(tensors, base: Path | None = None, **config):
        folder = peft_folder()
        folder.tensors = LORA | tensors
        folder.config |= {"target_modules": ["q_proj"]} | config
        report = staged(folder.write(), shapes=SHAPES, base_path="" if base is None else str(base))
        return read_canonical(Path(report.source.path)).rows, report

    return run


@pytest.mark.parametrize(
    "name",
    [
        "base_model.model.score.weight",
        "base_model.model.score.modules_to_save.weight",
        "base_model.model.score.modules_to_save.default.weight",
        "base_model.model.classifier.weight",
        "score.weight",
    ],
)
def test_the_names_that_files_have_for_a_copy(rows_of, name):
    weight = values(LABELS, HIDDEN)
    rows, report = rows_of({name: weight}, modules_to_save=["classifier", "score"])
    (head,) = (row for row in rows if row.module == "score")
    assert (head.layer, head.kind) == (None, RowKind.FULL)
    np.testing.assert_array_equal(head.tensors["weight"].array(), weight)
    assert report.source.num_labels == LABELS
    assert report.warnings == ()


def test_a_config_that_names_a_head_which_is_not_there_is_reported(rows_of):
    rows, report = rows_of({}, modules_to_save=["classifier", "score"])
    assert [row.module for row in rows] == ["q_proj"]
    assert report.source.num_labels == 0
    (warning,) = report.warnings
    assert "classifier and score" in warning


def test_another_module_that_is_not_there_is_refused(rows_of):
    with pytest.raises(InvalidAdapterError, match="'lm_head'"):
        rows_of({}, modules_to_save=["score", "lm_head"])


def test_a_head_that_the_config_does_not_name_is_refused(rows_of):
    with pytest.raises(InvalidAdapterError, match=r"score\.weight"):
        rows_of({"base_model.model.score.weight": values(LABELS, HIDDEN)})


@pytest.mark.parametrize("shape", [(LABELS, HIDDEN + 1), (HIDDEN, LABELS)])
def test_a_head_of_another_size_is_refused(rows_of, shape):
    with pytest.raises(AdapterMismatchError, match=r"score\.weight"):
        rows_of({"base_model.model.score.weight": values(*shape)}, modules_to_save=["score"])


def test_a_bias_of_a_head_is_refused(rows_of):
    tensors = {
        "base_model.model.score.weight": values(LABELS, HIDDEN),
        "base_model.model.score.bias": values(LABELS),
    }
    with pytest.raises(UnsupportedFeatureError, match=r"score\.bias"):
        rows_of(tensors, modules_to_save=["score"])


SCORE_LORA = {
    "base_model.model.score.lora_A.weight": values(2, HIDDEN, seed=2),
    "base_model.model.score.lora_B.weight": values(LABELS, 2, seed=3),
}


def base_with(folder: Path, weight: np.ndarray, name: str = "score.weight") -> Path:
    folder.mkdir()
    save_file({name: weight}, folder / "model.safetensors")
    return folder


def test_lora_of_the_base_s_head_becomes_a_copy(rows_of, tmp_path):
    weight = values(LABELS, HIDDEN, seed=4)
    targets = ["q_proj", "score"]
    rows, report = rows_of(
        SCORE_LORA, base_with(tmp_path / "base", weight), target_modules=targets, lora_alpha=6
    )
    (head,) = (row for row in rows if row.module == "score")
    a, b = (tensor.astype("f8") for tensor in SCORE_LORA.values())
    np.testing.assert_allclose(
        head.tensors["weight"].array(), weight + 3.0 * b @ a, rtol=1e-6, atol=1e-6
    )
    assert (head.kind, head.scale) == (RowKind.FULL, 1.0)
    assert report.source.num_labels == LABELS
    assert peft_config(rows, "base")["task_type"] == "SEQ_CLS"


@pytest.mark.parametrize(
    ("weight", "name"),
    [
        (values(50, HIDDEN), "lm_head.weight"),
        (values(LABELS + 1, HIDDEN), "score.weight"),
        (None, ""),
    ],
)
def test_lora_of_a_head_that_the_base_does_not_have(rows_of, tmp_path, weight, name):
    base = None if weight is None else base_with(tmp_path / "base", weight, name)
    with pytest.raises(AdapterMismatchError, match="LoRA of a classification head"):
        rows_of(SCORE_LORA, base, target_modules=["q_proj", "score"])


def test_dora_of_a_head_is_refused(rows_of, tmp_path):
    base = base_with(tmp_path / "base", values(LABELS, HIDDEN))
    magnitudes = {
        f"{name}.lora_magnitude_vector": values(size)
        for name, size in (("base_model.model.score", LABELS), (Q0, 12))
    }
    with pytest.raises(UnsupportedFeatureError, match="plain LoRA"):
        rows_of(SCORE_LORA | magnitudes, base, target_modules=["q_proj", "score"], use_dora=True)


def test_stored_heads_are_compared_with_another_base():
    pieces = [
        LoraTarget(-1, "score", rows, 0, HIDDEN, TargetPart.ROWS, first)
        for rows, first in ((2, 0), (1, 2))
    ]
    check_targets(pieces, SHAPES, RankLimits(4))
    for wrong in (
        BaseShapes(1, SHAPES.modules, 50, 16, score_size=16),
        BaseShapes(1, SHAPES.modules),
    ):
        with pytest.raises(AdapterMismatchError, match="score"):
            check_targets(pieces, wrong, RankLimits(4))
