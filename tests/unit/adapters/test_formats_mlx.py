"""Folders of mlx-lm: the rows of the PEFT adapter with the same effect; what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file, save_file

from loraplex.adapters.base_check import other_base
from loraplex.adapters.canonical import CanonicalRow, RowKind, read_canonical
from loraplex.adapters.examination import examine
from loraplex.adapters.shapes import BaseShapes
from loraplex.adapters.staged import StagedAdapter, StageRequest
from loraplex.core.errors import InvalidAdapterError, UnsupportedFeatureError
from support.naming import naming

VOCAB, HIDDEN, INNER, RANK, EXPERTS = 40, 8, 12, 2, 3
SHAPES = BaseShapes(2, {"q_proj": (HIDDEN, HIDDEN)}, vocab_size=VOCAB, hidden_size=HIDDEN)
TIED = BaseShapes(2, {"q_proj": (HIDDEN, HIDDEN)}, VOCAB, HIDDEN, ties_embeddings=True)
OF_EXPERTS = BaseShapes(
    *(2, {"experts.up_proj": (HIDDEN, INNER)}),
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    num_experts={"experts.up_proj": EXPERTS},
)
Q_PROJ = "model.layers.1.self_attn.q_proj"
Arrays = dict[str, npt.NDArray[Any]]
Stage = Callable[..., StagedAdapter]


def values(*shape: int) -> npt.NDArray[Any]:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype("f4")


Q_TENSORS: Arrays = {
    f"{Q_PROJ}.lora_a": values(HIDDEN, RANK),
    f"{Q_PROJ}.lora_b": values(RANK, HIDDEN),
}


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Return a function (tensors, **fields of the config) that writes a folder."""

    def run(tensors: Arrays = Q_TENSORS, **fields: Any) -> Path:
        folder = tmp_path / "mlx"
        folder.mkdir(exist_ok=True)
        config = {
            "fine_tune_type": "lora",
            "lora_parameters": {"rank": RANK, "dropout": 0.0, "scale": 20.0},
            "model": "mlx-community/Tiny-4bit",
            "num_layers": 1,
            "iters": 100,
        }
        (folder / "adapter_config.json").write_text(json.dumps(config | fields))
        save_file(tensors, folder / "adapters.safetensors")
        save_file(tensors, folder / "0000100_adapters.safetensors")
        return folder

    return run


def rows_of(staged: StagedAdapter) -> list[CanonicalRow]:
    return list(read_canonical(Path(staged.source.path)).rows)


