"""Dense modules: their formula, their bits, their bytes and their files."""

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from loraplex.core.errors import ConfigError
from loraplex.core.weight_precision import WeightPrecision
from loraplex.demo import BASE_PATH
from loraplex.execution.vector_layers import VectorLayer, load_vector_layers
from loraplex.execution.weights.size import weights_size
from loraplex.models.registry import read_config
from loraplex.models.spec import ModelSpec, VectorLayerSpec
from loraplex.models.stages import PipelineStage, stage
from support.naming import naming

HOST = torch.device("cpu")
LAYER = VectorLayerSpec(folder="d", in_features=64, out_features=5, has_bias=True, has_tanh=True)


def spec_with(*layers: VectorLayerSpec) -> ModelSpec:
    return dataclasses.replace(read_config(BASE_PATH), vector_layers=layers)


def save(folder: Path, dtype: torch.dtype = torch.float32, **changes: torch.Tensor) -> None:
    torch.default_generator.manual_seed(2)
    tensors = {"linear.weight": torch.randn(5, 64), "linear.bias": torch.randn(5)}
    renamed = {name.replace("_", "."): tensor for name, tensor in changes.items()}
    stored = {name: tensor.to(dtype) for name, tensor in (tensors | renamed).items()}
    (folder / "d").mkdir(exist_ok=True)
    save_file(stored, folder / "d" / "model.safetensors")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_layer_of_a_folder(tmp_path: Path, dtype: torch.dtype) -> None:
    save(tmp_path, dtype)
    (layer,) = load_vector_layers(tmp_path, spec_with(LAYER), HOST)
    x = torch.randn(7, 64)
    assert layer.bias is not None
    expected = torch.tanh(x.double() @ layer.weight.double() + layer.bias.double())
    torch.testing.assert_close(layer.forward(x).double(), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(layer.forward(x[3:4]), layer.forward(x)[3:4])
    assert layer.num_bytes == LAYER.num_bytes == 4 * (5 * 64 + 5)
    linear = VectorLayer(layer.weight, None, has_tanh=False)
    torch.testing.assert_close(linear.forward(x), x @ layer.weight)


def test_their_bytes_are_weights_of_the_last_stage() -> None:
    sizes = [
        weights_size(spec, torch.bfloat16, WeightPrecision.NATIVE)
        for spec in (spec_with(LAYER), spec_with())
    ]
    assert sizes[0] - sizes[1] == LAYER.num_bytes
    first = stage(spec_with(LAYER), PipelineStage(0, 2))
    assert load_vector_layers(Path("/nowhere"), first, HOST) == ()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"linear_weight": torch.zeros(6, 64)}, ("linear.weight", 6, 64, 5)),
        ({"other": torch.zeros(1)}, ("other",)),
    ],
)
def test_tensors_that_do_not_fit(
    tmp_path: Path, changes: dict[str, torch.Tensor], named: tuple[object, ...]
) -> None:
    save(tmp_path, **changes)
    with pytest.raises(ConfigError, match=naming(*named, "model.safetensors")):
        load_vector_layers(tmp_path, spec_with(LAYER), HOST)


@pytest.mark.parametrize("content", [None, b"x" * 20])
def test_files_that_cannot_be_read(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "d").mkdir()
        (tmp_path / "d" / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=naming("model.safetensors")):
        load_vector_layers(tmp_path, spec_with(LAYER), HOST)
