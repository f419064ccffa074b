"""LoRA of experts whose files fit two readings, or none: evidence decides, or they are refused."""

from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import numpy as np
import pytest

from loraplex.adapters.formats.inputs import open_input
from loraplex.adapters.shapes import BaseShapes
from loraplex.adapters.tensor_file import StagingLimits
from loraplex.core.adapter import ExpertLoraLayout
from loraplex.core.errors import (
    AdapterMismatchError,
    InvalidAdapterError,
    LoraplexError,
    UnsupportedFeatureError,
)
from support.expert_layouts import (
    HIDDEN,
    HUB,
    INNER,
    LAYERS,
    NAMED,
    NUM_EXPERTS,
    RANK,
    ROOT,
    TARGETS,
    UNSLOTH,
    WRAPPERS,
    Array,
    Factors,
    Tensors,
    Writer,
    assert_rows,
    base,
    experts_first,
    flat,
    grouped,
    read,
    separate,
    swapped,
)
from support.naming import naming

INTERLEAVED = {"has_interleaved_experts": True, "has_transposed_experts": True}


@pytest.mark.parametrize("version", ["0.18.0", "0.19.0", "0.21.0"])
def test_interleaved_gate_and_up_of_a_transposed_square_base(version: str, tmp_path: Path) -> None:
    """GPT-OSS: inner and hidden sizes are equal, and PEFT 0.19.0 alone swaps them."""
    factors, written = Factors(HIDDEN, HIDDEN), Factors(HIDDEN, HIDDEN)
    for layer in LAYERS:
        a, b = factors.pairs[layer, "gate_up"]
        pairs = np.stack(np.split(b, 2, axis=1), axis=2)
        written.pairs[layer, "gate_up"] = a, pairs.reshape(b.shape)
    tensors = written.stacked(WRAPPERS, swapped if version == "0.19.0" else flat)
    only_down = {
        name.replace("base_layer.", ""): part
        for name, part in tensors.items()
        if "base_layer" not in name
    }
    shapes = base(HIDDEN, HIDDEN, **INTERLEAVED)
    assert_rows(read(tmp_path, tensors, shapes, peft_version=version), factors)
    rows = read(tmp_path, only_down, shapes, peft_version=version, target_parameters=TARGETS[1:])
    factors.pairs = {place: pair for place, pair in factors.pairs.items() if place[1] == "down"}
    assert_rows(rows, factors)


SQUARE = {"gate_up": (12, 6), "down": (6, 6)}
"""Sizes (hidden, inner) with which one projection of plain Linear weights is square."""


@pytest.mark.parametrize("name", SQUARE)
@pytest.mark.parametrize("write", [flat, swapped])
def test_a_square_projection_is_read_as_the_other_one(
    name: str, write: Writer, tmp_path: Path
) -> None:
    factors = Factors(*SQUARE[name])
    tensors = factors.stacked(WRAPPERS, write)
    # A version of the other order: shapes come first.
    version = {"peft_version": "0.21.0" if write is swapped else "0.18.0"}
    assert_rows(read(tmp_path, tensors, base(*SQUARE[name]), **version), factors)


@pytest.mark.parametrize("name", SQUARE)
@pytest.mark.parametrize(
    ("write", "versions"),
    [(swapped, ["0.18.0", "0.19.0"]), (flat, ["0.19.1", "0.20.0", "0.21.2.post1"])],
)
def test_a_square_projection_alone_is_read_by_the_version_or_the_operator(
    name: str,
    write: Writer,
    versions: list[str],
    tmp_path: Path,
) -> None:
    factors = Factors(*SQUARE[name])
    factors.pairs = {place: pair for place, pair in factors.pairs.items() if place[1] == name}
    tensors, shapes = factors.stacked({name: ""}, write), base(*SQUARE[name])
    targets = {"target_parameters": [f"experts.{name}_proj"]}
    for version in versions:
        assert_rows(read(tmp_path, tensors, shapes, peft_version=version, **targets), factors)
    for unknown in ({}, {"peft_version": "0.19.1.dev0"}):
        with pytest.raises(
            InvalidAdapterError, match=naming("expert_lora_layout", "0.19.0", "peft_version")
        ):
            read(tmp_path, tensors, shapes, **unknown, **targets)
    word = ExpertLoraLayout.SWAPPED if write is swapped else ExpertLoraLayout.UNSWAPPED
    said = msgspec.structs.replace(shapes, expert_lora_layout=(word,))
    assert_rows(read(tmp_path, tensors, said, **targets), factors)


