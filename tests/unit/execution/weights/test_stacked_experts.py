"""Checkpoints with one tensor for all experts of a layer: the same weights as one for each."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from loraplex.core.errors import ConfigError
from loraplex.execution.weights.checkpoint import Checkpoint
from loraplex.execution.weights.packing import PackedWeights, WeightFormat, pack_checkpoint
from loraplex.kernels.reference import ReferenceKernels
from loraplex.models.decoder_names import StackedExperts
from loraplex.models.registry import read_config
from loraplex.models.spec import ModelSpec
from support.families import experts
from support.naming import naming

KERNELS = ReferenceKernels(torch.device("cpu"))
FORM = WeightFormat(dtype=torch.float32)
QWEN = ("mlp.experts", "gate_proj", "up_proj", "down_proj")
MIXTRAL = ("block_sparse_moe.experts", "w1", "w3", "w2")
Tensors = dict[str, torch.Tensor]


def save(folder: Path, name: str) -> Tensors:
    experts.CASES[name].save(folder)
    return load_file(folder / "model.safetensors")


def stacked(
    tensors: Mapping[str, torch.Tensor],
    names: tuple[str, ...],
    *,
    is_transposed: bool = False,
    suffix: str = "",
    only: tuple[str, ...] = ("gate_up_proj", "down_proj"),
) -> Tensors:
    """Return a checkpoint's tensors with those of experts stacked."""
    parent, gate, up, down = names
    result = dict(tensors)
    for prefix in {name.partition(f"{parent}.")[0] for name in tensors if f".{parent}." in name}:

        def experts_of(path: str, start: str = f"{prefix}{parent}") -> torch.Tensor:
            parts = [f"{start}.{expert}.{path}.weight" for expert in range(4)]
            return torch.stack([result.pop(part) for part in parts])

        if "gate_up_proj" in only:
            result[f"{prefix}{parent}.gate_up_proj"] = torch.cat(
                [experts_of(gate), experts_of(up)], dim=1
            )
        if "down_proj" in only:
            result[f"{prefix}{parent}.down_proj"] = experts_of(down)
    for name in [name for name in result if name.endswith(("gate_up_proj", "down_proj"))]:
        whole = result.pop(name)
        result[name + suffix] = (whole.transpose(1, 2) if is_transposed else whole).contiguous()
    return result


def pack(folder: Path, spec: ModelSpec | None = None) -> PackedWeights:
    return pack_checkpoint(folder, spec or read_config(folder), KERNELS, FORM)


def assert_same(weights: PackedWeights, wanted: PackedWeights) -> None:
    for one, other in zip(weights.entries, wanted.entries, strict=True):
        for left, right in zip(one.tensors, other.tensors, strict=True):
            assert (left is None) == (right is None)
            assert left is None or right is None or torch.equal(left, right)


