"""The row norms of a packed weight, read from its panels (native/src/packed_weight.h)."""

import dataclasses

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
_VALUES_AT_ONCE = 1 << 18  # in float32 they fit into a cache


def squared_row_norms(weight: PackedWeight) -> torch.Tensor:
    """[out_features] float64: of each row, the sum of its squares. Safe from any thread.

    Blocks are added like their products: (b0 + b1) + (b2 + b3).
    """
    num_blocks = max(1, weight.num_blocks)
    num_panels = -(-weight.out_features // _WIDTH)
    # Panels are padded to a multiple; what is beyond num_panels holds nothing.
    panels = weight.panels.view(-(-num_panels // 8) * 8, num_blocks, -1)[:num_panels]
    block = dataclasses.replace(weight, in_features=weight.in_features // num_blocks)
    norms = [_block_norms(block, panels[:, number]) for number in range(num_blocks)]
    while len(norms) > 1:
        norms = [left + right for left, right in zip(norms[::2], norms[1::2], strict=True)]
    return norms[0][: weight.out_features]


def _block_norms(block: PackedWeight, panels: torch.Tensor) -> torch.Tensor:
    """[16 * panels] float64. panels: [panels, bytes of a block]."""
    at_once = max(1, _VALUES_AT_ONCE // (block.in_features * _WIDTH))
    firsts = range(0, len(panels), at_once)
    return torch.cat([_sums(block, panels[first : first + at_once]) for first in firsts]).flatten()


def _sums(weight: PackedWeight, panels: torch.Tensor) -> torch.Tensor:
    """[panels, 16] float64, to float32's precision."""
    depth = _INTERLEAVED.get(weight.kind, 1)
    num_blocks = -(-weight.in_features // depth)
    columns = _WIDTH * depth
    value_bytes = num_blocks * columns
    if weight.kind in _FLOATS:
        values = panels.view(_FLOATS[weight.kind])
    elif weight.kind is WeightKind.INT8:
        values = panels[:, :value_bytes].view(torch.int8)
    else:
        # Two words of four nibbles; the squares of a word are at most 4 * 8 * 8.
        columns, value_bytes = 2 * _WIDTH, value_bytes // 2
        words = panels[:, :value_bytes].contiguous().view(torch.int16)
        values = _word_norms(words)
    squares = values.float().square().view(len(panels), num_blocks, columns)
    if weight.kind in _FLOATS:
        return _of_outputs(squares.sum(1))
    scales = panels[:, value_bytes:].contiguous().view(torch.float32).view(len(panels), -1, _WIDTH)
    per_group = weight.group_size // depth
    missing = scales.shape[1] * per_group - num_blocks
    if missing:
        squares = torch.nn.functional.pad(squares, (0, 0, 0, missing))
    groups = squares.view(len(panels), -1, per_group, columns).sum(2)
    return (_of_outputs(groups) * scales.double().square()).sum(1)


def _word_norms(words: torch.Tensor) -> torch.Tensor:
    """The root of the sum of each word's squares."""
    squares = torch.zeros_like(words)
    for shift in _NIBBLES:
        squares += ((words << shift) >> 12).square_()
    return squares.float().sqrt_()


def _of_outputs(sums: torch.Tensor) -> torch.Tensor:
    """[..., 16 * neighbours] -> [..., 16] float64"""
    return sums.double().view(*sums.shape[:-1], _WIDTH, -1).sum(-1)
