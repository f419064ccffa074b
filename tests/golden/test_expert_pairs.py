"""Adapters of every linear layer of every family with experts, to other formats and back."""

import json
from pathlib import Path

import numpy as np
import pytest

from loraplex.adapters.base_check import check_shapes
from loraplex.adapters.canonical import CanonicalRow, RowKind, digest
from loraplex.adapters.formats import peft, trtllm
from loraplex.adapters.formats.export import lora_tensors
from loraplex.adapters.formats.export_peft import peft_config, peft_tensors
from loraplex.adapters.formats.peft_config import parse_config
from loraplex.adapters.formats.storage_type import StorageType
from loraplex.adapters.fused_modules import fit_modules
from loraplex.adapters.shapes import BaseShapes
from loraplex.adapters.tensor_file import RawTensor
from loraplex.app.builder import base_shapes
from loraplex.core.rank_limits import RankLimits
from loraplex.models.registry import read_config
from support.families.experts import CASES

LIMITS = RankLimits(8)
EXPERT_IDS = {13, 14, 15, 16}
SHARED_IDS = {17, 19, 20, 21}


@pytest.fixture(params=CASES)
def shapes(request: pytest.FixtureRequest, tmp_path: Path) -> BaseShapes:
    CASES[request.param].save(tmp_path)
    return base_shapes(read_config(tmp_path))


def rows_of(shapes: BaseShapes) -> list[CanonicalRow]:
    """Return LoRA of rank 1 to 3 of every linear layer."""
    rng = np.random.default_rng(0)
    rows = []
    for module, (num_in, num_out) in shapes.modules.items():
        num_experts = shapes.num_experts.get(module)
        for layer in shapes.module_layers.get(module, range(shapes.num_layers)):
            for expert in (None,) if num_experts is None else range(num_experts):
                rank = 1 + (layer + (expert or 0)) % 3
                path = shapes.paths[module].format(layer, expert=expert)
                tensors = {
                    name: RawTensor("F32", shape, rng.normal(size=shape).astype("<f4").tobytes())
                    for name, shape in (("a", (rank, num_in)), ("b", (num_out, rank)))
                }
                rows.append(CanonicalRow(layer, module, expert, RowKind.LORA, 1.0, tensors, path))
    return rows


@pytest.mark.some(10)
def test_tensors_of_tensorrt_llm_hold_every_module(shapes: BaseShapes) -> None:
    rows = rows_of(shapes)
    weights, config = lora_tensors(rows, StorageType.FLOAT32)
    ids = set(np.ndarray(config.shape, "<i4", config.data)[0, :, 0].tolist())
    has_shared = any(module.startswith("shared_expert.") for module in shapes.modules)
    assert ids >= EXPERT_IDS
    assert bool(ids & SHARED_IDS) == has_shared
    read = fit_modules(trtllm.canonical_rows(weights, config, shapes, LIMITS), shapes)
    check_shapes(read, shapes, LIMITS)
    assert digest(read) == digest(rows)


@pytest.mark.some(10)
def test_peft_folders_hold_every_module(shapes: BaseShapes) -> None:
    rows = rows_of(shapes)
    config = parse_config(json.dumps(peft_config(rows)).encode())
    read = fit_modules(peft.canonical_rows(config, peft_tensors(rows), shapes), shapes)
    check_shapes(read, shapes, LIMITS)
    assert digest(read) == digest(rows)
