"""Random weights in the forms that quantised checkpoints have and native kernels multiply."""

import torch

from loraplex.core.weight_precision import WeightPrecision
from loraplex.kernels.quantization import (
    SUPER_BLOCK,
    QuantizedWeight,
    ScaleLevels,
    SuperBlockWeight,
    largest_entry,
)

FORMS = ("int8", "int8 offsets", "int4", "int4 offsets", "table")
SUPER_BLOCK_FORMS = ("super4 minima", "super6", "super6 minima")


def stored_weight(
    form: str, group_size: int, in_features: int, out_features: int, generator: torch.Generator
) -> QuantizedWeight:
    """Weight [out, in] of the form, with every number that it may have; offsets are large."""
    name = form.split()[0]
    low, high = {"int8": (-128, 127), "int4": (-8, 7), "table": (0, 15)}[name]
    sizes = (out_features, in_features)
    values = torch.randint(low, high + 1, sizes, generator=generator).to(torch.int8)
    scales = torch.randn(out_features, -(-in_features // group_size), generator=generator)
    offsets = 100 * torch.randn(scales.shape, generator=generator)
    largest = largest_entry(group_size)
    entries = torch.randint(-largest, largest + 1, (14,), generator=generator)
    return QuantizedWeight(
        WeightPrecision.INT8 if name == "int8" else WeightPrecision.INT4,
        group_size,
        values,
        scales,
        offsets=offsets if form.endswith("offsets") else None,
        table=(-largest, largest, *entries.tolist()) if name == "table" else None,
    )


def super_block_weight(
    form: str, group_size: int, in_features: int, out_features: int, generator: torch.Generator
) -> SuperBlockWeight:
    """Weight [out, in] of the form, with every value, factor and minimum that it may have."""

    def whole(low: int, high: int, size: int) -> torch.Tensor:
        sizes = (out_features, in_features // size)
        return torch.randint(low, high + 1, sizes, generator=generator).to(torch.int8)

    def scales() -> torch.Tensor:
        return torch.randn(out_features, in_features // SUPER_BLOCK, generator=generator)

    is_narrow, has_minima = form.startswith("super4"), form.endswith("minima")
    low, high = (0, 15) if is_narrow else (-32, 31)
    levels = ScaleLevels(
        whole(-128, 127, group_size),
        scales(),
        whole(-128, 127, group_size) if has_minima else None,
        scales() if has_minima else None,
    )
    return SuperBlockWeight(4 if is_narrow else 6, group_size, whole(low, high, 1), levels)
