"""Prefix cache: a tree of full KV blocks, found by their tokens.

The cache knows content, not holders: the block pools decide when a block's content is lost, and
`memory.kv_blocks` joins the two.
"""

import dataclasses
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from loraplex.core.plan import NO_BLOCK, BlockId, CacheGroupId
from loraplex.memory.kv_salt import LaterSalts, salt_before

TOKEN_BYTES = 8
PACKED_BLOCKS = 64
"""Blocks whose tokens a look-up encodes at once: one call for many is faster, and the cost of a
prompt whose beginning is not known stays small."""


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Encode tokens with eight bytes each, little-endian."""
    return struct.pack(f"<{len(token_ids)}q", *token_ids)


class Forgotten(NamedTuple):
    """Consequences of the loss of a block's content."""

    orphans: tuple[tuple[CacheGroupId, BlockId], ...] = ()
    """Blocks that no look-up can reach any more; they are forgotten, too."""
    heir: BlockId | None = None
    """Block of equal content in the same cache group, held by a sequence, that is served from now
    on."""


@dataclasses.dataclass(slots=True, eq=False)
class _Node:
    """One content: a parent, a salt and the block's tokens."""

    key: bytes
    """The salt and the tokens, which have the same number of bytes in every key. A node's children
    are found by it: a match compares the content itself and never rests on a hash of it."""
    parent: "_Node | None"
    block_ids: tuple[dict[BlockId, None], ...]
    """Blocks with this content in each cache group: the first is served, the others were computed
    concurrently. There is one in group 0 as long as the node is known."""
    children: dict[bytes, "_Node"] = dataclasses.field(default_factory=dict)