@pytest.mark.parametrize("suffix", ["", ".weight"])
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize(("name", "names"), [("qwen3-moe", QWEN), ("mixtral", MIXTRAL)])
def test_stacked_tensors_in_both_orders(
    name: str, names: tuple[str, ...], is_transposed: bool, suffix: str, tmp_path: Path
) -> None:
    tensors = save(tmp_path, name)
    wanted = pack(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(stacked(tensors, names, is_transposed=is_transposed, suffix=suffix), file)
    assert_same(pack(tmp_path), wanted)


def test_names_of_transformers_5_and_shards(tmp_path: Path) -> None:
    """Mixtral's experts and router have other names in memory."""
    tensors = save(tmp_path, "mixtral")
    wanted = pack(tmp_path)
    renamed = {
        name.replace("block_sparse_moe.", "mlp."): tensor
        for name, tensor in stacked(tensors, MIXTRAL).items()
    }
    (tmp_path / "model.safetensors").unlink()
    weight_map = {name: f"{index % 2}.safetensors" for index, name in enumerate(sorted(renamed))}
    for file in set(weight_map.values()):
        part = {name: renamed[name] for name in renamed if weight_map[name] == file}
        save_file(part, tmp_path / file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert_same(pack(tmp_path), wanted)


@pytest.mark.parametrize("name", [name for name, case in experts.CASES.items() if case.is_quick])
def test_state_dicts_of_transformers_5(name: str, tmp_path: Path) -> None:
    """Compare the tensors as they are in memory with those that save_pretrained writes."""
    model = experts.CASES[name].save(tmp_path)
    wanted = pack(tmp_path)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    assert_same(pack(tmp_path), wanted)


def test_pickled_files(tmp_path: Path) -> None:
    tensors = save(tmp_path, "qwen3-moe")
    wanted = pack(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(stacked(tensors, QWEN), tmp_path / "pytorch_model.bin")
    assert_same(pack(tmp_path), wanted)


def test_interleaved_parts_and_biases(tmp_path: Path) -> None:
    """Compare tensors as GPT-OSS has them."""
    tensors = save(tmp_path, "qwen3-moe")
    spec = with_expert_biases(read_config(tmp_path))
    parent = "model.layers.1.mlp.experts"
    plain = dict(tensors)
    for layer in range(1, 4):
        for expert in range(4):
            for part, size in (("gate_proj", 24), ("up_proj", 24), ("down_proj", 32)):
                name = f"model.layers.{layer}.mlp.experts.{expert}.{part}.bias"
                plain[name] = torch.randn(size)
    save_file(plain, tmp_path / "model.safetensors")
    wanted = pack(tmp_path, spec)
    whole = {name: tensor for name, tensor in plain.items() if ".experts." not in name}
    for layer in range(1, 4):
        parent = f"model.layers.{layer}.mlp.experts"

        def of_all(name: str, start: str = parent) -> torch.Tensor:
            return torch.stack([plain[f"{start}.{expert}.{name}"] for expert in range(4)])

        weights = [of_all(f"{name}.weight") for name in ("gate_proj", "up_proj")]
        interleaved = torch.stack(weights, dim=2).flatten(1, 2)
        whole[f"{parent}.gate_up_proj"] = interleaved.transpose(1, 2).contiguous()
        biases = [of_all(f"{name}.bias") for name in ("gate_proj", "up_proj")]
        whole[f"{parent}.gate_up_proj_bias"] = torch.stack(biases, dim=2).flatten(1, 2)
        whole[f"{parent}.down_proj"] = of_all("down_proj.weight").transpose(1, 2).contiguous()
        whole[f"{parent}.down_proj_bias"] = of_all("down_proj.bias")
    save_file(whole, tmp_path / "model.safetensors")
    assert_same(pack(tmp_path, spec), wanted)


def with_expert_biases(spec: ModelSpec) -> ModelSpec:
    parent = "mlp.experts"
    up = tuple(f"{parent}.{{expert}}.{name}" for name in ("gate_proj", "up_proj"))
    down = f"{parent}.{{expert}}.down_proj"

    def form(name: str, parts: tuple[str, ...], suffix: str) -> StackedExperts:
        return StackedExperts(
            tensor=f"{parent}.{name}",
            parts=tuple(f"{part}.{suffix}" for part in parts),
            is_transposed=True,
            is_interleaved=True,
        )

    forms = (
        form("gate_up_proj", up, "weight"),
        form("gate_up_proj_bias", up, "bias"),
        form("down_proj", (down,), "weight"),
        form("down_proj_bias", (down,), "bias"),
    )
    names = dataclasses.replace(
        spec.names, experts=dataclasses.replace(spec.names.experts, stacked=forms)
    )
    layers = [
        dataclasses.replace(
            layer,
            linears={
                name: dataclasses.replace(group, has_bias=group.num_experts is not None)
                for name, group in layer.linears.items()
            },
        )
        for layer in spec.layers
    ]
    return dataclasses.replace(spec, names=names, layers=tuple(layers))


def test_parts_copy_nothing(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file(stacked(save(tmp_path, "qwen3-moe"), QWEN), file)
    prefix = "model.layers.1.mlp.experts"
    with Checkpoint(tmp_path, read_config(tmp_path)) as checkpoint:
        first, last = (checkpoint.read(f"{prefix}.{e}.down_proj.weight") for e in (0, 3))
        assert last.data_ptr() - first.data_ptr() == 3 * first.nbytes


def test_both_forms_in_one_folder(tmp_path: Path) -> None:
    tensors = save(tmp_path, "qwen3-moe")
    save_file(tensors | stacked(tensors, QWEN), tmp_path / "model.safetensors")
    message = (
        r"weight model\.layers\.1\.mlp\.experts\.0\.\w+\.weight occurs twice: in \S*experts\S+ "
        r"and in \S*experts\S+"
    )
    with pytest.raises(ConfigError, match=message):
        pack(tmp_path)


def test_wrong_shapes_name_the_stacked_tensor(tmp_path: Path) -> None:
    tensors = stacked(save(tmp_path, "qwen3-moe"), QWEN)
    name = "model.layers.2.mlp.experts.down_proj"
    tensors[name] = torch.zeros(4, 31, 24)
    save_file(tensors, tmp_path / "model.safetensors")
    message = rf"{name} has shape \[4, 31, 24\], config\.json means \[4, 32, 24\]"
    with pytest.raises(ConfigError, match=message):
        pack(tmp_path)


def test_a_dense_layer_has_no_stacked_tensors(tmp_path: Path) -> None:
    tensors = stacked(save(tmp_path, "qwen3-moe"), QWEN)
    tensors["model.layers.0.mlp.experts.down_proj"] = torch.zeros(4, 32, 24)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(
        ConfigError,
        match=naming("model.layers.0.mlp.experts", "model.layers.0.mlp.experts.down_proj"),
    ):
        pack(tmp_path)


@pytest.mark.parametrize("is_transposed", [False, True])
def test_square_tensors_have_the_order_of_the_others(is_transposed: bool, tmp_path: Path) -> None:
    """Gate and up together have as many outputs as inputs; the order is that of down."""
    tensors = save(tmp_path, "olmoe-square")
    wanted = pack(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(stacked(tensors, QWEN, is_transposed=is_transposed), file)
    assert_same(pack(tmp_path), wanted)


def test_square_tensors_alone_are_refused(tmp_path: Path) -> None:
    tensors = stacked(save(tmp_path, "olmoe-square"), QWEN, only=("gate_up_proj",))
    save_file(tensors, tmp_path / "model.safetensors")
    message = (
        r"model\.safetensors: model\.layers\.0\.mlp\.experts\.gate_up_proj has shape "
        r"\[4, 32, 32\], which may mean .*; save the checkpoint with a tensor for each expert"
    )
    with pytest.raises(ConfigError, match=message):
        pack(tmp_path)
