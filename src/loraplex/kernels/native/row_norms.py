"""The row norms of a packed weight, read from its panels (native/src/packed_weight.h)."""

import torch

from loraplex.kernels.native.linear import PackedWeight, WeightKind

_WIDTH = 16
_FLOATS = {
    WeightKind.FLOAT32: torch.float32,
    WeightKind.BFLOAT16: torch.bfloat16,
    WeightKind.FLOAT16: torch.float16,
}
_INTERLEAVED = {WeightKind.BFLOAT16: 2, WeightKind.INT8: 2, WeightKind.INT4: 8}
_NIBBLES = (12, 8, 4, 0)
_VALUES_AT_ONCE = 1 << 22


def squared_row_norms(weight: PackedWeight) -> torch.Tensor:
    """[out_features] float64: of each row, the sum of its squares. Safe from any thread."""
    num_panels = -(-weight.out_features // _WIDTH)
    # Panels are padded to a multiple; what is beyond num_panels holds nothing.
    panel_bytes = weight.panels.numel() // (-(-num_panels // 8) * 8)
    panels = weight.panels.view(-1, panel_bytes)[:num_panels]
    at_once = max(1, _VALUES_AT_ONCE // (weight.in_features * _WIDTH))
    firsts = range(0, num_panels, at_once)
    sums = [_sums(weight, panels[first : first + at_once]) for first in firsts]
    return torch.cat(sums).flatten()[: weight.out_features]


def _sums(weight: PackedWeight, panels: torch.Tensor) -> torch.Tensor:
    """[panels, 16] float64"""
    depth = _INTERLEAVED.get(weight.kind, 1)
    num_blocks = -(-weight.in_features // depth)
    if weight.kind in _FLOATS:
        values = panels.view(_FLOATS[weight.kind]).view(len(panels), num_blocks, _WIDTH, depth)
        return values.float().square().sum((1, 3), dtype=torch.float64)
    value_bytes = num_blocks * depth * _WIDTH
    if weight.kind is WeightKind.INT8:
        values = panels[:, :value_bytes].view(torch.int8).float()
        squares = values.square().view(len(panels), num_blocks, _WIDTH, depth).sum(3)
    else:
        value_bytes //= 2
        words = panels[:, :value_bytes].contiguous().view(torch.int16)
        nibbles = torch.stack([(words << shift) >> 12 for shift in _NIBBLES])
        squares = nibbles.float().square().sum(0).view(len(panels), num_blocks, _WIDTH, 2).sum(3)
    scales = panels[:, value_bytes:].contiguous().view(torch.float32).view(len(panels), -1, _WIDTH)
    missing = scales.shape[1] * (weight.group_size // depth) - num_blocks
    squares = torch.nn.functional.pad(squares, (0, 0, 0, missing)).double()
    groups = squares.view(len(panels), scales.shape[1], -1, _WIDTH).sum(2)
    return (groups * scales.double().square()).sum(1)