def test_an_unsloth_adapter_without_its_layout_needs_the_operator_s_word(tmp_path: Path) -> None:
    factors = Factors()
    for write, word in (
        (flat, ExpertLoraLayout.RANK_MAJOR),
        (grouped, ExpertLoraLayout.GROUPED_BY_EXPERT),
    ):
        tensors = factors.stacked(WRAPPERS, write)
        with pytest.raises(
            InvalidAdapterError,
            match=naming("rank_major", "grouped_by_expert", "expert_lora_layout"),
        ):
            read(tmp_path, tensors, base(), auto_mapping=UNSLOTH)
        said = base(expert_lora_layout=(word,))
        assert_rows(read(tmp_path, tensors, said, auto_mapping=UNSLOTH), factors)
    # A plain file is read as PEFT means it, whatever the operator chose for doubtful ones.
    tensors = factors.stacked(WRAPPERS, flat)
    assert_rows(read(tmp_path, tensors, said), factors)


def test_two_as_of_one_projection_are_refused(tmp_path: Path) -> None:
    tensors = Factors().stacked(NAMED, experts_first)
    name = f"{OUTER}.down_proj.lora_A.weight"
    tensors[name] = np.concatenate([tensors[name]] * 2, 1)
    with pytest.raises(
        AdapterMismatchError, match=naming("down_proj", 4, "[experts or 1, rank, in]")
    ):
        read(tmp_path, tensors, base())


def changed(name: str, array: Array | None) -> Callable[[Tensors], Tensors]:
    """Return a change of one tensor; None leaves it out."""

    def change(tensors: Tensors) -> Tensors:
        rest = {key: part for key, part in tensors.items() if key != name}
        return rest if array is None else rest | {name: array}

    return change


OUTER = ROOT.format(1)
ZEROS = np.zeros((2, 2), "f4")


@pytest.mark.parametrize(
    ("change", "config", "error", "named"),
    [
        (
            changed(f"{OUTER}.base_layer.base_layer.lora_A.weight", ZEROS),
            {},
            UnsupportedFeatureError,
            ("LoRA",),
        ),
        (
            changed(f"{OUTER}.lora_A.weight", None),
            {},
            InvalidAdapterError,
            ("lora_A", "base_model.model.model.layers.1.mlp.experts.lora_B.weight"),
        ),
        (
            changed(f"{OUTER}.left_over", ZEROS),
            {},
            LoraplexError,
            ("base_model.model.model.layers.1.mlp.experts.left_over",),
        ),
        (
            changed(f"{OUTER}.lora_B.bias", ZEROS),
            {},
            UnsupportedFeatureError,
            ("base_model.model.model.layers.1.mlp.experts.lora_B.bias", "lora_A", "lora_B"),
        ),
        (
            changed(f"{OUTER}.modules_to_save.gate_up_proj", ZEROS),
            {},
            UnsupportedFeatureError,
            ("base_model.model.model.layers.1.mlp.experts.modules_to_save.gate_up_proj",),
        ),
        (
            changed(f"{OUTER}.lora_A.weight", np.zeros((4 * RANK, 7), "f4")),
            {},
            AdapterMismatchError,
            ("down_proj", 4, 6, 8),
        ),
        (
            changed(f"{OUTER}.lora_A.weight", np.zeros((4 * RANK + 1, INNER), "f4")),
            {},
            AdapterMismatchError,
            ("down_proj", 4, "base_model.model.model.layers.1.mlp.experts.lora_A.weight"),
        ),
        (
            changed(f"{OUTER}.lora_A.weight", np.zeros((4, RANK, INNER), "f4")),
            {},
            InvalidAdapterError,
            (
                "base_model.model.model.layers.1.mlp.experts.lora_A.weight",
                "[4, 3, 6]",
                "base_model.model.model.layers.1.mlp.experts.lora_B.weight",
            ),
        ),
        (
            changed(f"{OUTER}.0.down_proj.lora_A.weight", ZEROS),
            {"target_modules": ["down_proj"]},
            InvalidAdapterError,
            ("lora_B", "base_model.model.model.layers.1.mlp.experts.0.down_proj.lora_A.weight"),
        ),
        (
            lambda t: t,
            {"r": RANK + 1},
            InvalidAdapterError,
            (3, 4, "base_model.model.model.layers.1.mlp.experts.base_layer.lora_A.weight"),
        ),
        (
            lambda t: t,
            {"rank_pattern": {"down_proj": 2}},
            InvalidAdapterError,
            (
                2,
                "model.layers.1.mlp.experts.down_proj",
                "base_model.model.model.layers.1.mlp.experts.lora_A.weight",
            ),
        ),
        (
            lambda t: t,
            {"use_dora": True},
            UnsupportedFeatureError,
            (
                "LoRA",
                "use_dora",
                "base_model.model.model.layers.1.mlp.experts.base_layer.lora_A.weight",
            ),
        ),
        (
            lambda t: t,
            {"target_parameters": ["experts.gate_up_proj_bias"]},
            UnsupportedFeatureError,
            ("experts.gate_up_proj_bias", "target_parameters", "gate_proj"),
        ),
        (
            lambda t: t,
            {"target_parameters": None, "target_modules": ["q_proj"]},
            InvalidAdapterError,
            (
                "base_model.model.model.layers.1.mlp.experts.base_layer.lora_A.weight",
                "[12, 8]",
                "base_model.model.model.layers.1.mlp.experts.base_layer.lora_B.weight",
            ),
        ),
        (
            lambda t: t,
            {"lora_B_layout": "other"},
            InvalidAdapterError,
            ("$.lora_B_layout", "other"),
        ),
    ],
)
def test_traps_are_refused_by_name(
    change: Callable[[Tensors], Tensors],
    config: Mapping[str, object],
    error: type[LoraplexError],
    named: tuple[object, ...],
    tmp_path: Path,
) -> None:
    tensors = change(Factors().stacked(WRAPPERS, flat))
    with pytest.raises(error, match=naming(*named)):
        read(tmp_path, tensors, base(), **config)


