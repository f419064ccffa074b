"""compressed-tensors: int4 and int8 in words or bytes, FP8, MXFP4 and NVFP4.

Several groups of layers may have different formats; each has `targets`: names, patterns (`re:`) or
classes of modules. A layer's tensors show its format, the group its width.
"""

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from loraplex.core.errors import ConfigError
from loraplex.execution.weights.quantized.four_bit_floats import decode_mxfp4, decode_nvfp4
from loraplex.execution.weights.quantized.fp8 import IGNORED, decode_fp8
from loraplex.execution.weights.quantized.stored_weight import (
    Scheme,
    StoredWeight,
    Tensors,
    group_size,
    groups_in_order,
    num_words,
    packed,
    require,
    require_type,
    unpacked,
)
from loraplex.models.config_fields import ConfigFields

_PACKED, _SCALE, _ZERO = ".weight_packed", ".weight_scale", ".weight_zero_point"
_SHAPE, _GROUPS, _GLOBAL = ".weight_shape", ".weight_g_idx", ".weight_global_scale"
_PARTS = (".weight", _PACKED, _SCALE, _ZERO, _SHAPE, _GROUPS, _GLOBAL)
_MAX_BITS = 8
_FORMAT = "pack-quantized"


class _Group(NamedTuple):
    targets: tuple[str, ...]
    bits: int
    block: tuple[int, ...] | None

    def names(self, module: str) -> bool:
        """Whether a target names the module, by itself or by a pattern."""
        return any(_is_named(target, module) for target in self.targets)


def scheme(fields: ConfigFields) -> Scheme:
    """Return the scheme of a `quantization_config`. Raises ConfigError."""
    decode = functools.partial(
        _decode, groups=tuple(_groups(fields)), ignored=_targets(fields, "ignore")
    )
    return Scheme((_PACKED, _SCALE), _PARTS, decode, IGNORED)


def encode(stored: StoredWeight, dtype: torch.dtype) -> Tensors:
    """Return the tensors of a weight [out, in] as pack-quantized, by the ends of their names.

    stored: codes from 0 with the zero in the middle, in equal groups. dtype: of the scales, which
    it must hold exactly.
    """
    return {
        _PACKED: packed(stored.codes, stored.bits),
        _SCALE: stored.scales.to(dtype).contiguous(),
        _SHAPE: torch.tensor(stored.shape, dtype=torch.int64),
    }


def describe_group(targets: Sequence[str], bits: int, group_size: int | None) -> dict[str, Any]:
    """Return an entry of config_groups for symmetric integers; group_size None: whole rows.

    The fields are those of QuantizationScheme in compressed-tensors.
    """
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": True,
        "strategy": "channel" if group_size is None else "group",
        "group_size": group_size,
        "block_structure": None,
        "actorder": None,
        "dynamic": False,
        "observer": "minmax",
        "observer_kwargs": {},
    }
    return {
        "targets": list(targets),
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
        "format": _FORMAT,
    }


