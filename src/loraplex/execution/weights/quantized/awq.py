"""AWQ: `qweight`, `qzeros` and `scales` in 4 bits; w = (code - zero) * scale.

The layout gemm has [in, out / 8] words, whose nibble k is output (0, 2, 4, 6, 1, 3, 5, 7)[k] of
eight; gemv has [out, in / 8] words in order, with zeros and scales padded.
"""

import functools

import torch

from loraplex.core.errors import ConfigError
from loraplex.execution.weights.quantized.stored_weight import (
    Scheme,
    StoredWeight,
    Tensors,
    group_size,
    require,
    require_type,
    unpacked,
)
from loraplex.models.config_fields import ConfigFields

_PARTS = (".qweight", ".qzeros", ".scales")
_NIBBLES_OF_OUTPUTS = (0, 4, 1, 5, 2, 6, 3, 7)
"""Nibble of each of eight outputs."""
_BITS = 4
_PER_WORD = 8


def scheme(fields: ConfigFields) -> Scheme:
    """Return the scheme of a `quantization_config`. Raises ConfigError for another width."""
    bits = fields.integer("bits", fields.optional_integer("w_bit") or _BITS)
    if bits != _BITS:
        raise ConfigError(f"{fields.source}: AWQ in {bits} bits is not supported; supported: 4")
    if fields.text("version", "gemm").lower() == "gemm":
        return Scheme((".qweight",), _PARTS, _decode_gemm)
    size = fields.integer("group_size", fields.optional_integer("q_group_size") or 128)
    return Scheme((".qweight",), _PARTS, functools.partial(_decode_gemv, size=size))


def _decode_gemm(name: str, tensors: Tensors) -> StoredWeight:
    weight, zeros, scales = _checked(name, tensors)
    num_inputs, num_outputs = len(weight), weight.shape[1] * _PER_WORD
    if scales.shape[1] != num_outputs or zeros.shape != (len(scales), weight.shape[1]):
        raise _misfit(name, weight, zeros, scales)
    return StoredWeight(
        codes=_in_order(weight).t().contiguous(),
        zeros=_in_order(zeros).t().contiguous(),
        scales=scales.float().t().contiguous(),
        group_size=group_size(num_inputs, len(scales), name),
        bits=_BITS,
    ).checked(name)


def _in_order(words: torch.Tensor) -> torch.Tensor:
    """[n, out / 8] int32 -> [n, out] uint8"""
    codes = unpacked(words, _BITS, 1, words.shape[1] * _PER_WORD)
    return codes.view(len(words), -1, _PER_WORD)[..., list(_NIBBLES_OF_OUTPUTS)].flatten(1)


def _decode_gemv(name: str, tensors: Tensors, *, size: int) -> StoredWeight:
    weight, zeros, scales = _checked(name, tensors)
    num_outputs, num_inputs = len(weight), weight.shape[1] * _PER_WORD
    if num_inputs % size:
        raise ConfigError(f"{name}: {num_inputs} inputs are no multiple of the group size {size}")
    num_groups = num_inputs // size
    if min(scales.shape[1], zeros.shape[1] * _PER_WORD) < num_groups or not (
        num_outputs == len(zeros) == len(scales)
    ):
        raise _misfit(name, weight, zeros, scales)
    return StoredWeight(
        codes=unpacked(weight, _BITS, 1, num_inputs),
        zeros=unpacked(zeros, _BITS, 1, num_groups),
        scales=scales[:, :num_groups].float(),
        group_size=size,
        bits=_BITS,
    ).checked(name)


def _checked(name: str, tensors: Tensors) -> list[torch.Tensor]:
    found = require(name, tensors, *_PARTS)
    dtypes = ((torch.int32,), (torch.int32,), (torch.float16, torch.bfloat16, torch.float32))
    for part, tensor, allowed in zip(_PARTS, found, dtypes, strict=True):
        require_type(name, part, tensor, allowed, 2)
    return found


def _misfit(
    name: str, weight: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor
) -> ConfigError:
    return ConfigError(
        f"{name}: qweight {list(weight.shape)}, qzeros {list(zeros.shape)} and scales "
        f"{list(scales.shape)} do not fit together"
    )
