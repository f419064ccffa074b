"""Linear layers after the pooling of a prompt: the Dense modules of sentence-transformers."""

import dataclasses
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from loraplex.core.errors import ConfigError
from loraplex.kernels.host_tensors import tiled_product
from loraplex.models.sentence_transformers import VECTOR_LAYER_NAME
from loraplex.models.spec import ModelSpec, VectorLayerSpec


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class VectorLayer:
    """Layer of vectors [n, in] -> [n, out], all float32."""

    weight: torch.Tensor
    """Shape [in, out]"""
    bias: torch.Tensor | None
    """[out]"""
    has_tanh: bool

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, in] -> [n, out]; the bits of a row depend neither on the others nor on n."""
        if x.device.type == "cpu":
            y = tiled_product(x, self.weight)
        else:
            y = torch.cat([row @ self.weight for row in torch.split(x, 1)])
        if self.bias is not None:
            y = y + self.bias
        return torch.tanh(y) if self.has_tanh else y


def load_vector_layers(
    folder: Path, spec: ModelSpec, device: torch.device
) -> tuple[VectorLayer, ...]:
    """Read the layers of a model's folder; none before the last stage of a pipeline.

    Raises ConfigError for tensors that are missing, unknown or of another shape.
    """
    if not spec.is_last_stage:
        return ()
    return tuple(
        _load(folder / layer.folder / VECTOR_LAYER_NAME, layer, device)
        for layer in spec.vector_layers
    )


def _load(path: Path, layer: VectorLayerSpec, device: torch.device) -> VectorLayer:
    shapes = {"linear.weight": [layer.out_features, layer.in_features]}
    if layer.has_bias:
        shapes["linear.bias"] = [layer.out_features]
    try:
        with safe_open(path, framework="pt") as file:
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if {name: list(tensor.shape) for name, tensor in found.items()} != shapes:
        read = {name: list(tensor.shape) for name, tensor in sorted(found.items())}
        raise ConfigError(f"{path} has the tensors {read}; its config.json means {shapes}")
    tensors = {name: tensor.to(device, torch.float32) for name, tensor in found.items()}
    weight = tensors["linear.weight"].T.contiguous()
    return VectorLayer(weight, tensors.get("linear.bias"), layer.has_tanh)
