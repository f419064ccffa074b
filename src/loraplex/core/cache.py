"""What sequences keep between steps, as values: for how long, and in which tensors.

Layers that keep the same for the same time are a cache group: they have one pool of blocks, and
one block table per sequence.
"""

from typing import NamedTuple

import msgspec


class Blocks(msgspec.Struct, frozen=True, omit_defaults=True, tag="blocks"):
    """Blocks of positions that attention reads, or a convolution."""

    window: int | None = None
    """Number of newest positions that a position sees, itself included; None: all before it."""
    sinks: int = 0
    """Number of first positions that are seen in addition to a window."""
    by_rows: bool = False
    """Whether a step reads them by whole rows: those of all tokens, draft tokens included."""

    @property
    def reach(self) -> int | None:
        """Return how many newest positions a position reads at most, itself included; None: all."""
        return self.window

    @property
    def name(self) -> str:
        return "no window" if self.window is None else f"a window of {self.window}"


class Chunk(msgspec.Struct, frozen=True, omit_defaults=True, tag="chunk"):
    """Blocks of positions that are read within chunks, which begin at multiples of their size."""

    size: int
    before: int = 0
    """Number of positions in front of the chunk that are read, too."""

    @property
    def reach(self) -> int:
        """Return how many newest positions a position reads at most, itself included."""
        return self.before + self.size

    @property
    def name(self) -> str:
        return f"chunks of {self.size}"


class States(msgspec.Struct, frozen=True, omit_defaults=True, tag="states"):
    """States after every so many positions. Each is a block, and later positions read the last."""

    every: int
    """Number of positions between states, a multiple of Capacity.block_size."""

    @property
    def reach(self) -> int:
        """Return how many newest positions a position reads at most: none, but their state."""
        return 0

    @property
    def name(self) -> str:
        return f"a state every {self.every}"


class Cross(msgspec.Struct, frozen=True, omit_defaults=True, tag="cross"):
    """Blocks of positions of an encoder's input: every position of the sequence reads all of them.

    A sequence takes them once, when it is admitted, and writes nothing to them itself.
    """

    @property
    def reach(self) -> None:
        """Return that all positions are read."""

    @property
    def name(self) -> str:
        return "cross attention"


CacheSpec = Blocks | Chunk | States | Cross
"""Which blocks of a group later positions read: one value of each kind."""


class CachedVectors(NamedTuple):
    """Tensor of a storage: vectors of each position, in the data type of the KV cache."""

    num_heads: int
    size: int


class CachedFloats(NamedTuple):
    """Tensor of a storage: float32 numbers of a block, or of each of its positions."""

    shape: tuple[int, ...]
    is_per_position: bool = False


StorageSpec = tuple[CachedVectors | CachedFloats, ...]
"""Tensors in which a layer keeps its blocks, such as keys and values."""