def test_one_expert_in_two_dialects_is_refused(tmp_path: Path) -> None:
    factors = Factors()
    tensors = factors.stacked(WRAPPERS, flat) | separate(factors, HUB)
    with pytest.raises(InvalidAdapterError, match=naming(0, "experts.down_proj")):
        read(tmp_path, tensors, base(), target_modules=list(HUB.values()))


def test_a_base_without_experts_has_none(tmp_path: Path) -> None:
    tensors = Factors().stacked(WRAPPERS, flat)
    with pytest.raises(
        AdapterMismatchError,
        match=naming(
            "base_model.model.model.layers.1.mlp.experts.base_layer.lora_A.weight",
            "[12, 8]",
            "base_model.model.model.layers.1.mlp.experts.base_layer.lora_B.weight",
        ),
    ):
        read(tmp_path, tensors, BaseShapes(3, {"up_proj": (8, 6)}))


def test_a_target_that_reaches_the_shared_expert_alone_is_reported(tmp_path: Path) -> None:
    name = ROOT.format(1).replace("experts", "shared_expert.up_proj")
    tensors = {
        f"{name}.lora_A.weight": np.ones((RANK, HIDDEN), "f4"),
        f"{name}.lora_B.weight": np.ones((2 * INNER, RANK), "f4"),
    }
    rows = read(tmp_path, tensors, base(), target_parameters=None, target_modules=["up_proj"])
    source = open_input(str(tmp_path), StagingLimits())
    warnings = source.warnings(rows, base())
    assert any("experts.up_proj of routed experts are targeted, but" in text for text in warnings)


def test_routers_of_target_parameters_have_their_own_patterns(tmp_path: Path) -> None:
    name = ROOT.format(1).replace("experts", "gate")
    tensors = {
        f"{name}.lora_A.weight": np.ones((2, HIDDEN), "f4"),
        f"{name}.lora_B.weight": np.ones((NUM_EXPERTS, 2), "f4"),
    }
    (row,) = read(
        tmp_path,
        tensors,
        base(),
        target_parameters=["gate.weight"],
        rank_pattern={"gate.weight": 2},
    )
    assert (row.module, row.expert, row.scale) == ("router", None, 3.0)
