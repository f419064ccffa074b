"""The row norms of a packed weight, read from its panels (native/src/packed_weight.h)."""

import dataclasses

import torch

from loraplex.kernels.native.linear import PackedWeight, WeightKind
from loraplex.kernels.ops import PackedLinear

_WIDTH = 16
_FLOATS = {
    WeightKind.FLOAT32: torch.float32,
    WeightKind.BFLOAT16: torch.bfloat16,
    WeightKind.FLOAT16: torch.float16,
}
_INTERLEAVED = {
    WeightKind.BFLOAT16: 2,
    WeightKind.INT8: 2,
    WeightKind.INT8_OFFSETS: 2,
    WeightKind.INT8_BY_INT8: 2,
    WeightKind.INT4: 8,
    WeightKind.INT4_OFFSETS: 8,
    WeightKind.INT4_BY_INT8: 8,
    WeightKind.TABLE4: 4,
}
_BYTES = (WeightKind.INT8, WeightKind.INT8_OFFSETS, WeightKind.INT8_BY_INT8)
_WITH_OFFSETS = (WeightKind.INT8_OFFSETS, WeightKind.INT4_OFFSETS)
_NIBBLES = (12, 8, 4, 0)
_TABLE_BYTES = 32
_VALUES_AT_ONCE = 1 << 18  # in float32 they fit into a cache


def squared_row_norms(packed: PackedLinear) -> torch.Tensor:
    """[out_features] float64: of each row, the sum of its squares. Safe from any thread.

    Blocks are added like their products: (b0 + b1) + (b2 + b3).
    """
    assert isinstance(packed, PackedWeight)
    num_blocks = max(1, packed.num_blocks)
    num_panels = -(-packed.out_features // _WIDTH)
    # Panels are padded to a multiple; what is beyond num_panels holds nothing.
    panels = packed.panels.view(-(-num_panels // 8) * 8, num_blocks, -1)[:num_panels]
    block = dataclasses.replace(packed, in_features=packed.in_features // num_blocks)
    norms = [_block_norms(block, panels[:, number]) for number in range(num_blocks)]
    while len(norms) > 1:
        norms = [left + right for left, right in zip(norms[::2], norms[1::2], strict=True)]
    return norms[0][: packed.out_features]


def _block_norms(block: PackedWeight, panels: torch.Tensor) -> torch.Tensor:
    """[16 * panels] float64. panels: [panels, bytes of a block]."""
    at_once = max(1, _VALUES_AT_ONCE // (block.in_features * _WIDTH))
    firsts = range(0, len(panels), at_once)
    return torch.cat([_sums(block, panels[first : first + at_once]) for first in firsts]).flatten()


def _sums(weight: PackedWeight, panels: torch.Tensor) -> torch.Tensor:
    """[panels, 16] float64, to float32's precision."""
    depth = _INTERLEAVED.get(weight.kind, 1)
    num_steps = -(-weight.in_features // depth)
    if weight.kind in _FLOATS:
        squares = panels.view(_FLOATS[weight.kind]).float().square()
        return _of_outputs(squares.view(len(panels), num_steps, -1).sum(1))
    value_bytes = num_steps * _WIDTH * depth // (1 if weight.kind in _BYTES else 2)
    values, rest = panels[:, :value_bytes].contiguous(), panels[:, value_bytes:].contiguous()
    per_group = weight.group_size // depth
    powers = [
        _of_outputs(_in_groups(sums, num_steps, per_group))
        for exponent in ((2, 1) if weight.kind in _WITH_OFFSETS else (2,))
        for sums in [_powers(weight.kind, values, rest[0, -_TABLE_BYTES:], exponent)]
    ]
    if weight.kind is WeightKind.TABLE4:
        rest = rest[:, :-_TABLE_BYTES].contiguous()
    terms = rest.view(torch.float32).view(len(panels), -1, _WIDTH).double()
    if weight.kind not in _WITH_OFFSETS:
        return (powers[0] * terms.square()).sum(1)
    # (q s - o)^2 = q^2 s^2 - 2 q s o + o^2
    scales, offsets = terms.chunk(2, 1)
    firsts = torch.arange(scales.shape[1]) * weight.group_size
    sizes = (weight.in_features - firsts).clamp(max=weight.group_size).view(-1, 1)
    squares, numbers = powers
    norms = squares * scales.square() - 2 * numbers * scales * offsets + sizes * offsets.square()
    return norms.sum(1)


def _powers(
    kind: WeightKind, values: torch.Tensor, table: torch.Tensor, exponent: int
) -> torch.Tensor:
    """Return the numbers to a power, or the sums of an output's neighbours: [panels, n] float32.

    values: the panels' bytes [panels, bytes]. table: the low bytes of its entries and then their
    high ones, as int16s are cut.
    """
    if kind is WeightKind.TABLE4:
        low, high = table.view(2, -1).short()
        entries = (low | high << 8).float() ** exponent
        # Bits 4 to 7 of a byte are the number of another input of the same output.
        bytes_of_outputs = values.view(len(values), -1, 2, 2, 8).transpose(2, 3)
        both: torch.Tensor = entries + entries.unsqueeze(1)
        return both.flatten()[bytes_of_outputs.int()].flatten(1)
    if kind in _BYTES:
        numbers: torch.Tensor = values.view(torch.int8).float() ** exponent
        return numbers
    # Words of four nibbles; their squares are at most 4 * 8 * 8.
    words = values.view(torch.int16)
    sums = torch.zeros_like(words)
    for shift in _NIBBLES:
        sums += ((words << shift) >> 12) ** exponent
    return sums.float()


def _in_groups(numbers: torch.Tensor, num_steps: int, per_group: int) -> torch.Tensor:
    """[panels, steps * columns] -> the sums of a group's steps [panels, groups, columns]"""
    steps = numbers.view(len(numbers), num_steps, -1)
    missing = -num_steps % per_group
    if missing:
        steps = torch.nn.functional.pad(steps, (0, 0, 0, missing))
    return steps.view(len(steps), -1, per_group, steps.shape[-1]).sum(2)


def _of_outputs(sums: torch.Tensor) -> torch.Tensor:
    """[..., 16 * neighbours] -> [..., 16] float64"""
    return sums.double().view(*sums.shape[:-1], _WIDTH, -1).sum(-1)
