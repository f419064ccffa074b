"""Block tables of a sequence in all cache groups, and the results of KVBlocks with them."""

from typing import NamedTuple

from loraplex.core.plan import BlockId, BlockTransfer

BlockTable = list[BlockId]
"""Blocks of a sequence in one cache group. Gaps (NO_BLOCK) are where a window has passed."""

BlockTables = list[BlockTable]
"""Tables of a sequence, one for each cache group; empty: it has no blocks."""

NewBlocks = tuple[tuple[BlockId, ...], ...]
"""Blocks to append to the tables of a sequence, as in RowStep.new_block_ids."""

BlockCounts = tuple[int, ...]
"""Number of blocks in each cache group."""


class AdmittedBlocks(NamedTuple):
    """The first blocks of a sequence."""

    block_tables: BlockTables
    """Blocks found in the prefix cache, then new ones. A found one that a window has passed is a
    gap."""
    num_cached_tokens: int
    """Tokens whose KV is in these blocks already: a multiple of the block size, so
    num_cached_tokens // block_size is the sequence's num_hashed_blocks."""
    num_new_tokens: int
    """Tokens that fit in the other blocks: at least 1."""
    input_to_encode: int = 0
    """Tokens of the encoder's input whose keys and values are not in the blocks yet: all or 0."""


class Offload(NamedTuple):
    """Transfer of block tables to the host."""

    host_tables: BlockTables
    """Host tables, with the gaps of the block tables."""
    transfers: tuple[BlockTransfer, ...]


class Loaded(NamedTuple):
    """Block tables that came back from the host."""

    block_tables: BlockTables
    transfers: tuple[BlockTransfer, ...]
    num_hashed_blocks: int
    """Leading blocks that the prefix cache still had; the others must be published again."""
