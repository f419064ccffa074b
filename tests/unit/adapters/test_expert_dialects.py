"""Every layout that files have for LoRA of experts gives the same rows."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from loraplex.adapters.formats.inputs import open_input
from loraplex.adapters.tensor_file import StagingLimits
from loraplex.core.byte_sizes import readable_bytes
from loraplex.core.errors import (
    AdapterTooLargeError,
    InvalidAdapterError,
)
from support.expert_layouts import (
    DOWN,
    GATE,
    GRANITE,
    HIDDEN,
    HUB,
    INNER,
    LAYERS,
    MIXTRAL,
    MODULES,
    NAMED,
    NUM_EXPERTS,
    RANK,
    ROOT,
    UNSLOTH,
    UP,
    WRAPPERS,
    Factors,
    Tensors,
    Writer,
    assert_rows,
    base,
    experts_first,
    experts_last,
    flat,
    granite,
    grouped,
    read,
    separate,
    split_3d,
    swapped,
    twice,
)
from support.naming import naming

DIALECTS: Mapping[str, tuple[Callable[[Factors], Tensors], Mapping[str, object]]] = {
    "D1": (lambda f: separate(f, HUB), MODULES),
    "D1 of Mixtral": (
        lambda f: separate(f, MIXTRAL, "block_sparse_moe"),
        {"target_parameters": None, "target_modules": list(MIXTRAL.values())},
    ),
    "D1 of Mixtral, other parent": (
        lambda f: separate(f, MIXTRAL),
        {"target_parameters": None, "target_modules": "all-linear"},
    ),
    "D2": (lambda f: f.stacked(WRAPPERS, flat), {"peft_version": "0.21.0"}),
    "D2 without a version": (lambda f: f.stacked(WRAPPERS, flat), {}),
    "D2 of PEFT 0.18": (lambda f: f.stacked(WRAPPERS, swapped), {"peft_version": "0.18.1"}),
    "D2 with any version": (lambda f: f.stacked(WRAPPERS, swapped), {"peft_version": "0.21.0"}),
    "D2 of Granite": (lambda f: granite(f, flat), GRANITE | {"peft_version": "0.19.1"}),
    "D2 of Granite, PEFT 0.17": (lambda f: granite(f, swapped), GRANITE),
    "D3": (lambda f: f.stacked(NAMED, experts_first), {}),
    "D3 with two As": (lambda f: f.stacked(NAMED, twice), {}),
    "D3 by projection": (split_3d, MODULES),
    "D4": (lambda f: f.stacked(WRAPPERS, experts_last), {}),
    "D5": (lambda f: f.stacked(WRAPPERS, grouped), {"lora_B_layout": "grouped_by_expert"}),
    "D5 with rank_major": (
        lambda f: f.stacked(WRAPPERS, flat),
        {"lora_B_layout": "rank_major", "auto_mapping": UNSLOTH},
    ),
}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_each_dialect_gives_the_rows_of_its_factors(dialect: str, tmp_path: Path) -> None:
    factors = Factors()
    write, config = DIALECTS[dialect]
    assert_rows(read(tmp_path, write(factors), base(), **config), factors)


@pytest.mark.parametrize("dtype", ["f2", "f8"])
def test_types_of_other_sizes_keep_their_bits(dtype: str, tmp_path: Path) -> None:
    factors = Factors()
    for place, pair in factors.pairs.items():
        a, b = (part.astype(dtype) for part in pair)
        factors.pairs[place] = a, b
    assert_rows(read(tmp_path, factors.stacked(WRAPPERS, flat), base()), factors)


@pytest.mark.parametrize("name", ["gate_up", "down"])
@pytest.mark.parametrize("names_parameter", [True, False])
@pytest.mark.parametrize("write", [flat, swapped])
def test_one_target_is_known_by_the_config_or_by_its_shape(
    name: str, names_parameter: bool, write: Writer, tmp_path: Path
) -> None:
    factors = Factors()
    factors.pairs = {place: pair for place, pair in factors.pairs.items() if place[1] == name}
    tensors = factors.stacked({name: ""}, write)
    targets = [f"experts.{name}_proj"] if names_parameter else None
    rows = read(tmp_path, tensors, base(), target_parameters=targets, target_modules=["experts"])
    assert_rows(rows, factors)


def test_two_targets_of_which_one_is_missing_are_refused(tmp_path: Path) -> None:
    factors = Factors()
    tensors = factors.stacked(WRAPPERS, flat)
    outer = {name: part for name, part in tensors.items() if "base_layer" not in name}
    with pytest.raises(
        InvalidAdapterError, match=naming("gate_up_proj", "down_proj", "target_parameters")
    ):
        read(tmp_path, outer, base())
    inner = {name: part for name, part in tensors.items() if "base_layer" in name}
    with pytest.raises(
        InvalidAdapterError,
        match=naming(
            "base_model.model.model.layers.1.mlp.experts.base_layer.lora_A.weight",
            "[12, 8]",
            "base_model.model.model.layers.1.mlp.experts.base_layer.lora_B.weight",
        ),
    ):
        read(tmp_path, inner, base())


# The rank of PEFT's conversion of target_modules: one A for both halves, or a block for each.
@pytest.mark.parametrize("is_block_diagonal", [True, False])
def test_the_conversion_to_one_parameter_has_twice_the_rank(
    is_block_diagonal: bool, tmp_path: Path
) -> None:
    factors = Factors()
    written = Factors()
    for layer in LAYERS:
        a, b = factors.pairs[layer, "gate_up"]
        more, _ = factors.pairs[3 - layer, "gate_up"]
        both = np.concatenate([a, more], 1)
        gate, up = np.split(b, 2, axis=1)
        if is_block_diagonal:
            blocks = np.zeros((NUM_EXPERTS, 2 * INNER, 2 * RANK), "f4")
            blocks[:, :INNER, :RANK], blocks[:, INNER:, RANK:] = gate, up
        else:
            blocks = np.concatenate([b, 2 * b], 2)
        written.pairs[layer, "gate_up"] = both, blocks
    pattern = {"rank_pattern": {r".*\.gate_up_proj": 2 * RANK}}
    alpha = {"alpha_pattern": {r".*\.gate_up_proj": 12}}
    rows = read(tmp_path, written.stacked(WRAPPERS, flat), base(), **pattern, **alpha)
    found = {(row.layer, row.module, row.expert): row for row in rows}
    for (layer, module, expert), row in found.items():
        assert row.scale == 2.0
        if module == DOWN:
            continue
        a, b = written.pairs[layer, "gate_up"]
        half = np.split(b[expert], 2)[module == UP]
        if is_block_diagonal:
            kept = slice(RANK, None) if module == UP else slice(RANK)
            a, half = a[:, kept], half[:, kept]
        assert row.tensors["a"].array().tobytes() == a[expert].tobytes()
        assert np.array_equal(row.tensors["b"].array(), half)


def test_an_expert_whose_b_is_zero_has_no_row(tmp_path: Path) -> None:
    factors = Factors()
    for layer in LAYERS:
        factors.pairs[layer, "gate_up"][1][0] = 0
        factors.pairs[layer, "gate_up"][1][2, :INNER] = -0.0
        factors.pairs[layer, "down"][1][3] = 0
    silent = {(GATE, 0), (UP, 0), (GATE, 2), (DOWN, 3)}
    stacked = read(tmp_path, factors.stacked(WRAPPERS, flat), base())
    single = read(tmp_path / "D1", separate(factors, HUB), base(), **MODULES)
    for rows in (stacked, single):
        assert {(row.layer, row.module, row.expert) for row in rows} == {
            (layer, module, expert)
            for layer, module, expert in factors.rows()
            if (module, expert) not in silent
        }
    config = open_input(str(tmp_path), StagingLimits())
    warnings = "; ".join(config.warnings(stacked, base()))
    assert "4 of 8 experts have LoRA of experts.gate_proj" in warnings
    assert "6 of 8 experts have LoRA of experts.down_proj" in warnings


def test_shared_outer_factors_are_repeated_and_reported(tmp_path: Path) -> None:
    factors = Factors()
    for layer in LAYERS:
        a, _ = factors.pairs[layer, "gate_up"]
        _, b = factors.pairs[layer, "down"]
        a[1:], b[1:] = a[0], b[0]
    tensors = factors.stacked(NAMED, experts_first)
    for name, part in tensors.items():
        if "gate_up_proj.lora_A" in name or "down_proj.lora_B" in name:
            tensors[name] = part[:1].copy()
    rows = read(tmp_path, tensors, base())
    assert_rows(rows, factors)
    source = open_input(str(tmp_path), StagingLimits())
    warnings = source.warnings(rows, base())
    repeated = len(LAYERS) * (NUM_EXPERTS - 1) * (2 + 1) * RANK * HIDDEN * 4
    assert any(f"{readable_bytes(repeated)} of the adapter's" in text for text in warnings)
    num_bytes = sum(row.num_bytes for row in rows)
    limits = StagingLimits(max_file_bytes=num_bytes - 1)
    with pytest.raises(AdapterTooLargeError, match=f"{readable_bytes(num_bytes)} once"):
        open_input(str(tmp_path), limits).read_rows(base(), limits)


def test_a_factor_without_a_number_is_that_of_all_numbered_experts(tmp_path: Path) -> None:
    """Megatron-Bridge: A of gate and of up, and B of down, are one for all experts."""
    factors = Factors()
    for layer in LAYERS:
        a, _ = factors.pairs[layer, "gate_up"]
        _, b = factors.pairs[layer, "down"]
        a[1:], b[1:] = a[0], b[0]
    tensors = separate(factors, HUB)
    for layer in LAYERS:
        for name, slot in (("gate_proj", "A"), ("up_proj", "A"), ("down_proj", "B")):
            ending = f"{name}.lora_{slot}.weight"
            for expert in range(NUM_EXPERTS):
                shared = tensors.pop(f"{ROOT.format(layer)}.{expert}.{ending}")
            tensors[f"{ROOT.format(layer)}.{ending}"] = shared[None]
    assert_rows(read(tmp_path, tensors, base(), **MODULES), factors)
    own = f"{ROOT.format(1)}.0.gate_proj.lora_A.weight"
    with pytest.raises(InvalidAdapterError, match=naming("lora_A")):
        read(tmp_path, tensors | {own: shared}, base(), **MODULES)
