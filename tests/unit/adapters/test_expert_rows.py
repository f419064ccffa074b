"""Rows of layers with experts: the names that files have, and their checks against a base."""

import dataclasses
import itertools
import math
from collections import Counter

import msgspec
import numpy as np
import pytest

from loraplex.adapters.base_check import check_shapes, check_targets
from loraplex.adapters.canonical import CanonicalRow, RowKind
from loraplex.adapters.formats.canonical_file import check_rows
from loraplex.adapters.formats.peft import canonical_rows
from loraplex.adapters.formats.peft_config import LoraSettings, PeftConfig
from loraplex.adapters.formats.peft_names import TensorName, parse_name
from loraplex.adapters.fused_modules import fit_modules
from loraplex.adapters.shapes import BaseShapes
from loraplex.adapters.targets import targets_of
from loraplex.adapters.tensor_file import RawTensor, StagingLimits, encode_sizes
from loraplex.core.errors import (
    AdapterMismatchError,
    InvalidAdapterError,
    LoraplexError,
    UnsupportedFeatureError,
)
from loraplex.core.rank_limits import RankLimits
from support.naming import naming

UP, DOWN = "experts.up_proj", "experts.down_proj"
SHAPES = BaseShapes(
    num_layers=3,
    modules={
        "up_proj": (8, 20),
        "experts.gate_proj": (8, 6),
        UP: (8, 6),
        DOWN: (6, 8),
        "router": (8, 4),
        "shared_expert.gate_proj": (8, 10),
        "shared_expert.up_proj": (8, 10),
        "shared_expert.down_proj": (10, 8),
        "shared_expert_gate": (8, 1),
    },
    vocab_size=50,
    hidden_size=8,
    num_experts={"experts.gate_proj": 4, UP: 4, DOWN: 4},
    module_layers={"up_proj": (0,), UP: (1, 2), DOWN: (1, 2), "experts.gate_proj": (1, 2)},
    paths={
        "router": "model.layers.{}.mlp.gate",
        UP: "model.layers.{}.mlp.experts.{expert}.up_proj",
    },
)


def raw(*shape: int, value: float = 1.0) -> RawTensor:
    return RawTensor("F32", shape, np.full(shape, value, "f4").tobytes())


def lora(module: str = UP, layer: int = 1, expert: int | None = 3) -> CanonicalRow:
    num_in, num_out = SHAPES.modules[module]
    tensors = {"a": raw(2, num_in), "b": raw(num_out, 2)}
    path = f"model.layers.{layer}.mlp.{module}"
    return CanonicalRow(layer, module, expert, RowKind.LORA, 1.0, tensors, path)


@pytest.mark.parametrize(
    ("path", "module", "expert"),
    [
        ("mlp.experts.3.gate_proj", "experts.gate_proj", 3),
        ("mlp.experts.127.down_proj", DOWN, 127),
        ("block_sparse_moe.experts.0.w1", "experts.gate_proj", 0),
        ("block_sparse_moe.experts.0.w3", UP, 0),
        ("mlp.experts.1.w2", DOWN, 1),
        ("mlp.gate", "router", None),
        ("mlp.router", "router", None),
        ("block_sparse_moe.gate", "router", None),
        ("block_sparse_moe.router.layer", "router", None),
        ("mlp.shared_expert.up_proj", "shared_expert.up_proj", None),
        ("mlp.shared_experts.gate_proj", "shared_expert.gate_proj", None),
        ("mlp.shared_expert_gate", "shared_expert_gate", None),
        ("shared_mlp.input_linear", "shared_expert.gate_up_proj", None),
        ("shared_mlp.output_linear", "shared_expert.down_proj", None),
    ],
)
def test_the_names_that_files_have(path: str, module: str, expert: int | None) -> None:
    parsed = parse_name(f"base_model.model.model.layers.7.{path}.lora_A.weight")
    assert parsed is not None
    assert (parsed.layer, parsed.module, parsed.expert) == (7, module, expert)
    assert parsed.path == f"model.layers.7.{path}"


def test_experts_of_one_module_are_rows_of_their_own() -> None:
    tensors = {}
    for expert in (2, 0):
        name = f"model.layers.1.mlp.experts.{expert}.up_proj"
        tensors |= {
            f"{name}.lora_A.weight": raw(2, 8, value=expert + 1),
            f"{name}.lora_B.weight": raw(6, 2),
        }
    rows = canonical_rows(PeftConfig(r=2, target_modules=["up_proj"]), tensors)
    assert [(row.layer, row.module, row.expert) for row in rows] == [(1, UP, 0), (1, UP, 2)]
    check_shapes(rows, SHAPES, max_ranks=RankLimits(2))
    targets = [target for row in rows for target in targets_of(row, SHAPES, RankLimits(2))]
    assert [target.expert for target in targets] == [0, 2]
    check_targets(targets, SHAPES, max_ranks=RankLimits(2))


GOOD = [
    lora(),
    lora(DOWN, expert=0),
    lora("router", expert=None),
    lora("shared_expert.up_proj", expert=None),
    lora("shared_expert_gate", expert=None),
    lora("up_proj", layer=0, expert=None),
]


def test_rows_that_fit() -> None:
    check_shapes(check_rows(tuple(GOOD)), SHAPES, max_ranks=RankLimits(2))


