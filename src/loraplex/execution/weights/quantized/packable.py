"""Stored weights in the forms that kernels multiply, with the very numbers that they stand for.

Integer codes are moved to be signed, which only changes the offset that is subtracted:
(code - zero) scale - offset = (code - middle) scale - ((zero - middle) scale + offset).
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Final

import torch

from loraplex.core.weight_precision import WeightPrecision
from loraplex.execution.weights.quantized.stored_weight import StoredWeight
from loraplex.kernels.quantization import (
    GROUP_SIZES,
    SUPER_BLOCK,
    QuantizedWeight,
    ScaleLevels,
    StoredNumbers,
    SuperBlockWeight,
    largest_entry,
    regrouped,
)

_TABLE_GROUP: Final = 64
"""Largest group of a table: the smaller it is, the finer the table's whole numbers may be."""
_EXACT: Final = 1e-7
_LARGEST_BYTE: Final = 127
_NARROW_BITS: Final = 4
_WIDE_BITS: Final = 6


def packable(
    parts: Sequence[StoredWeight], num_blocks: int, *, is_exact: bool = False
) -> QuantizedWeight | None:
    """Return one weight [sum of out, in] of parts [out, in]; None: only decoded numbers hold it.

    num_blocks: 1 or more, the blocks of inputs of a row layer, each of which has whole groups.
    is_exact: no table may be rounded, as NF4's is. Parts of which some have a table become bytes.
    """
    if any(part.table is None for part in parts):
        parts = [_in_bytes(part) for part in parts]
    found = [_signed(part, num_blocks, is_exact=is_exact) for part in parts]
    weights = [weight for weight in found if weight is not None]
    if len(weights) < len(found) or len({weight.table for weight in weights}) > 1:
        return None
    size = min(weight.group_size for weight in weights)
    return _stacked([regrouped(weight, size) for weight in weights], dim=0)


def in_super_blocks(parts: Sequence[StoredWeight], num_blocks: int) -> SuperBlockWeight | None:
    """Return one weight [sum of out, in] of parts [out, in] whose scales have two levels.

    num_blocks: as for `packable`. None: a part has other scales, or a block no whole super-blocks.
    """
    if parts[0].shape[-1] % (num_blocks * SUPER_BLOCK):
        return None
    found = [_super_blocks(part) for part in parts]
    return _joined_super_blocks([weight for weight in found if weight is not None], len(parts))


def _super_blocks(weight: StoredWeight) -> SuperBlockWeight | None:
    """Return the weight, of 4 bits if its codes have them."""
    if weight.levels is None:
        return None
    zero = 0 if weight.zeros is None else int(weight.zeros.flatten()[0])
    codes, levels = weight.codes.to(torch.int8), weight.levels
    if weight.bits <= _NARROW_BITS and zero:
        # f d (q - z) = f d q - (z f) d, and z f fits in 8 bits: Q3_K has z = 4 and |f| up to 32.
        levels = dataclasses.replace(
            levels, minima=levels.factors * zero, minimum_scales=levels.scales
        )
        zero = 0
    bits = _NARROW_BITS if weight.bits <= _NARROW_BITS else _WIDE_BITS
    return SuperBlockWeight(bits, weight.group_size, codes - zero, levels)


def _joined_super_blocks(
    weights: Sequence[SuperBlockWeight], count: int, dim: int | None = None
) -> SuperBlockWeight | None:
    """Join `count` weights along an axis that is there, or a new one in front; None: some lack.

    Those of 4 bits are kept in 6 where others have 6, and groups are as small as the smallest.
    """
    if len(weights) < count:
        return None
    size = min(weight.group_size for weight in weights)
    levels = [_in_groups(weight, size) for weight in weights]
    has_minima = any(level.minima is not None for level in levels)
    join = functools.partial(torch.cat, dim=0) if dim is None else torch.stack
    return SuperBlockWeight(
        max(weight.bits for weight in weights),
        size,
        join([weight.values for weight in weights]),
        ScaleLevels(
            join([level.factors for level in levels]),
            join([level.scales for level in levels]),
            join([_or_zeros(level.minima, level.factors) for level in levels])
            if has_minima
            else None,
            join([_or_zeros(level.minimum_scales, level.scales) for level in levels])
            if has_minima
            else None,
        ),
    )


