"""Every layout that files have for LoRA of experts gives the same rows; doubtful files do not load.

The files are written from the same factors: A [rank, in] and B [out, rank] of each expert.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import save_file

from loraplex.adapters.canonical import CanonicalRow
from loraplex.adapters.formats.inputs import open_input
from loraplex.adapters.shapes import BaseShapes
from loraplex.adapters.staging_limits import StagingLimits
from loraplex.core.adapter import ExpertLoraLayout
from loraplex.core.errors import (
    AdapterMismatchError,
    AdapterTooLargeError,
    InvalidAdapterError,
    LoraplexError,
    UnsupportedFeatureError,
)

Array = npt.NDArray[np.float32]
Tensors = dict[str, Array]
Writer = Callable[[Array, Array], Tensors]

NUM_EXPERTS, RANK, HIDDEN, INNER = 4, 3, 8, 6
LAYERS = (1, 2)
ROOT = "base_model.model.model.layers.{}.mlp.experts"
GATE, UP, DOWN = "experts.gate_proj", "experts.up_proj", "experts.down_proj"
TARGETS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
CONFIG = {"peft_type": "LORA", "r": RANK, "lora_alpha": 6, "target_parameters": TARGETS}
UNSLOTH = {"unsloth_fixed": True, "parent_library": "transformers"}


def base(hidden: int = HIDDEN, inner: int = INNER, **changes: object) -> BaseShapes:
    modules = {GATE: (hidden, inner), UP: (hidden, inner), DOWN: (inner, hidden)}
    shapes = BaseShapes(
        3,
        modules | {"shared_expert.up_proj": (hidden, 2 * inner), "router": (hidden, NUM_EXPERTS)},
        num_experts=dict.fromkeys(modules, NUM_EXPERTS),
        module_layers=dict.fromkeys(modules, LAYERS),
        paths={
            module: f"model.layers.{{}}.mlp.experts.{{expert}}.{module.partition('.')[2]}"
            for module in modules
        },
    )
    return msgspec.structs.replace(shapes, **changes)


class Factors:
    """A [experts, rank, in] and B [experts, out, rank] of gate with up, and of down, by layer.

    Gate and up have one A, as the stacked layouts need it.
    """

    def __init__(self, hidden: int = HIDDEN, inner: int = INNER) -> None:
        rng = np.random.default_rng(0)
        sizes = {"gate_up": (hidden, 2 * inner), "down": (inner, hidden)}

        def random(*shape: int) -> Array:
            return rng.normal(size=(NUM_EXPERTS, *shape)).astype("f4")

        self.pairs = {
            (layer, name): (random(RANK, num_in), random(num_out, RANK))
            for layer in LAYERS
            for name, (num_in, num_out) in sizes.items()
        }

    def rows(self) -> Mapping[tuple[int, str, int], tuple[Array, Array]]:
        """Return A and B by layer, module and expert."""
        rows = {}
        for (layer, name), (a, b) in self.pairs.items():
            for expert in range(NUM_EXPERTS):
                if name == "down":
                    rows[layer, DOWN, expert] = a[expert], b[expert]
                    continue
                for module, half in zip((GATE, UP), np.split(b[expert], 2), strict=True):
                    rows[layer, module, expert] = a[expert], half
        return rows

    def stacked(self, names: Mapping[str, str], write: Writer) -> Tensors:
        tensors = {}
        for (layer, name), (a, b) in self.pairs.items():
            path = ROOT.format(layer) + names[name]
            tensors |= {f"{path}.{slot}.weight": part for slot, part in write(a, b).items()}
        return {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}


WRAPPERS = {"gate_up": ".base_layer", "down": ""}
NAMED = {"gate_up": ".gate_up_proj", "down": ".down_proj"}


def flat(a: Array, b: Array) -> Tensors:
    """PEFT: in B's columns the expert changes fastest."""
    columns = b.transpose(1, 2, 0).reshape(b.shape[1], -1)
    return {"lora_A": a.reshape(-1, a.shape[2]), "lora_B": columns}


def swapped(a: Array, b: Array) -> Tensors:
    """PEFT 0.17 to 0.19.0: the factors of the transposed weight."""
    return flat(b.transpose(0, 2, 1), a.transpose(0, 2, 1))


