"""bitsandbytes: NF4 and FP4 in blocks along the flattened weight, and int8 with a scale per output.

4 bits: two codes a byte, the first in the high half, whatever type the bytes are stored as;
w = quant_map[code] * absmax of the block. With double quantisation absmax is itself a code:
nested_quant_map[code] * nested_absmax + nested_offset.
"""

import math

import msgspec
import torch

from loraplex.core.errors import ConfigError
from loraplex.execution.weights.quantized.stored_weight import (
    Scheme,
    StoredWeight,
    Tensors,
    nibbles,
    require,
)
from loraplex.models.config_fields import ConfigFields

_ABSMAX, _MAP = ".weight.absmax", ".weight.quant_map"
_NESTED = (".weight.nested_absmax", ".weight.nested_quant_map")
_STATES = (".weight.quant_state.bitsandbytes__nf4", ".weight.quant_state.bitsandbytes__fp4")
_INT8_SCALE = ".SCB"
_INT8_UNIT = 0.0078740157
"""1 / 127 as bitsandbytes writes it."""
_MAX_STATE_BYTES = 1 << 16


class _State(msgspec.Struct):
    blocksize: int
    shape: tuple[int, ...]
    nested_offset: float = 0.0
    nested_blocksize: int = 256


def scheme(fields: ConfigFields) -> Scheme:
    """Return the scheme of a `quantization_config`."""
    if fields.boolean("load_in_8bit", default=False):
        return Scheme((_INT8_SCALE,), (".weight", _INT8_SCALE), _decode_8, (".weight_format",))
    parts = (".weight", _ABSMAX, _MAP, *_NESTED, *_STATES)
    return Scheme((_ABSMAX,), parts, _decode_4)


def _decode_8(name: str, tensors: Tensors) -> StoredWeight:
    codes, scales = require(name, tensors, ".weight", _INT8_SCALE)
    if codes.dtype != torch.int8 or codes.dim() != 2 or scales.shape != codes.shape[:1]:
        raise ConfigError(
            f"{name}: a weight {codes.dtype} {list(codes.shape)} and SCB {list(scales.shape)} do "
            "not fit together"
        )
    return StoredWeight(
        codes=codes,
        scales=(scales.float() * _INT8_UNIT).unsqueeze(1),
        group_size=codes.shape[1],
        bits=8,
    ).checked(name)


def _decode_4(name: str, tensors: Tensors) -> StoredWeight:
    packed, absmax, table = require(name, tensors, ".weight", _ABSMAX, _MAP)
    state = _state(name, tensors)
    num_outputs, num_inputs = state.shape
    num_values = num_outputs * num_inputs
    codes = nibbles(packed.contiguous().view(torch.uint8).flatten(), low_first=False)
    num_blocks = -(-num_values // state.blocksize)
    if codes.numel() != num_values + num_values % 2 or absmax.numel() != num_blocks:
        raise ConfigError(
            f"{name}: {packed.numel() * packed.itemsize} bytes and {absmax.numel()} scales do not "
            f"fit the shape {list(state.shape)} in blocks of {state.blocksize}"
        )
    if table.numel() != 16:
        raise ConfigError(f"{name}: its quant_map has {table.numel()} numbers, 16 are meant")
    scales, size = _of_rows(_scales(name, tensors, absmax, state), state, num_inputs, num_outputs)
    return StoredWeight(
        codes=codes[:num_values].view(num_outputs, num_inputs),
        scales=scales,
        group_size=size,
        table=table.float().flatten(),
        bits=4,
    ).checked(name)


def _state(name: str, tensors: Tensors) -> _State:
    stored = next((tensors[part] for part in _STATES if part in tensors), None)
    if stored is None or stored.dtype != torch.uint8 or stored.numel() > _MAX_STATE_BYTES:
        raise ConfigError(f"{name}.weight has no readable quant_state of bitsandbytes")
    try:
        state = msgspec.json.decode(bytes(stored.flatten().tolist()), type=_State)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{name}.weight.quant_state: {error}") from error
    if len(state.shape) != 2 or min(*state.shape, state.blocksize, state.nested_blocksize) < 1:
        raise ConfigError(
            f"{name}.weight.quant_state: shape {list(state.shape)} in blocks of {state.blocksize}"
        )
    return state


def _scales(name: str, tensors: Tensors, absmax: torch.Tensor, state: _State) -> torch.Tensor:
    """Return the scale of each block, float32."""
    if absmax.dtype != torch.uint8:
        return absmax.float().flatten()
    nested, table = require(name, tensors, *_NESTED)
    wide = nested.float().flatten().repeat_interleave(state.nested_blocksize)
    if table.numel() != 256 or wide.numel() < absmax.numel():
        raise ConfigError(f"{name}: its nested scales do not fit {absmax.numel()} scales")
    codes = absmax.flatten().int()
    return table.float().flatten()[codes] * wide[: codes.numel()] + state.nested_offset


def _of_rows(
    scales: torch.Tensor, state: _State, num_inputs: int, num_outputs: int
) -> tuple[torch.Tensor, int]:
    """Return the scales [out, groups] of blocks that may lie across rows, and the group size."""
    size = math.gcd(state.blocksize, num_inputs)
    starts = torch.arange(0, num_inputs * num_outputs, size)
    return scales[starts // state.blocksize].view(num_outputs, -1), size
