"""Models of transformers with weights and inputs rounded as ours are.

In row layers, that is block by block of inputs.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from loraplex.core.weight_precision import WeightPrecision
from loraplex.kernels.quantization import group_size_of, quantize
from loraplex.models.linear_group import LinearGroup

_ROW_LAYERS = ("o_proj.", "down_proj")
_LARGEST_INPUT = 127.0


def rounded(name: str, weight: torch.Tensor, precision: WeightPrecision) -> torch.Tensor:
    """Return the weight [..., out, in] of this name."""
    blocks = weight.flatten(0, -2).tensor_split(_num_blocks(name, weight), dim=1)
    parts = [quantize(block, precision).dequantized() for block in blocks]
    return torch.cat(parts, dim=1).view(weight.shape)


def rounded_inputs(weights: Mapping[str, torch.Tensor]) -> AbstractContextManager[Any]:
    """Round the inputs of products with these weights to 8 bits. weights: by name."""
    return _RoundedInputs(
        {
            weight.untyped_storage().data_ptr(): _num_blocks(name, weight)
            for name, weight in weights.items()
        }
    )


class _RoundedInputs(TorchFunctionMode):
    def __init__(self, num_blocks: Mapping[int, int]) -> None:
        """num_blocks: of the inputs, by the address of a weight's storage."""
        super().__init__()
        self._num_blocks = num_blocks

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.nn.functional.linear:
            x, weight, *rest = args
            if num_blocks := self._num_blocks.get(weight.untyped_storage().data_ptr()):
                args = (_rounded_by_group(x, num_blocks), weight, *rest)
        return func(*args, **(kwargs or {}))


def _rounded_by_group(x: torch.Tensor, num_blocks: int) -> torch.Tensor:
    size = group_size_of(WeightPrecision.INT8, x.shape[-1] // num_blocks)
    groups = [
        group
        for block in x.tensor_split(num_blocks, dim=-1)
        for group in torch.split(block, size, dim=-1)
    ]
    scales = [group.abs().amax(-1, keepdim=True) / _LARGEST_INPUT for group in groups]
    return torch.cat(
        [
            torch.where(scale > 0, (group / scale).round() * scale, 0.0)
            for group, scale in zip(groups, scales, strict=True)
        ],
        dim=-1,
    )


def _num_blocks(name: str, weight: torch.Tensor) -> int:
    group = LinearGroup(
        paths=(),
        outputs={},
        in_features=weight.shape[-1],
        has_bias=False,
        is_row=any(row in name for row in _ROW_LAYERS),
    )
    return max(1, group.input_blocks)