def describe(groups: Mapping[str, Any], ignored: Sequence[str]) -> dict[str, Any]:
    """Return a `quantization_config`. groups: entries of describe_group by name."""
    return {
        "quant_method": "compressed-tensors",
        "format": _FORMAT,
        "quantization_status": "compressed",
        "config_groups": dict(groups),
        "ignore": list(ignored),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _groups(fields: ConfigFields) -> Sequence[_Group]:
    table = fields.table("config_groups")
    if table is None:
        raise ConfigError(f"{fields.source}: config_groups is missing")
    groups = []
    for name in table.tables():
        group = table.table(name)
        weights = None if group is None else group.table("weights")
        if group is None or weights is None:
            continue  # activations alone
        bits = weights.integer("num_bits", _MAX_BITS)
        if bits > _MAX_BITS:
            raise ConfigError(f"{weights.source}: num_bits {bits} is not supported; at most 8 is")
        block = weights.integers("block_structure") or None
        groups.append(_Group(_targets(group, "targets"), bits, block))
    return groups


def _targets(fields: ConfigFields, name: str) -> tuple[str, ...]:
    """Return a list of names and patterns. Raises ConfigError for what is no pattern."""
    targets = tuple(fields.texts(name))
    for target in targets:
        try:
            re.compile(target.removeprefix("re:") if target.startswith("re:") else "")
        except re.error as error:
            raise ConfigError(f"{fields.source}: {name} has {target!r}: {error}") from error
    return targets


def _is_named(target: str, module: str) -> bool:
    if target.startswith("re:"):
        return re.match(target[3:], module) is not None
    return module == target or module.endswith(f".{target}")


def _decode(
    name: str, tensors: Tensors, *, groups: Sequence[_Group], ignored: Sequence[str]
) -> StoredWeight:
    module = name.removesuffix(".weight")
    if any(_is_named(target, module) for target in ignored):
        raise ConfigError(f"{name} is quantised, but quantization_config lists it under ignore")
    group = next((g for g in groups if g.names(module)), None) or (groups[0] if groups else None)
    if group is None:
        raise ConfigError(f"{name} is quantised, but quantization_config has no group for weights")
    if _PACKED not in tensors:
        return _unpacked(name, tensors, group)
    packed, scales = require(name, tensors, _PACKED, _SCALE)
    if packed.dtype == torch.uint8:
        if _GLOBAL in tensors:
            return decode_nvfp4(name, packed, scales, tensors[_GLOBAL])
        return decode_mxfp4(name, packed, scales)
    return _packed(name, tensors, group.bits)


def _unpacked(name: str, tensors: Tensors, group: _Group) -> StoredWeight:
    codes, scales = require(name, tensors, ".weight", _SCALE)
    if codes.dtype != torch.int8:
        return decode_fp8(name, tensors, group.block)
    require_type(name, ".weight", codes, (torch.int8,), 2)
    scales = _scales(scales, len(codes))
    zeros = tensors.get(_ZERO)
    return StoredWeight(
        codes=codes,
        scales=scales,
        zeros=None if zeros is None else zeros.to(torch.int8).reshape(scales.shape),
        group_size=group_size(codes.shape[1], scales.shape[1], name),
        bits=8,
    ).checked(name)


def _packed(name: str, tensors: Tensors, bits: int) -> StoredWeight:
    packed, scales, shape = require(name, tensors, _PACKED, _SCALE, _SHAPE)
    require_type(name, _PACKED, packed, (torch.int32,), 2)
    if shape.numel() != 2 or shape.is_floating_point():
        raise ConfigError(f"{name}: its weight_shape must be two integers")
    num_outputs, num_inputs = shape.flatten().tolist()
    if packed.shape != (num_outputs, num_words(num_inputs, bits)):
        raise ConfigError(
            f"{name}{_PACKED} has shape {list(packed.shape)}, "
            f"{[num_outputs, num_words(num_inputs, bits)]} is meant for {bits} bits"
        )
    scales = _scales(scales, num_outputs)
    size = -(-num_inputs // scales.shape[1])
    return StoredWeight(
        codes=unpacked(packed, bits, 1, num_inputs),
        scales=scales,
        zeros=_zeros(name, tensors, bits, scales.shape),
        group_size=size,
        groups_of_inputs=groups_in_order(tensors.get(_GROUPS), num_inputs, size),
        bits=bits,
    ).checked(name)


def _zeros(name: str, tensors: Tensors, bits: int, shape: torch.Size) -> torch.Tensor:
    """Return the zeros of codes that are stored without a sign: the middle, if they have none."""
    if _ZERO not in tensors:
        return torch.full(shape, 1 << (bits - 1), dtype=torch.uint8)
    words = tensors[_ZERO]
    require_type(name, _ZERO, words, (torch.int32,), 2)
    if words.shape != (num_words(shape[0], bits), shape[1]):
        raise ConfigError(
            f"{name}{_ZERO} has shape {list(words.shape)}, "
            f"{[num_words(shape[0], bits), shape[1]]} is meant"
        )
    return unpacked(words, bits, 0, shape[0])


def _scales(scales: torch.Tensor, num_outputs: int) -> torch.Tensor:
    """Return scales [out, groups] from those of a tensor, of each output, or of groups."""
    if scales.numel() == 1:
        return scales.float().reshape(1, 1).expand(num_outputs, 1)
    return scales.float().reshape(num_outputs, -1) if scales.dim() == 1 else scales.float()