def grouped(a: Array, b: Array) -> Tensors:
    """Unsloth: the columns of an expert are side by side."""
    columns = b.transpose(1, 0, 2).reshape(b.shape[1], -1)
    return {"lora_A": a.reshape(-1, a.shape[2]), "lora_B": columns}


def experts_last(a: Array, b: Array) -> Tensors:
    return {"lora_A": a, "lora_B": b.transpose(1, 2, 0)}


def experts_first(a: Array, b: Array) -> Tensors:
    return {"lora_A": a, "lora_B": b}


def twice(a: Array, b: Array) -> Tensors:
    """SGLang: the As of gate and up one below the other."""
    is_gate_up = b.shape[1] == 2 * INNER
    return {"lora_A": np.concatenate([a, a], 1) if is_gate_up else a, "lora_B": b}


def separate(factors: Factors, names: Mapping[str, str], parent: str = "mlp") -> Tensors:
    tensors = {}
    for (layer, module, expert), (a, b) in factors.rows().items():
        path = ROOT.format(layer).replace("mlp", parent) + f".{expert}.{names[module]}"
        tensors |= {f"{path}.lora_A.weight": a, f"{path}.lora_B.weight": b}
    return {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}


def split_3d(factors: Factors) -> Tensors:
    """SGLang: 3D tensors of gate, of up and of down."""
    tensors = {}
    for (layer, name), (a, b) in factors.pairs.items():
        for part, half in zip(
            ("down_proj",) if name == "down" else ("gate_proj", "up_proj"),
            np.split(b, 1 if name == "down" else 2, axis=1),
            strict=True,
        ):
            path = f"{ROOT.format(layer)}.{part}"
            tensors |= {f"{path}.lora_A.weight": a, f"{path}.lora_B.weight": half.copy()}
    return tensors


def granite(factors: Factors, write: Writer) -> Tensors:
    """PEFT with transformers 4, where Granite's parameters of experts are weights of modules."""
    names = {"gate_up": ".input_linear", "down": ".output_linear"}
    return {
        name.replace("mlp.experts", "block_sparse_moe"): tensor
        for name, tensor in factors.stacked(names, write).items()
    }


def read(
    folder: Path, tensors: Tensors, shapes: BaseShapes, **config: object
) -> tuple[CanonicalRow, ...]:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    save_file(tensors, folder / "adapter_model.safetensors")
    limits = StagingLimits()
    return open_input(str(folder), limits).read_rows(shapes, limits)


def assert_rows(rows: tuple[CanonicalRow, ...], factors: Factors, scale: float = 2.0) -> None:
    expected = factors.rows()
    assert [(row.layer, row.module, row.expert) for row in rows] == sorted(expected)
    for row in rows:
        a, b = expected[row.layer, row.module, row.expert]
        assert row.scale == scale
        assert row.tensors["a"].array().tobytes() == a.tobytes()
        assert row.tensors["b"].array().tobytes() == b.tobytes()


