"""Random weights in the forms that quantised checkpoints have, for a trial of the kernels."""

from collections.abc import Iterator
from typing import Final, NamedTuple

import torch

from loraplex.core.weight_precision import WeightPrecision
from loraplex.kernels.quantization import QuantizedWeight, largest_entry
from loraplex.models.config_fields import ConfigFields
from loraplex.models.stored_format import StoredFormat, StoredMethod

_INT4, _INT8 = WeightPrecision.INT4, WeightPrecision.INT8
_LONGEST_GROUP: Final = 512
_USUAL_GROUP: Final = 128
_NARROW_BITS: Final = 4
_SPREAD: Final = 0.05
"""Largest weight, about."""


class StoredForm(NamedTuple):
    """How kernels get a weight that was quantised elsewhere (kernels.quantization)."""

    precision: WeightPrecision
    group_size: int
    has_offsets: bool = False
    has_table: bool = False

    def __str__(self) -> str:
        parts = [f"{self.precision} of {self.group_size}"]
        parts += ["with offsets"] * self.has_offsets + ["with a table"] * self.has_table
        return " ".join(parts)

    def random(self, shape: tuple[int, ...], device: torch.device) -> QuantizedWeight:
        """Return a weight [..., out, in]."""
        *rows, num_inputs = shape
        groups = (*rows, -(-num_inputs // self.group_size))
        is_narrow = self.precision is _INT4
        least, end = (-8, 8) if is_narrow else (-127, 128)
        table = None
        if self.has_table:
            least, end = 0, 16
            most = min(127, largest_entry(self.group_size))
            table = tuple(round(most * (2 * index / 15 - 1)) for index in range(16))
        largest = max(abs(number) for number in table or (least, end))
        scales = torch.rand(groups, device=device).add_(0.5).mul_(_SPREAD / largest)
        offsets = torch.randn(groups, device=device).mul_(_SPREAD / 8)
        return QuantizedWeight(
            self.precision,
            self.group_size,
            torch.randint(least, end, shape, dtype=torch.int8, device=device),
            scales,
            offsets if self.has_offsets else None,
            table,
        )


def stored_forms(stored: StoredFormat) -> tuple[StoredForm, ...]:
    """Return the forms that layers of such a checkpoint have; empty: they are widened."""
    if stored.bits is None:
        return ()
    fields = stored.fields
    match stored.method:
        case StoredMethod.GPTQ | StoredMethod.AWQ:
            size = fields.optional_integer("group_size") or fields.optional_integer("q_group_size")
            return _with_and_without_offsets(fields.integer("bits", 4), size or _USUAL_GROUP)
        case StoredMethod.COMPRESSED_TENSORS:
            return tuple(dict.fromkeys(_of_groups(fields)))
        case StoredMethod.BITSANDBYTES:
            if fields.boolean("load_in_8bit", default=False):
                return (StoredForm(_INT8, _LONGEST_GROUP),)
            return (StoredForm(_INT4, 64, has_table=True),)
        case StoredMethod.MXFP4:
            return (StoredForm(_INT4, 32, has_table=True),)
        case StoredMethod.NVFP4:
            return (StoredForm(_INT4, 16, has_table=True),)
        case StoredMethod.GGUF:
            # Q4_K, Q8_0, and layers in which Q4_K and Q6_K are mixed.
            return (
                StoredForm(_INT4, 32, has_offsets=True),
                StoredForm(_INT8, 32),
                StoredForm(_INT8, 16, has_offsets=True),
            )
    return ()


def _of_groups(fields: ConfigFields) -> Iterator[StoredForm]:
    """Yield the forms of compressed-tensors' groups of layers."""
    groups = fields.table("config_groups")
    for name in () if groups is None else groups.tables():
        group = None if groups is None else groups.table(name)
        weights = None if group is None else group.table("weights")
        if weights is None:
            continue
        bits, size = weights.integer("num_bits", 8), weights.optional_integer("group_size")
        if weights.text("type", "int") == "float":
            yield StoredForm(_INT4, size or 16, has_table=True)
        else:
            yield from _with_and_without_offsets(bits, size or -1)


def _with_and_without_offsets(bits: int, group_size: int) -> tuple[StoredForm, ...]:
    """group_size: -1: a row has one scale in the file, and several in memory."""
    precision = _INT4 if bits <= _NARROW_BITS else _INT8
    size = group_size if 0 < group_size <= _LONGEST_GROUP else _LONGEST_GROUP
    return StoredForm(precision, size, has_offsets=True), StoredForm(precision, size)
