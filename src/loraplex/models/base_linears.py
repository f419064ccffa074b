"""Linear layers of a base model one by one, as DoRA needs them.

Results come from the packed layers: those of a quantised layer follow from the weights that it
really has. One thread other than the one that runs the steps may use them.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from loraplex.core.adapter import LM_HEAD, OUTSIDE_LAYERS
from loraplex.kernels.ops import Kernels, PackedLinear
from loraplex.models.parameters import DecoderParameters
from loraplex.models.spec import ModelSpec


class _Place(NamedTuple):
    packed: PackedLinear
    first: int
    out_features: int

    @property
    def outputs(self) -> slice:
        return slice(self.first, self.first + self.out_features)


class BaseLinears:
    """Linear layers by (layer, module). Row norms are computed at their first use, then kept."""

    def __init__(self, kernels: Kernels, dtype: torch.dtype, device: torch.device) -> None:
        """dtype: of the model's activations."""
        self._kernels = kernels
        self._dtype = dtype
        self._device = device
        self._places: dict[tuple[int, str], _Place] = {}
        self._norms: dict[int, torch.Tensor] = {}

    def add(self, layer: int, packed: PackedLinear, modules: Mapping[str, int]) -> None:
        """modules: out_features by name, in the order of the packed layer's outputs."""
        first = 0
        for module, out_features in modules.items():
            self._places[layer, module] = _Place(packed, first, out_features)
            first += out_features

    def bias(self, layer: int, module: str) -> torch.Tensor:
        """Return the bias [out] float64; zeros where the layer has none."""
        place = self._places[layer, module]
        bias = self._kernels.linear_parts(place.packed).tensors[1]
        if bias is None:
            return torch.zeros(place.out_features, dtype=torch.float64, device=self._device)
        return bias[place.outputs].double()

    def project(self, layer: int, module: str, x: torch.Tensor) -> torch.Tensor:
        """Compute x W^T without the bias: x [n, in] -> [n, out] float64."""
        place = self._places[layer, module]
        inputs = x.to(self._device, torch.float32).contiguous()
        y = self._kernels.linear_apart(inputs, place.packed, self._dtype)
        return y[:, place.outputs].double() - self.bias(layer, module)

    def squared_row_norms(self, layer: int, module: str) -> torch.Tensor:
        """Return the sum of squares of each row of W: [out] float64."""
        place = self._places[layer, module]
        key = id(place.packed)
        if key not in self._norms:
            self._norms[key] = self._kernels.squared_row_norms(place.packed)
        return self._norms[key][place.outputs]


def base_linears(spec: ModelSpec, parameters: DecoderParameters, kernels: Kernels) -> BaseLinears:
    """Return the linear layers of a decoder with these parameters, packed by these kernels."""
    embedding = parameters.embedding
    linears = BaseLinears(kernels, embedding.dtype, embedding.device)
    for index, (layer, packed) in enumerate(zip(spec.layers, parameters.layers, strict=True)):
        for name, group in layer.linears.items():
            if group.num_experts is not None:
                continue  # DoRA of experts is refused
            linears.add(index, packed.linears[name], group.outputs)
    linears.add(OUTSIDE_LAYERS, parameters.lm_head, {LM_HEAD: spec.vocab_size})
    return linears