HUB = {GATE: "gate_proj", UP: "up_proj", DOWN: "down_proj"}
MIXTRAL = {GATE: "w1", UP: "w3", DOWN: "w2"}
GRANITE = {"target_parameters": ["input_linear.weight", "output_linear.weight"]}
MODULES = {"target_parameters": None, "target_modules": list(HUB.values())}
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
    with pytest.raises(InvalidAdapterError, match="no tensors of the other one"):
        read(tmp_path, outer, base())
    inner = {name: part for name, part in tensors.items() if "base_layer" in name}
    with pytest.raises(InvalidAdapterError, match="no tensors of the second"):
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
    warnings = "; ".join(config.warnings(stacked, base(), "", "warn"))  # type: ignore[arg-type]
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
    warnings = source.warnings(rows, base(), "", "warn")  # type: ignore[arg-type]
    repeated = len(LAYERS) * (NUM_EXPERTS - 1) * (2 + 1) * RANK * HIDDEN * 4
    assert any(f"{repeated} of the adapter's" in text for text in warnings)
    num_bytes = sum(row.num_bytes for row in rows)
    limits = StagingLimits(max_file_bytes=num_bytes - 1)
    with pytest.raises(AdapterTooLargeError, match=f"{num_bytes} bytes of single experts"):
        open_input(str(tmp_path), limits).read_rows(base(), limits)


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
        with pytest.raises(InvalidAdapterError, match="expert_lora_layout to unswapped or"):
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
        with pytest.raises(InvalidAdapterError, match="rank_major or grouped_by_expert"):
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
    with pytest.raises(AdapterMismatchError, match="do not fit down_proj of 4 experts"):
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
            "third parameter",
        ),
        (changed(f"{OUTER}.lora_A.weight", None), {}, InvalidAdapterError, "no lora_A"),
        (changed(f"{OUTER}.left_over", ZEROS), {}, LoraplexError, "left_over"),
        (
            changed(f"{OUTER}.lora_B.bias", ZEROS),
            {},
            UnsupportedFeatureError,
            r"lora_B.bias.*only lora_A and lora_B",
        ),
        (
            changed(f"{OUTER}.modules_to_save.gate_up_proj", ZEROS),
            {},
            UnsupportedFeatureError,
            "modules_to_save",
        ),
        (
            changed(f"{OUTER}.lora_A.weight", np.zeros((4 * RANK, 7), "f4")),
            {},
            AdapterMismatchError,
            "do not fit down_proj of 4 experts, which have 6 inputs and 8 outputs",
        ),
        (
            changed(f"{OUTER}.lora_A.weight", np.zeros((4 * RANK + 1, INNER), "f4")),
            {},
            AdapterMismatchError,
            "do not fit down_proj",
        ),
        (
            changed(f"{OUTER}.lora_A.weight", np.zeros((4, RANK, INNER), "f4")),
            {},
            InvalidAdapterError,
            "no layout of experts; known are A",
        ),
        (
            changed(f"{OUTER}.0.down_proj.lora_A.weight", ZEROS),
            {"target_modules": ["down_proj"]},
            InvalidAdapterError,
            "has no lora_B",
        ),
        (lambda t: t, {"r": RANK + 1}, InvalidAdapterError, "rank 3; .* has 4"),
        (
            lambda t: t,
            {"rank_pattern": {"down_proj": 2}},
            InvalidAdapterError,
            "has 2 for model.layers.1.mlp.experts.down_proj",
        ),
        (lambda t: t, {"use_dora": True}, UnsupportedFeatureError, "only LoRA of experts"),
        (
            lambda t: t,
            {"target_parameters": ["experts.gate_up_proj_bias"]},
            UnsupportedFeatureError,
            "gate_up_proj_bias",
        ),
        (
            lambda t: t,
            {"target_parameters": None, "target_modules": ["q_proj"]},
            InvalidAdapterError,
            "does not target",
        ),
        (lambda t: t, {"lora_B_layout": "other"}, InvalidAdapterError, "lora_B_layout"),
    ],
)
def test_traps_are_refused_by_name(
    change: Callable[[Tensors], Tensors],
    config: Mapping[str, object],
    error: type[LoraplexError],
    named: str,
    tmp_path: Path,
) -> None:
    tensors = change(Factors().stacked(WRAPPERS, flat))
    with pytest.raises(error, match=named):
        read(tmp_path, tensors, base(), **config)


def test_one_expert_in_two_dialects_is_refused(tmp_path: Path) -> None:
    factors = Factors()
    tensors = factors.stacked(WRAPPERS, flat) | separate(factors, HUB)
    with pytest.raises(InvalidAdapterError, match=r"both of expert 0 of experts.down_proj"):
        read(tmp_path, tensors, base(), target_modules=list(HUB.values()))


def test_a_base_without_experts_has_none(tmp_path: Path) -> None:
    tensors = Factors().stacked(WRAPPERS, flat)
    with pytest.raises(AdapterMismatchError, match="the base model has none"):
        read(tmp_path, tensors, BaseShapes(3, {"up_proj": (8, 6)}))


def test_a_target_that_reaches_the_shared_expert_alone_is_reported(tmp_path: Path) -> None:
    name = ROOT.format(1).replace("experts", "shared_expert.up_proj")
    tensors = {
        f"{name}.lora_A.weight": np.ones((RANK, HIDDEN), "f4"),
        f"{name}.lora_B.weight": np.ones((2 * INNER, RANK), "f4"),
    }
    rows = read(tmp_path, tensors, base(), target_parameters=None, target_modules=["up_proj"])
    source = open_input(str(tmp_path), StagingLimits())
    warnings = source.warnings(rows, base(), "", "warn")  # type: ignore[arg-type]
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
