"""One LoRA of experts in every layout that files have.

The files are written from the same factors: A [rank, in] and B [out, rank] of each expert.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from loraplex.adapters.canonical import CanonicalRow
from loraplex.adapters.formats.inputs import open_input
from loraplex.adapters.shapes import BaseShapes
from loraplex.adapters.tensor_file import StagingLimits

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

    def rows(self) -> Mapping[tuple[int | None, str, int | None], tuple[Array, Array]]:
        """Return A and B by layer, module and expert."""
        rows: dict[tuple[int | None, str, int | None], tuple[Array, Array]] = {}
        for (layer, name), (a, b) in self.pairs.items():
            for expert in range(NUM_EXPERTS):
                if name == "down":
                    rows[layer, DOWN, expert] = a[expert], b[expert]
                    continue
                for module, half in zip((GATE, UP), np.split(b[expert], 2), strict=True):
                    rows[layer, module, expert] = a[expert], half
        return rows

    def stacked(self, names: Mapping[str, str], write: Writer) -> Tensors:
        tensors: Tensors = {}
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
    tensors: Tensors = {}
    for (layer, module, expert), (a, b) in factors.rows().items():
        path = ROOT.format(layer).replace("mlp", parent) + f".{expert}.{names[module]}"
        tensors |= {f"{path}.lora_A.weight": a, f"{path}.lora_B.weight": b}
    return {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}


def split_3d(factors: Factors) -> Tensors:
    """SGLang: 3D tensors of gate, of up and of down."""
    tensors: Tensors = {}
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
