"""Linear layers of a base model one by one, as DoRA needs them.

Results come from the packed layers: those of a quantised layer follow from the weights that it
really has. One thread other than the one that runs the steps may use them.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from loraplex.core.adapter import LM_HEAD, OUTSIDE_LAYERS
from loraplex.kernels.channel import Channel, joined_shares, tree_sum
from loraplex.kernels.ops import Kernels, PackedLinear
from loraplex.models.parameters import DecoderParameters
from loraplex.models.spec import ModelSpec


class _LinearRows(NamedTuple):
    packed: PackedLinear
    first: int
    out_features: int
    num_blocks: int = 0
    """LinearGroup.input_blocks: in a row layer each rank has a part of the inputs."""
    is_cut: bool = False
    """Whether each rank has a part of the outputs, and all are wanted."""

    @property
    def outputs(self) -> slice:
        return slice(self.first, self.first + self.out_features)


class BaseLinears:
    """Linear layers by (layer, module). Row norms are computed at their first use, then kept.

    With several ranks all of them call the same methods for the same layers, in one order.
    """

    def __init__(
        self,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
        channel: Channel | None = None,
    ) -> None:
        """dtype: of the model's activations. channel: to the other ranks; None: there are none."""
        self._kernels = kernels
        self._dtype = dtype
        self._device = device
        self._channel = channel
        self._places: dict[tuple[int, str], _LinearRows] = {}
        self._norms: dict[int, torch.Tensor] = {}

    def add(
        self,
        layer: int,
        packed: PackedLinear,
        modules: Mapping[str, int],
        num_blocks: int = 0,
        *,
        is_cut: bool = False,
    ) -> None:
        """modules: out_features by name, in the order of the packed layer's outputs."""
        first = 0
        for module, out_features in modules.items():
            place = _LinearRows(packed, first, out_features, num_blocks, is_cut)
            self._places[layer, module] = place
            first += out_features

    def bias(self, layer: int, module: str) -> torch.Tensor:
        """Return the bias [out] float64; zeros where the layer has none."""
        place = self._places[layer, module]
        bias = self._kernels.linear_parts(place.packed).tensors[1]
        if bias is None:
            num_outputs = place.out_features
            return torch.zeros(num_outputs, dtype=torch.float64, device=self._device)
        return self._all_outputs(place, bias.double())[place.outputs]

    def project(self, layer: int, module: str, x: torch.Tensor) -> torch.Tensor:
        """Compute x W^T without the bias: x [n, in] -> [n, out] float64.

        A rank has its own inputs of x, and of the result its own outputs.
        """
        place = self._places[layer, module]
        inputs = x.to(self._device, torch.float32).contiguous()
        y = self._sum(place, self._kernels.linear_apart(inputs, place.packed, self._dtype))
        return self._all_outputs(place, y.t()).t()[:, place.outputs].double()

    def gram(self, layer: int, module: str, x: torch.Tensor) -> torch.Tensor:
        """Compute x x^T [n, n] over the inputs of a layer that x [n, in] float64 has."""
        place = self._places[layer, module]
        blocks = x.tensor_split(max(1, place.num_blocks), dim=1)
        return self._sum(place, tree_sum([block @ block.t() for block in blocks]))

    def squared_row_norms(self, layer: int, module: str) -> torch.Tensor:
        """Return the sum of squares of each row of W: [out] float64."""
        place = self._places[layer, module]
        key = id(place.packed)
        if key not in self._norms:
            norms = self._sum(place, self._kernels.squared_row_norms(place.packed))
            self._norms[key] = self._all_outputs(place, norms)
        return self._norms[key][place.outputs]

    def _sum(self, place: _LinearRows, share: torch.Tensor) -> torch.Tensor:
        """Add what the ranks computed of their inputs."""
        if self._channel is None or not place.num_blocks:
            return share
        return tree_sum(self._channel.gather(share.contiguous()))

    def _all_outputs(self, place: _LinearRows, share: torch.Tensor) -> torch.Tensor:
        """Join the ranks' outputs [n, ...] where all are wanted."""
        if self._channel is None or not place.is_cut:
            return share
        return joined_shares(self._channel, share, place.out_features)


def base_linears(
    spec: ModelSpec,
    parameters: DecoderParameters,
    kernels: Kernels,
    channel: Channel | None = None,
) -> BaseLinears:
    """Return the linear layers of a decoder with these parameters, packed by these kernels.

    channel: of the thread that uses them, to the other ranks; None: there are none.
    """
    embedding = parameters.embedding
    linears = BaseLinears(kernels, embedding.dtype, embedding.device, channel)
    stacks = [(spec.layers, parameters.layers)]
    if spec.encoder is not None and parameters.encoder is not None:
        stacks.append((spec.encoder.layers, parameters.encoder.layers))
    for layers, weights in stacks:
        for index, (layer, packed) in enumerate(zip(layers, weights, strict=True)):
            for name, group in layer.linears.items():
                if group.num_experts is not None:
                    continue  # DoRA of experts is refused
                linears.add(index, packed.linears[name], group.outputs, group.input_blocks)
    if parameters.lm_head is not None:
        head = {LM_HEAD: spec.vocab_size}
        is_cut = spec.own_logits is not None
        linears.add(OUTSIDE_LAYERS, parameters.lm_head, head, is_cut=is_cut)
    return linears
