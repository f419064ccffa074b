"""Weights of transformers' models rounded as ours are: in row layers block by block of inputs."""

import torch

from loraplex.core.weight_precision import WeightPrecision
from loraplex.kernels.quantization import quantize
from loraplex.models.linear_group import LinearGroup

_ROW_LAYERS = ("o_proj.", "down_proj")


def rounded(name: str, weight: torch.Tensor, precision: WeightPrecision) -> torch.Tensor:
    """Return the weight [..., out, in] of this name."""
    group = LinearGroup(
        paths=(),
        outputs={},
        in_features=weight.shape[-1],
        has_bias=False,
        is_row=any(row in name for row in _ROW_LAYERS),
    )
    blocks = weight.flatten(0, -2).tensor_split(max(1, group.input_blocks), dim=1)
    parts = [quantize(block, precision).dequantized() for block in blocks]
    return torch.cat(parts, dim=1).view(weight.shape)
