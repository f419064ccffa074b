"""FP8 (e4m3) with one scale for a tensor, for each output, or for each block of 128 x 128.

All published scales multiply, whatever they are called. Formats: `quant_method` fp8 (vLLM,
DeepSeek), fbgemm_fp8, ModelOpt's FP8 algorithms, and compressed-tensors' float-quantized. MXFP8 has
8-bit exponents for scales: code * 2^(scale - 127), one for 32 inputs.
"""

import functools
from collections.abc import Mapping, Sequence

import torch

from loraplex.core.errors import ConfigError
from loraplex.execution.weights.quantized.stored_weight import (
    Scheme,
    StoredWeight,
    Tensors,
    group_size,
    require,
    require_type,
)
from loraplex.models.config_fields import ConfigFields

_SCALES = (".weight_scale", ".weight_scale_inv")
_BLOCKS_OF_ALGORITHMS: Mapping[str, Sequence[int]] = {"FP8_PB_WO": (128, 128)}
"""ModelOpt does not write the size of its blocks."""
_EXPONENT_BIAS = 127
_ROUNDED_INPUTS = ("input", "output", "activation", "q", "k", "v", "kv", "prob")
IGNORED = (
    *(f".{what}_scale" for what in _ROUNDED_INPUTS),
    *(f".{what}_zero_point" for what in _ROUNDED_INPUTS),
    *(f".{what}_global_scale" for what in _ROUNDED_INPUTS),
    ".input_scale_ub",
)
"""Scales of activations and of the KV cache."""


def scheme(fields: ConfigFields) -> Scheme:
    """Return the scheme of a `quantization_config`."""
    block = fields.integers("weight_block_size") or _BLOCKS_OF_ALGORITHMS.get(
        fields.text("quant_algo", "")
    )
    decode = functools.partial(decode_fp8, block=block)
    return Scheme(_SCALES, (".weight", *_SCALES), decode, IGNORED)


def decode_fp8(name: str, tensors: Tensors, block: Sequence[int] | None) -> StoredWeight:
    """block: outputs and inputs that share a scale, where scales have blocks."""
    (codes,) = require(name, tensors, ".weight")
    require_type(name, ".weight", codes, (torch.float8_e4m3fn,), 2)
    stored = next(tensors[part] for part in _SCALES if part in tensors)
    scales = _exponents(stored) if stored.dtype == torch.uint8 else stored.float()
    if scales.dim() == 4:
        # ModelOpt's blocks: [out blocks, 1, in blocks, 1].
        scales = scales.flatten(2).flatten(0, 1)
    num_outputs, num_inputs = codes.shape
    if scales.numel() == 1:
        scales = scales.reshape(1, 1).expand(num_outputs, 1)
    elif scales.numel() == num_outputs and scales.shape[0] == num_outputs:
        scales = scales.reshape(num_outputs, 1)
    elif stored.dtype != torch.uint8:
        scales, size = _of_blocks(name, scales, codes.shape, block)
        return _stored(name, codes, scales, size)
    return _stored(name, codes, scales, group_size(num_inputs, scales.shape[-1], name))


def _exponents(scales: torch.Tensor) -> torch.Tensor:
    return torch.exp2(scales.float() - _EXPONENT_BIAS)


def _of_blocks(
    name: str, scales: torch.Tensor, shape: Sequence[int], block: Sequence[int] | None
) -> tuple[torch.Tensor, int]:
    """Return scales [out, groups], and the inputs of a group."""
    if block is None or len(block) != 2 or min(block) < 1:
        raise ConfigError(
            f"{name}: scales of shape {list(scales.shape)}, but quantization_config has no size of "
            "blocks (weight_block_size)"
        )
    wanted = [-(-size // part) for size, part in zip(shape, block, strict=True)]
    if list(scales.shape) != wanted:
        raise ConfigError(
            f"{name}: scales of shape {list(scales.shape)}, {wanted} is meant for blocks of "
            f"{list(block)}"
        )
    return scales.repeat_interleave(block[0], 0)[: shape[0]], block[1]


def _stored(name: str, codes: torch.Tensor, scales: torch.Tensor, size: int) -> StoredWeight:
    return StoredWeight(codes=codes, scales=scales, group_size=size, bits=8).checked(name)
