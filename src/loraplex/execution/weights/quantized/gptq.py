"""GPTQ: `qweight`, `qzeros`, `scales` and `g_idx`, in 2, 3, 4 or 8 bits.

w = (code - zero) * scale of the group that g_idx names for the input. Version 1 of the format
stores zero - 1; some files that claim it store the zero itself.
"""

import functools

import torch

from loraplex.core.errors import ConfigError
from loraplex.execution.weights.quantized.stored_weight import (
    Scheme,
    StoredWeight,
    Tensors,
    bits_of,
    groups_in_order,
    num_words,
    require,
    require_type,
    unpacked,
)
from loraplex.models.config_fields import ConfigFields

_PARTS = (".qweight", ".qzeros", ".scales", ".g_idx")
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_BITS = (2, 3, 4, 8)


def scheme(fields: ConfigFields) -> Scheme:
    """Return the scheme of a `quantization_config`."""
    has_zeros_less_1 = fields.text("checkpoint_format", "gptq") == "gptq"
    decode = functools.partial(
        _decode,
        default_bits=fields.integer("bits", 4),
        has_zeros_less_1=has_zeros_less_1,
        is_symmetric=fields.boolean("sym", default=False),
    )
    return Scheme((".qweight",), _PARTS, decode)


def _decode(
    name: str, tensors: Tensors, *, default_bits: int, has_zeros_less_1: bool, is_symmetric: bool
) -> StoredWeight:
    weight, zeros, scales = require(name, tensors, *_PARTS[:3])
    for part, tensor in zip(_PARTS, (weight, zeros), strict=False):
        require_type(name, part, tensor, (torch.int32,), 2)
    require_type(name, ".scales", scales, _FLOATS, 2)
    num_groups, num_outputs = scales.shape
    groups = tensors.get(".g_idx")
    num_inputs = len(weight) * 32 // default_bits if groups is None else groups.numel()
    bits = bits_of(len(weight), num_inputs)
    if bits not in _BITS or weight.shape[1] != num_outputs:
        raise ConfigError(
            f"{name}.qweight has shape {list(weight.shape)}, which is no weight of {num_inputs} "
            f"inputs and {num_outputs} outputs in 2, 3, 4 or 8 bits"
        )
    if zeros.shape != (num_groups, num_words(num_outputs, bits)):
        raise ConfigError(
            f"{name}.qzeros has shape {list(zeros.shape)}, "
            f"{[num_groups, num_words(num_outputs, bits)]} is meant"
        )
    size = -(-num_inputs // num_groups)
    stored_zeros = unpacked(zeros, bits, 1, num_outputs)
    return StoredWeight(
        codes=unpacked(weight, bits, 0, num_inputs).t().contiguous(),
        scales=scales.float().t().contiguous(),
        zeros=_zeros(
            name, stored_zeros, bits, is_less_1=has_zeros_less_1, is_symmetric=is_symmetric
        )
        .t()
        .contiguous(),
        bits=bits,
        group_size=size,
        groups_of_inputs=groups_in_order(groups, num_inputs, size),
    ).checked(name)


def _zeros(
    name: str, stored: torch.Tensor, bits: int, *, is_less_1: bool, is_symmetric: bool
) -> torch.Tensor:
    """Return the zeros that are meant. A symmetric weight has one for all: 2^(bits - 1)."""
    zeros = ((stored + 1) & ((1 << bits) - 1)) if is_less_1 else stored
    if not is_symmetric:
        return zeros
    middle = 1 << (bits - 1)
    # Some programs write version 2 under the name of version 1.
    for candidate in (zeros, stored, (stored + 1) & ((1 << bits) - 1)):
        if bool((candidate == middle).all()):
            return candidate
    raise ConfigError(
        f"{name}.qzeros: quantization_config has sym, but the zeros are not all {middle}"
    )