def test_factors_are_transposed_and_the_scale_is_taken(
    staged: Stage, write: Callable[..., Path]
) -> None:
    (row,) = rows_of(staged(write(), shapes=SHAPES))
    assert (row.layer, row.module, row.kind, row.scale) == (1, "q_proj", RowKind.LORA, 20.0)
    np.testing.assert_array_equal(row.tensors["a"].array(), Q_TENSORS[f"{Q_PROJ}.lora_a"].T)
    np.testing.assert_array_equal(row.tensors["b"].array(), Q_TENSORS[f"{Q_PROJ}.lora_b"].T)
    # What mlx-lm computes.
    x = values(5, HIDDEN)
    theirs = 20.0 * (x @ Q_TENSORS[f"{Q_PROJ}.lora_a"] @ Q_TENSORS[f"{Q_PROJ}.lora_b"])
    ours = row.scale * (x @ row.tensors["a"].array().T @ row.tensors["b"].array().T)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_it_is_the_same_adapter_as_in_peft_s_form(
    staged: Stage, write: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tmp_path / "peft"
    folder.mkdir()
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 20 * RANK}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    names = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight"}
    tensors = {f"{Q_PROJ}.{n}": Q_TENSORS[f"{Q_PROJ}.{o}"].T.copy() for o, n in names.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    wanted = staged(folder, shapes=SHAPES).source.digest
    assert staged(write(), shapes=SHAPES).source.digest == wanted


def test_dora(staged: Stage, write: Callable[..., Path]) -> None:
    magnitude = np.abs(values(HIDDEN)) + 1
    folder = write({**Q_TENSORS, f"{Q_PROJ}.m": magnitude}, fine_tune_type="dora")
    kinds = {row.kind: row for row in rows_of(staged(folder, shapes=SHAPES))}
    assert kinds.keys() == {RowKind.LORA, RowKind.MAGNITUDE}
    found = kinds[RowKind.MAGNITUDE].tensors["magnitude"].array()
    np.testing.assert_array_equal(found, magnitude)


@pytest.mark.parametrize("shapes", [SHAPES, TIED], ids=["untied", "tied"])
def test_an_embedding_changes_a_tied_output_layer(
    shapes: BaseShapes, staged: Stage, write: Callable[..., Path]
) -> None:
    a, b = values(VOCAB, RANK), values(RANK, HIDDEN)
    folder = write({"model.embed_tokens.lora_a": a, "model.embed_tokens.lora_b": b})
    rows = {row.module: row for row in rows_of(staged(folder, shapes=shapes))}
    embedding = rows["embed_tokens"].tensors
    np.testing.assert_array_equal(embedding["a"].array().T @ embedding["b"].array().T, a @ b)
    assert ("lm_head" in rows) == shapes.ties_embeddings
    if shapes.ties_embeddings:
        head = rows["lm_head"].tensors
        # as_linear: (x @ lora_b.T) @ lora_a.T
        np.testing.assert_array_equal(head["a"].array(), b)
        np.testing.assert_array_equal(head["b"].array(), a)


def test_experts_lie_in_one_tensor(staged: Stage, write: Callable[..., Path]) -> None:
    module = "model.layers.0.mlp.switch_mlp.up_proj"
    a, b = values(EXPERTS, RANK, HIDDEN), values(EXPERTS, INNER, RANK)
    folder = write({f"{module}.lora_a": a, f"{module}.lora_b": b})
    rows = rows_of(staged(folder, shapes=OF_EXPERTS))
    assert [row.expert for row in rows] == list(range(EXPERTS))
    for index, row in enumerate(rows):
        np.testing.assert_array_equal(row.tensors["a"].array(), a[index])
        np.testing.assert_array_equal(row.tensors["b"].array(), b[index])


def test_the_base_model_is_one_of_other_rounding(staged: Stage, write: Callable[..., Path]) -> None:
    (warning,) = staged(write(), shapes=SHAPES, base_model="org/Tiny").warnings
    assert "other rounding" in warning
    assert other_base("mlx-community/Tiny-8bit-DWQ", "Tiny") is None
    assert other_base("mlx-community/Tiny-8bit", "Small") is not None


def test_an_examination(write: Callable[..., Path], tmp_path: Path) -> None:
    state = str(tmp_path / "state")
    examined = examine(
        StageRequest(request_id=1, path=str(write()), state_dir=state, shapes=SHAPES)
    )
    assert (examined.format, examined.num_tensors, examined.num_refused) == ("MLX", 2, 0)


def parameters(**changes: Any) -> dict[str, Any]:
    return {"lora_parameters": {"rank": RANK, "scale": 2.0} | changes}


@pytest.mark.parametrize(
    ("fields", "error", "named"),
    [
        ({"fine_tune_type": "full"}, UnsupportedFeatureError, ("fine_tune_type", "full")),
        (parameters(alpha=16), UnsupportedFeatureError, ("lora_parameters",)),
        (parameters(rank=0), InvalidAdapterError, ("lora_parameters.rank", 1)),
        (parameters(rank=10**400), InvalidAdapterError, ("lora_parameters.rank", 1)),
        (
            parameters(rank=3),
            InvalidAdapterError,
            (2, 3, "model.layers.1.self_attn.q_proj.lora_A.weight"),
        ),
        (
            parameters(scale=1e308),
            InvalidAdapterError,
            ("scale", "model.layers.1.self_attn.q_proj"),
        ),
        (parameters(scale="2"), InvalidAdapterError, ("$.lora_parameters.scale", "str")),
        ({"lora_parameters": None}, InvalidAdapterError, ("$.lora_parameters",)),
        (
            {"fine_tune_type": "dora"},
            InvalidAdapterError,
            ("use_dora", "model.layers.1.self_attn.q_proj.lora_A.weight", "lora_magnitude_vector"),
        ),
    ],
)
def test_configs_that_are_refused(
    fields: dict[str, Any],
    error: type[Exception],
    named: tuple[object, ...],
    staged: Stage,
    write: Callable[..., Path],
) -> None:
    with pytest.raises(error, match=naming(*named)):
        staged(write(**fields), shapes=SHAPES)


@pytest.mark.parametrize(
    ("name", "tensor", "named"),
    [
        (f"{Q_PROJ}.lora_a", values(HIDDEN, RANK, 1), "2 axes"),
        (f"{Q_PROJ}.lora_a", np.zeros((HIDDEN, RANK), "i4"), "floats"),
        ("model.layers.0.mlp.switch_mlp.up_proj.lora_a", values(6, HIDDEN), "3 axes"),
        ("model.norm.weight", values(HIDDEN), "modules_to_save"),
        ("mystery", values(3), "mystery"),
    ],
)
def test_tensors_that_are_refused(
    name: str, tensor: npt.NDArray[Any], named: str, staged: Stage, write: Callable[..., Path]
) -> None:
    with pytest.raises((InvalidAdapterError, UnsupportedFeatureError), match=named):
        staged(write({**Q_TENSORS, name: tensor}), shapes=SHAPES)


def test_peft_s_weights_in_the_same_folder_win(staged: Stage, write: Callable[..., Path]) -> None:
    folder = write()
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 4}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "adapters.safetensors")
    names = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight"}
    peft = {f"{Q_PROJ}.{n}": tensors[f"{Q_PROJ}.{o}"].T.copy() for o, n in names.items()}
    save_file(peft, folder / "adapter_model.safetensors")
    (row,) = rows_of(staged(folder, shapes=SHAPES))
    assert row.scale == 2.0
