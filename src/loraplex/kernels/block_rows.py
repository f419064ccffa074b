"""Rows of a weight as blocks of a GGUF file, which kernels read where they lie."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import torch

from loraplex.core.gguf import BlockType

BLOCK_TYPES: Final[Mapping[int, BlockType]] = MappingProxyType(
    {kind.number: kind for kind in BlockType if kind.num_values > 1}
)
"""Types of blocks by their numbers in files, which are those of native/include/loraplex/gguf.h."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class BlockRows:
    """Weight [..., out, in]: each row is blocks, one after another."""

    addresses: torch.Tensor
    """[..., out] int64, of a row's first block."""
    types: torch.Tensor
    """[..., out] uint8, a key of BLOCK_TYPES."""
    num_inputs: int
    memory: tuple[torch.Tensor, ...]
    """What the addresses lie in."""

    @classmethod
    def of(cls, data: torch.Tensor, kind: BlockType, shape: tuple[int, ...]) -> "BlockRows":
        """Return the rows of a tensor of this shape. data: its bytes."""
        row_bytes = shape[-1] // kind.num_values * kind.num_bytes
        rows = torch.arange(data.numel() // row_bytes).view(shape[:-1])
        types = torch.full(shape[:-1], kind.number, dtype=torch.uint8)
        return cls(data.data_ptr() + rows * row_bytes, types, shape[-1], (data,))

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.addresses.shape, self.num_inputs)

    def rows(self, choose: Callable[[torch.Tensor], torch.Tensor]) -> "BlockRows":
        """Return what `choose` takes of the axes in front of the last one."""
        return dataclasses.replace(self, addresses=choose(self.addresses), types=choose(self.types))

    def inputs(self, first: int, end: int) -> "BlockRows | None":
        """Return the weight of the inputs from first to end - 1; None: they cut a block."""
        skipped = torch.zeros(max(BLOCK_TYPES) + 1, dtype=torch.int64)
        for number in set(self.types.flatten().tolist()):
            kind = BLOCK_TYPES[number]
            if first % kind.num_values or end % kind.num_values:
                return None
            skipped[number] = first // kind.num_values * kind.num_bytes
        addresses = self.addresses + skipped[self.types.int()]
        return dataclasses.replace(self, addresses=addresses, num_inputs=end - first)


def joined_rows(parts: Sequence[BlockRows]) -> BlockRows:
    """Return one weight of the rows [out] of several, which have the same inputs."""
    return BlockRows(
        torch.cat([part.addresses for part in parts]),
        torch.cat([part.types for part in parts]),
        parts[0].num_inputs,
        tuple(memory for part in parts for memory in part.memory),
    )
