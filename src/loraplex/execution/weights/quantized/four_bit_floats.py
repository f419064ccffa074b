"""MXFP4 and NVFP4: numbers of 4 bits (e2m1), two a byte, the even input in the low half.

MXFP4: one exponent for 32 inputs, w = E2M1[code] * 2^(scale - 127). GPT-OSS stores the weights of
all experts as `<tensor>_blocks` [experts, out, in / 32, 16] and `<tensor>_scales`. NVFP4: one e4m3
scale for 16 inputs, and one number for the tensor, by which compressed-tensors divides
(`weight_global_scale`) and ModelOpt multiplies (`weight_scale_2`).
"""

import torch

from loraplex.core.errors import ConfigError
from loraplex.execution.weights.quantized.fp8 import IGNORED
from loraplex.execution.weights.quantized.stored_weight import (
    Scheme,
    StoredWeight,
    Tensors,
    group_size,
    nibbles,
    require,
    require_type,
)
from loraplex.models.config_fields import ConfigFields

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BLOCKS, _SCALES = "_blocks", "_scales"
_MODELOPT_SCALES = (".weight_scale", ".weight_scale_2")
_EXPONENT_BIAS = 127
_NO_NUMBER = 255


def e2m1() -> torch.Tensor:
    """Return the number of each code."""
    return torch.tensor([*_MAGNITUDES, *(-number for number in _MAGNITUDES)])


def scheme(fields: ConfigFields) -> Scheme:
    """Return the scheme of GPT-OSS."""
    del fields
    return Scheme((_BLOCKS,), (_BLOCKS, _SCALES), _decode_experts, weight="", is_transposed=True)


def modelopt_scheme(fields: ConfigFields) -> Scheme:
    """Return the scheme of ModelOpt's NVFP4."""
    del fields
    parts = (".weight", *_MODELOPT_SCALES)
    return Scheme((".weight_scale_2",), parts, _decode_modelopt, IGNORED)


def _decode_modelopt(name: str, tensors: Tensors) -> StoredWeight:
    packed, scales, factor = require(name, tensors, ".weight", *_MODELOPT_SCALES)
    require_type(name, ".weight", packed, (torch.uint8,), 2)
    return _decode_nvfp4(name, packed, scales, scales.float() * _number(name, factor))


def _decode_experts(name: str, tensors: Tensors) -> StoredWeight:
    blocks, scales = require(name, tensors, _BLOCKS, _SCALES)
    require_type(name, _BLOCKS, blocks, (torch.uint8,), 4)
    return decode_mxfp4(name, blocks.flatten(-2), scales)


def decode_mxfp4(name: str, packed: torch.Tensor, scales: torch.Tensor) -> StoredWeight:
    """packed: [..., out, in / 2] uint8. scales: [..., out, groups] uint8."""
    require_type(name, " (scales)", scales, (torch.uint8,), packed.dim())
    if bool((scales == _NO_NUMBER).any()):
        raise ConfigError(f"{name}: a scale is no number")
    return _stored(name, packed, torch.exp2(scales.float() - _EXPONENT_BIAS))


def decode_nvfp4(
    name: str, packed: torch.Tensor, scales: torch.Tensor, divisor: torch.Tensor
) -> StoredWeight:
    """packed: [out, in / 2] uint8. scales: [out, groups] e4m3. divisor: of all scales."""
    return _decode_nvfp4(name, packed, scales, scales.float() / _number(name, divisor))


def _number(name: str, scale: torch.Tensor) -> torch.Tensor:
    if scale.numel() != 1:
        raise ConfigError(f"{name}: its global scale has {scale.numel()} numbers, 1 is meant")
    return scale.float().reshape(())


def _decode_nvfp4(
    name: str, packed: torch.Tensor, scales: torch.Tensor, products: torch.Tensor
) -> StoredWeight:
    """products: the scales with the number of the tensor."""
    require_type(name, " (scales)", scales, (torch.float8_e4m3fn,), packed.dim())
    return _stored(name, packed, products)


def _stored(name: str, packed: torch.Tensor, scales: torch.Tensor) -> StoredWeight:
    codes = nibbles(packed, low_first=True)
    size = group_size(codes.shape[-1], scales.shape[-1], name)
    return StoredWeight(codes=codes, scales=scales, group_size=size, table=e2m1(), bits=4).checked(
        name
    )