def _in_groups(weight: SuperBlockWeight, size: int) -> ScaleLevels:
    times, num_groups = weight.group_size // size, weight.levels.factors.shape[-1]

    def repeated(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.repeat_interleave(times, -1) if tensor.shape[-1] == num_groups else tensor

    return weight.levels.mapped(repeated)


def _or_zeros(tensor: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(like) if tensor is None else tensor


def stacked_experts(weights: Sequence[StoredNumbers]) -> StoredNumbers | None:
    """Return the weight [E, out, in] of experts [out, in]; None if they have several forms."""
    wide = [weight for weight in weights if isinstance(weight, SuperBlockWeight)]
    if wide:
        return _joined_super_blocks(wide, len(weights), dim=0)
    grouped = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    if len({weight.table for weight in grouped}) > 1:
        return None
    size = min(weight.group_size for weight in grouped)
    return _stacked([regrouped(weight, size) for weight in grouped])


def _stacked(weights: Sequence[QuantizedWeight], dim: int | None = None) -> QuantizedWeight:
    """Join along an axis that is there, or a new one in front. All have one group size.

    Where some have 8 bits, those of 4 are kept in 8: the numbers are the same.
    """
    first = weights[0]
    join = torch.stack if dim is None else functools.partial(torch.cat, dim=dim)
    is_wide = any(weight.precision is WeightPrecision.INT8 for weight in weights)
    offsets = None
    if any(weight.offsets is not None for weight in weights):
        offsets = join(
            [torch.zeros_like(w.scales) if w.offsets is None else w.offsets for w in weights]
        )
    return QuantizedWeight(
        WeightPrecision.INT8 if is_wide else WeightPrecision.INT4,
        first.group_size,
        join([weight.values for weight in weights]),
        join([weight.scales for weight in weights]),
        offsets=offsets,
        table=first.table,
        has_byte_inputs=all(weight.has_byte_inputs for weight in weights),
    )


def _signed(weight: StoredWeight, num_blocks: int, *, is_exact: bool) -> QuantizedWeight | None:
    """Return the weight [out, in] with signed values; None: no kernel has its form."""
    size = _group_size(weight, num_blocks)
    if size is None:
        return None
    if weight.table is not None:
        return _with_table(weight, size, is_exact=is_exact)
    is_signed = weight.codes.dtype == torch.int8
    middle = 0 if is_signed else 1 << (weight.bits - 1)
    values = weight.codes if is_signed else (weight.codes.to(torch.int16) - middle).to(torch.int8)
    zeros = 0.0 if weight.zeros is None else weight.zeros.float()
    offsets = (zeros - middle) * weight.scales
    if weight.offsets is not None:
        offsets = offsets + weight.offsets
    return regrouped(
        QuantizedWeight(
            WeightPrecision.INT4 if weight.bits <= 4 else WeightPrecision.INT8,
            weight.group_size,
            values,
            weight.scales.contiguous(),
            offsets=offsets if bool(offsets.any()) else None,
            has_byte_inputs=weight.has_byte_inputs and not is_exact,
        ),
        size,
    )


def _in_bytes(weight: StoredWeight) -> StoredWeight:
    """Return a weight whose codes are the entries of its table, if bytes can be these."""
    if weight.table is None:
        return weight
    factor = _factor(tuple(weight.table.tolist()), _LARGEST_BYTE)
    products = weight.table * factor
    if bool((products != products.round()).any()):
        return weight
    return dataclasses.replace(
        weight,
        codes=products.to(torch.int8)[weight.codes.int()],
        scales=weight.scales / factor,
        bits=8,
        table=None,
    )


def _group_size(weight: StoredWeight, num_blocks: int) -> int | None:
    """Return the largest size of groups that kernels have and that cuts no stored group."""
    if weight.groups_of_inputs is not None or weight.codes.is_floating_point():
        return None
    block = weight.shape[-1] // num_blocks
    stored = weight.group_size if weight.scales.shape[-1] > 1 else max(GROUP_SIZES)
    most = _TABLE_GROUP if weight.table is not None else max(GROUP_SIZES)
    is_short = weight.bits > 4 and num_blocks == 1  # the last group of bytes may be shorter
    fitting = (
        size
        for size in GROUP_SIZES
        if size <= most and stored % size == 0 and (is_short or block % size == 0)
    )
    return max(fitting, default=None)


def _with_table(weight: StoredWeight, size: int, *, is_exact: bool) -> QuantizedWeight | None:
    """Return a weight whose table has whole numbers: exact, where some multiple of it has them."""
    assert weight.table is not None
    factor = _factor(tuple(weight.table.tolist()), largest_entry(size))
    products = weight.table.double() * factor
    table = products.round().int().tolist()
    if is_exact and bool((products - products.round()).abs().max() > _EXACT * factor):
        return None
    return regrouped(
        QuantizedWeight(
            WeightPrecision.INT4,
            weight.group_size,
            weight.codes.to(torch.int8),
            weight.scales / factor,
            table=tuple(table),
        ),
        size,
    )


@functools.cache
def _factor(table: tuple[float, ...], largest: int) -> int:
    """Return the factor, the smallest of the best, that makes the entries nearly whole numbers."""
    entries = torch.tensor(table, dtype=torch.float64)
    most = int(largest / float(entries.abs().max()))
    factors = torch.arange(1, most + 1, dtype=torch.float64).unsqueeze(1)
    products = entries * factors
    errors = ((products - products.round()).abs() / factors).amax(1)
    return int((errors <= max(_EXACT, float(errors.min()))).nonzero()[0]) + 1