@pytest.mark.parametrize(
    ("row", "named"),
    [
        (lora(expert=4), ("expert", 4, "experts.up_proj")),
        (lora(expert=-1), ("expert", -1)),
        (lora(expert=None), (4, "model.layers.1.mlp.experts.up_proj.lora_A")),
        (lora("router", expert=1), ("expert", 1, "router")),
        (lora(layer=0), ("layer", 0, "experts.up_proj", 2)),
        (lora("up_proj", layer=1, expert=None), ("layer", 1, "up_proj")),
    ],
)
def test_rows_that_do_not_fit(row: CanonicalRow, named: tuple[object, ...]) -> None:
    with pytest.raises(AdapterMismatchError, match=naming(*named)):
        check_shapes([row], SHAPES, max_ranks=RankLimits(2))


@pytest.mark.parametrize(
    ("kind", "tensors"),
    [
        (RowKind.MAGNITUDE, {"magnitude": raw(6)}),
        (RowKind.BIAS, {"bias": raw(6)}),
        (RowKind.FULL, {"weight": raw(6, 8)}),
        (RowKind.LORA, {"a": raw(2, 8), "b": raw(6, 2), "bias": raw(6)}),
    ],
)
def test_experts_have_lora_only(kind: RowKind, tensors: dict[str, RawTensor]) -> None:
    row = dataclasses.replace(lora(), kind=kind, tensors=tensors)
    with pytest.raises(UnsupportedFeatureError, match=naming(row.origin, "LoRA", "lora_bias")):
        check_shapes([row], SHAPES, max_ranks=RankLimits(2))


@pytest.mark.parametrize(
    "change",
    [{"num_experts": {UP: 3}}, {"module_layers": {UP: (0, 2)}}, {"num_experts": {}}],
)
def test_pieces_that_were_staged_for_another_base(change: dict[str, object]) -> None:
    other = msgspec.structs.replace(SHAPES, **change)
    with pytest.raises(AdapterMismatchError, match=naming(1, 3, "experts.up_proj")):
        check_targets(targets_of(lora(), SHAPES, RankLimits(2)), other, RankLimits(2))


def test_an_expert_is_there_once() -> None:
    check_rows((lora(expert=1), lora(expert=2)))
    with pytest.raises(InvalidAdapterError, match=naming("expert", 2, 1)):
        check_rows((lora(expert=2), lora(expert=2)))


def test_a_shared_expert_fits_a_base_of_the_other_layout() -> None:
    fused, parts = "shared_expert.gate_up_proj", {}
    for part in ("shared_expert.gate_proj", "shared_expert.up_proj"):
        parts[part] = 10
    modules = {fused: (8, 20), "shared_expert.down_proj": (10, 8)}
    base = BaseShapes(3, modules, vocab_size=50, hidden_size=8, fused={fused: parts})
    separate = [lora(part, expert=None) for part in parts]
    (joined,) = fit_modules(separate, base)
    assert (joined.module, joined.tensors["b"].shape) == (fused, (20, 2))
    assert joined.origin == "model.layers.1.mlp.shared_expert.gate_up_proj"
    renamed = dataclasses.replace(joined, origin="model.layers.1.shared_mlp.input_linear")
    again = fit_modules([renamed], SHAPES)
    assert [row.module for row in again] == list(parts)
    assert again[1].origin == "model.layers.1.shared_mlp.up_proj"
    check_shapes(again, SHAPES, max_ranks=RankLimits(2))


def test_the_limits_admit_a_pair_for_each_of_128_experts_in_48_layers() -> None:
    parts = {"gate_proj": (2048, 768), "up_proj": (2048, 768), "down_proj": (768, 2048)}
    tensors: list[tuple[str, str, tuple[int, ...], int]] = []
    for layer, expert in itertools.product(range(48), range(128)):
        for part, (num_in, num_out) in parts.items():
            path = f"base_model.model.model.layers.{layer}.mlp.experts.{expert}.{part}"
            for slot, shape in (("A", (16, num_in)), ("B", (num_out, 16))):
                tensors.append((f"{path}.lora_{slot}.weight", "BF16", shape, 2 * math.prod(shape)))
    limits = StagingLimits()
    assert len(encode_sizes(tensors, {})) < limits.max_header_bytes / 2
    assert len(tensors) < limits.max_tensors / 2
    assert sum(num_bytes for *_, num_bytes in tensors) < limits.max_file_bytes / 2


def test_each_name_is_parsed_and_each_module_matched_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names, paths = Counter[str](), Counter[str]()

    def count_name(name: str) -> TensorName | None:
        names[name] += 1
        return parse_name(name)

    def count_path(config: PeftConfig, path: str) -> LoraSettings:
        paths[path] += 1
        return settings_of(config, path)

    settings_of = PeftConfig.settings_of
    monkeypatch.setattr("loraplex.adapters.formats.peft.parse_name", count_name)
    monkeypatch.setattr(PeftConfig, "settings_of", count_path)
    tensors = {}
    for expert in range(50):
        path = f"model.layers.1.mlp.experts.{expert}.up_proj"
        tensors |= {f"{path}.lora_A.weight": raw(2, 8), f"{path}.lora_B.weight": raw(6, 2)}
    canonical_rows(PeftConfig(r=2, target_modules=["up_proj"]), tensors)
    assert set(names.values()) == set(paths.values()) == {1}
    assert (len(names), len(paths)) == (100, 50)


def test_an_error_about_experts_is_short() -> None:
    row = dataclasses.replace(lora(), module="experts.gate_up_proj", expert=None)
    with pytest.raises(LoraplexError) as caught:
        check_shapes([row], SHAPES, max_ranks=RankLimits(2))
    assert len(caught.value.message) < 400