class PrefixCache:
    """Full blocks of computed tokens, served to later sequences with an equal beginning.

    Invariant: the parent of every node is known, so every known block can be reached. A node is
    known as long as cache group 0 has a block of it. Other groups can lose theirs alone.

    A disabled cache never takes a block, and so never matches one.
    """

    def __init__(
        self,
        block_size: int,
        num_cache_groups: int,
        *,
        enabled: bool = True,
    ) -> None:
        self._block_size = block_size
        self._num_cache_groups = num_cache_groups
        self._enabled = enabled
        self._roots: dict[bytes, _Node] = {}
        self._node_of: tuple[dict[BlockId, _Node], ...] = tuple({} for _ in range(num_cache_groups))

    def serves(self, cache_group: CacheGroupId, block_id: BlockId) -> bool:
        """Return whether `match` can find this block."""
        node = self._node_of[cache_group].get(block_id)
        return node is not None and next(iter(node.block_ids[cache_group])) == block_id

    def served(self, cache_group: CacheGroupId) -> set[BlockId]:
        """Return all blocks that `match` can find."""
        nodes = self._node_of[cache_group].values()
        return {next(iter(node.block_ids[cache_group])) for node in nodes}

    def match(
        self,
        token_ids: Sequence[int],
        kv_salt: bytes,
        max_tokens: int | None = None,
        later_salts: LaterSalts = (),
    ) -> list[list[BlockId]]:
        """Return the blocks of the longest known beginning of token_ids, whole blocks only.

        The result has a table of equal length for each cache group. A gap in a table is a block
        that its group has lost; the first table has none. At most `max_tokens` tokens are matched.
        A sequence must compute at least one token, so its limit is len(token_ids) - 1.
        later_salts: those that replace kv_salt from some position on.
        """
        limit = len(token_ids) if max_tokens is None else min(max_tokens, len(token_ids))
        nodes: list[_Node] = []
        siblings = self._roots
        for key in self._keys(token_ids, kv_salt, limit // self._block_size, later_salts):
            node = siblings.get(key)
            if node is None:
                break
            nodes.append(node)
            siblings = node.children
        return [
            [next(iter(node.block_ids[cache_group]), NO_BLOCK) for node in nodes]
            for cache_group in range(self._num_cache_groups)
        ]

    def insert(
        self,
        block_ids: Sequence[BlockId],
        parent_id: BlockId | None,
        token_ids: Sequence[int],
        kv_salt: bytes,
    ) -> list[CacheGroupId]:
        """Add a full computed block of each cache group; return the groups that serve theirs now.

        `block_ids` may have gaps, except for group 0. `parent_id` is the block of group 0 before it
        in the same sequence, None for the first block. A group serves the new block unless it has
        one with the same content: then the first block keeps being served, and this one is only
        remembered as its equal (see Forgotten.heir). No group does if the cache is disabled, or if
        the parent is unknown.
        """
        assert len(token_ids) == self._block_size, f"{len(token_ids)} tokens in a full block"
        parent = None if parent_id is None else self._node_of[0].get(parent_id)
        if not self._enabled or (parent_id is not None and parent is None):
            return []
        key = kv_salt + pack_tokens(token_ids)
        siblings = self._roots if parent is None else parent.children
        node = siblings.get(key)
        if node is None:
            node = siblings[key] = _Node(key, parent, tuple({} for _ in self._node_of))
        return [
            cache_group
            for cache_group, block_id in enumerate(block_ids)
            if block_id != NO_BLOCK and self._add(node, cache_group, block_id)
        ]

    def forget(self, cache_group: CacheGroupId, block_id: BlockId) -> Forgotten:
        """Remove a block whose content is lost. No change if it was not known."""
        node = self._node_of[cache_group].get(block_id)
        if node is None:
            return Forgotten()
        was_served = self.serves(cache_group, block_id)
        equals = node.block_ids[cache_group]
        del self._node_of[cache_group][block_id], equals[block_id]
        if not was_served:
            return Forgotten()
        if equals:
            return Forgotten(heir=next(iter(equals)))
        return Forgotten() if cache_group else Forgotten(orphans=self._remove_tree(node))

    def check(self) -> None:
        """Assert that every known block has one node, and every node a known parent."""
        nodes = set(self._node_of[0].values())
        for node in nodes:
            siblings = self._roots if node.parent is None else node.parent.children
            assert siblings.get(node.key) is node, "a node that its parent does not know"
            assert node.parent is None or node.parent in nodes, "an orphan"
        tree = [*self._roots.values(), *(c for node in nodes for c in node.children.values())]
        assert len(tree) == len(nodes), "a node without a block in cache group 0"
        for cache_group, node_of in enumerate(self._node_of):
            found = {b: node for node in nodes for b in node.block_ids[cache_group]}
            assert sum(len(node.block_ids[cache_group]) for node in nodes) == len(node_of)
            assert found == node_of

    def _keys(
        self,
        token_ids: Sequence[int],
        kv_salt: bytes,
        num_blocks: int,
        later_salts: LaterSalts,
    ) -> Iterator[bytes]:
        """Yield the keys of the nodes of the first blocks."""
        block_bytes, piece = TOKEN_BYTES * self._block_size, PACKED_BLOCKS * self._block_size
        end = num_blocks * self._block_size
        for first in range(0, end, piece):
            packed = pack_tokens(token_ids[first : min(end, first + piece)])
            for start in range(0, len(packed), block_bytes):
                salt = kv_salt
                if later_salts:
                    block_end = first + start // TOKEN_BYTES + self._block_size
                    salt = salt_before(block_end, kv_salt, later_salts)
                yield salt + packed[start : start + block_bytes]

    def _add(self, node: _Node, cache_group: CacheGroupId, block_id: BlockId) -> bool:
        """Add a block to a node; return whether it is the one that is served."""
        assert block_id not in self._node_of[cache_group], f"block {block_id} is known already"
        equals = node.block_ids[cache_group]
        equals[block_id] = None
        self._node_of[cache_group][block_id] = node
        return len(equals) == 1

    def _remove_tree(self, root: _Node) -> tuple[tuple[CacheGroupId, BlockId], ...]:
        """Remove a node and everything under it; return the blocks that were still known."""
        del (self._roots if root.parent is None else root.parent.children)[root.key]
        orphans: list[tuple[CacheGroupId, BlockId]] = []
        stack = [root]
        while stack:
            node = stack.pop()
            for cache_group, block_ids in enumerate(node.block_ids):
                for block_id in block_ids:
                    del self._node_of[cache_group][block_id]
                    orphans.append((cache_group, block_id))
            stack.extend(node.children.values())
        return tuple(orphans)
