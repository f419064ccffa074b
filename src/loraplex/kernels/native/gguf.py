"""Blocks of GGUF files, packed for the linear kernels (native/src/gguf.cpp)."""

import ctypes
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch

from loraplex.core.errors import ConfigError
from loraplex.core.gguf import BlockType
from loraplex.kernels.block_rows import BlockRows
from loraplex.kernels.native.library import (
    Int,
    NativeLibrary,
    Pointer,
    Size,
    ThreadPool,
)
from loraplex.kernels.native.linear import BLOCK_COUNTS, NativeWeight, WeightKind

_GROUP_SIZE: Final = 32
"""Values that share a scale in types without super-blocks."""


class _GroupForm(NamedTuple):
    """How panels keep a type without super-blocks."""

    bits: int
    has_offsets: bool = False
    table: str = ""
    """Name of the table of its numbers; empty: it has none."""


_GROUP_FORMS: Final = {
    BlockType.Q4_0.number: _GroupForm(4),
    BlockType.Q4_1.number: _GroupForm(4, has_offsets=True),
    BlockType.Q5_0.number: _GroupForm(8),
    BlockType.Q5_1.number: _GroupForm(8, has_offsets=True),
    BlockType.Q8_0.number: _GroupForm(8),
    BlockType.IQ4_NL.number: _GroupForm(4, table="nl"),
    BlockType.IQ4_XS.number: _GroupForm(4, table="nl"),
    BlockType.MXFP4.number: _GroupForm(4, table="e2m1"),
}
_Q6_K: Final = {BlockType.Q6_K.number}
_NARROW: Final = {kind.number for kind in (BlockType.Q2_K, BlockType.Q3_K, BlockType.Q4_K)}
_IN_THIRTY_TWOS: Final = {BlockType.Q4_K.number, BlockType.Q5_K.number}
"""Types of super-blocks whose groups have 32 values; others have 16."""


class NativeGguf:
    """Reads the blocks where they lie, on all threads."""

    def __init__(self, library: NativeLibrary, pool: ThreadPool) -> None:
        self._pool = pool
        self._packed_bytes = library.size_function(
            "loraplex_packed_weight_bytes", Int, Size, Size, Size, Size
        )
        self._pack = library.function(
            "loraplex_pack_gguf",
            *(Pointer, Int, Size, Size),
            *(Pointer, Pointer, Size, Size),
            *(Pointer, Pointer),
        )

    def pack(
        self, weight: BlockRows, bias: torch.Tensor | None, num_blocks: int
    ) -> NativeWeight | None:
        """Pack a weight [out, in] or [E, out, in], with the very numbers that are stored.

        None: no kernel has its form. Raises ConfigError if a scale is infinite or no number.
        """
        *experts, out_features, in_features = weight.shape
        kind, group_size = _kind_of(set(weight.types.flatten().tolist()))
        num_cuts = max(1, num_blocks)
        if kind is None or in_features % (num_cuts * group_size):
            return None
        form = (kind, group_size, num_blocks, out_features, in_features)
        num_bytes = self._packed_bytes(kind, group_size, num_cuts, *form[3:])
        if not num_bytes or num_blocks not in (0, *BLOCK_COUNTS):
            return None
        num_experts = experts[0] if experts else 1
        panels = torch.empty(num_experts, num_bytes, dtype=torch.uint8)
        addresses = weight.addresses.contiguous().view(num_experts, -1)
        types = weight.types.contiguous().view(num_experts, -1)
        are_finite = ctypes.c_int32()
        for rows, own_types, place in zip(addresses, types, panels, strict=True):
            self._pack(
                *(self._pool.address, kind, group_size, num_cuts),
                *(rows.data_ptr(), own_types.data_ptr(), out_features, in_features),
                *(place.data_ptr(), ctypes.addressof(are_finite)),
            )
            if not are_finite.value:
                raise ConfigError("a scale is infinite or no number")
        wide_bias = None if bias is None else bias.float().contiguous()
        return NativeWeight(*form, panels.flatten(), wide_bias)


def _kind_of(types: set[int]) -> tuple[WeightKind | None, int]:
    """Return the kind of panels that holds rows of these types, and the size of its groups.

    None: no kind holds them, as super-blocks next to other types, or two tables.
    """
    forms = [_GROUP_FORMS[number] for number in types if number in _GROUP_FORMS]
    if forms:
        return (_kind_of_groups(forms) if len(forms) == len(types) else None), _GROUP_SIZE
    group_size = 32 if types <= _IN_THIRTY_TWOS else 16
    if types <= _NARROW:
        return WeightKind.SUPER4, group_size
    return WeightKind.SUPER6 if types == _Q6_K else WeightKind.SUPER6_OFFSETS, group_size


def _kind_of_groups(forms: Sequence[_GroupForm]) -> WeightKind | None:
    """Return the kind in which all have their numbers. Next to others a table's become bytes."""
    tables = {form.table for form in forms}
    if "" not in tables:
        return WeightKind.TABLE4 if len(tables) == 1 else None
    bits = 8 if len(tables) > 1 else max(form.bits for form in forms)
    has_offsets = any(form.has_offsets for form in forms)
    return WeightKind[f"INT{bits}_{'OFFSETS' if has_offsets else 'BY_INT8'}"]
