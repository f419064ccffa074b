"""Prefix cache: a tree of full KV blocks, found by chained hashes of their tokens.

The cache knows content, not holders: the block pools decide when a block's content is lost, and
`memory.kv_blocks` joins the two.
"""

import dataclasses
import hashlib
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

from loraplex.core.plan import NO_BLOCK, BlockId, KVGroupId

ROOT_HASH = bytes(32)
"""The parent hash of a first block."""

BlockHash = bytes
HashFunction = Callable[[bytes, bytes, bytes], BlockHash]


def hash_block(parent_hash: bytes, kv_salt: bytes, tokens: bytes) -> BlockHash:
    """Return the SHA-256 of one block's content and everything before it.

    The salt is in every block, not only in the first. The encoding has one reading: the parent
    hash has 32 bytes, the salt carries its length, the tokens are the rest.
    """
    head = struct.pack("<32sQ", parent_hash, len(kv_salt))
    return hashlib.sha256(head + kv_salt + tokens).digest()


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Encode tokens with eight bytes each, little-endian."""
    return struct.pack(f"<{len(token_ids)}q", *token_ids)


class Forgotten(NamedTuple):
    """Consequences of the loss of a block's content."""

    orphans: tuple[tuple[KVGroupId, BlockId], ...] = ()
    """Blocks that no look-up can reach any more; they are forgotten, too."""
    heir: BlockId | None = None
    """Block of equal content in the same KV group, held by a sequence, that is served from now on.
    """


@dataclasses.dataclass(slots=True, eq=False)
class _Node:
    """One content: a parent, a salt and the block's tokens."""

    digest: BlockHash
    parent: "_Node | None"
    kv_salt: bytes
    tokens: bytes
    block_ids: tuple[dict[BlockId, None], ...]
    """Blocks with this content in each KV group: the first is served, the others were computed
    concurrently."""
    children: dict[BlockHash, "_Node"] = dataclasses.field(default_factory=dict)

    def holds(self, parent: "_Node | None", kv_salt: bytes, tokens: bytes) -> bool:
        """Compare the content itself: a match never rests on the hash alone."""
        return self.parent is parent and self.kv_salt == kv_salt and self.tokens == tokens


@dataclasses.dataclass(frozen=True, slots=True)
class _LastMatch:
    """Nodes of the last beginning that was matched: sequences of one prompt come one after the
    other, and to hash 128,000 tokens takes 40 ms."""

    kv_salt: bytes = b""
    token_ids: Sequence[int] = ()
    nodes: Sequence[_Node] = ()

    def nodes_of(self, token_ids: Sequence[int], kv_salt: bytes) -> Sequence[_Node]:
        """Return the nodes, if token_ids begin with their tokens."""
        is_same = kv_salt == self.kv_salt and token_ids[: len(self.token_ids)] == self.token_ids
        return self.nodes if is_same else ()


class PrefixCache:
    """Full blocks of computed tokens, served to later sequences with an equal beginning.

    Invariant: the parent of every node is known, so every known block can be reached. A node is
    known as long as KV group 0 has a block of it. Other groups can lose theirs alone.

    A disabled cache never takes a block, and so never matches one.
    """

    def __init__(
        self,
        block_size: int,
        num_kv_groups: int,
        *,
        enabled: bool = True,
        hash_function: HashFunction = hash_block,
    ) -> None:
        self._block_size = block_size
        self._num_kv_groups = num_kv_groups
        self._enabled = enabled
        self._hash = hash_function
        self._last_match = _LastMatch()
        self._nodes: dict[BlockHash, _Node] = {}
        self._node_of: tuple[dict[BlockId, _Node], ...] = tuple({} for _ in range(num_kv_groups))

    def __len__(self) -> int:
        """Return the number of contents that can be served."""
        return len(self._nodes)

    def serves(self, kv_group: KVGroupId, block_id: BlockId) -> bool:
        """Return whether `match` can find this block."""
        node = self._node_of[kv_group].get(block_id)
        return node is not None and next(iter(node.block_ids[kv_group])) == block_id

    def match(
        self, token_ids: Sequence[int], kv_salt: bytes, max_tokens: int | None = None
    ) -> list[list[BlockId]]:
        """Return the blocks of the longest known beginning of token_ids, whole blocks only.

        The result has a table of equal length for each KV group. A gap in a table is a block that
        its group has lost; the first table has none. At most `max_tokens` tokens are matched. A
        sequence must compute at least one token, so its limit is len(token_ids) - 1.
        """
        limit = len(token_ids) if max_tokens is None else min(max_tokens, len(token_ids))
        known = self._last_match.nodes_of(token_ids, kv_salt)
        nodes = list(known[: limit // self._block_size])
        while nodes and self._nodes.get(nodes[-1].digest) is not nodes[-1]:
            nodes.pop()  # forgotten since then; a node's parents are known as long as it is
        for start in range(
            len(nodes) * self._block_size, limit - self._block_size + 1, self._block_size
        ):
            tokens = pack_tokens(token_ids[start : start + self._block_size])
            parent = nodes[-1] if nodes else None
            child = self._nodes.get(self._digest(parent, kv_salt, tokens))
            if child is None or not child.holds(parent, kv_salt, tokens):
                break
            nodes.append(child)
        if nodes and (len(nodes) > len(known) or nodes[-1] is not known[len(nodes) - 1]):
            matched = token_ids[: len(nodes) * self._block_size]
            self._last_match = _LastMatch(kv_salt, matched, nodes)
        return [
            [next(iter(node.block_ids[kv_group]), NO_BLOCK) for node in nodes]
            for kv_group in range(self._num_kv_groups)
        ]

    def insert(
        self,
        block_ids: Sequence[BlockId],
        parent_id: BlockId | None,
        token_ids: Sequence[int],
        kv_salt: bytes,
    ) -> list[KVGroupId]:
        """Add a full computed block of each KV group; return the groups that serve theirs now.

        `block_ids` may have gaps, except for group 0. `parent_id` is the block of group 0 before it
        in the same sequence, None for the first block. A group serves the new block unless it has
        one with the same content: then the first block keeps being served, and this one is only
        remembered as its equal (see Forgotten.heir). No group does if the cache is disabled, if the
        parent is unknown, or if the hash is taken by another content.
        """
        assert len(token_ids) == self._block_size, f"{len(token_ids)} tokens in a full block"
        parent = None if parent_id is None else self._node_of[0].get(parent_id)
        if not self._enabled or (parent_id is not None and parent is None):
            return []
        tokens = pack_tokens(token_ids)
        digest = self._digest(parent, kv_salt, tokens)
        node = self._nodes.get(digest)
        if node is None:
            node = self._new_node(digest, parent, kv_salt, tokens)
        elif not node.holds(parent, kv_salt, tokens):
            return []
        return [
            kv_group
            for kv_group, block_id in enumerate(block_ids)
            if block_id != NO_BLOCK and self._add(node, kv_group, block_id)
        ]

    def forget(self, kv_group: KVGroupId, block_id: BlockId) -> Forgotten:
        """Remove a block whose content is lost. No change if it was not known."""
        node = self._node_of[kv_group].get(block_id)
        if node is None:
            return Forgotten()
        was_served = self.serves(kv_group, block_id)
        equals = node.block_ids[kv_group]
        del self._node_of[kv_group][block_id], equals[block_id]
        if not was_served:
            return Forgotten()
        if equals:
            return Forgotten(heir=next(iter(equals)))
        return Forgotten() if kv_group else Forgotten(orphans=self._remove_tree(node))

    def check(self) -> None:
        """Assert that every known block has one node, and every node a known parent."""
        for digest, node in self._nodes.items():
            assert node.digest == digest
            assert node.block_ids[0], "a node without a block in KV group 0"
            siblings = self._nodes if node.parent is None else node.parent.children
            assert siblings.get(digest) is node, "a node that its parent does not know"
            if node.parent is not None:
                assert self._nodes.get(node.parent.digest) is node.parent, "an orphan"
            assert all(self._nodes.get(child) is not None for child in node.children)
        for kv_group, node_of in enumerate(self._node_of):
            pairs = [(b, node) for node in self._nodes.values() for b in node.block_ids[kv_group]]
            assert len(pairs) == len(node_of)
            assert all(node_of[block_id] is node for block_id, node in pairs)

    def _digest(self, parent: _Node | None, kv_salt: bytes, tokens: bytes) -> BlockHash:
        return self._hash(ROOT_HASH if parent is None else parent.digest, kv_salt, tokens)

    def _new_node(
        self, digest: BlockHash, parent: _Node | None, kv_salt: bytes, tokens: bytes
    ) -> _Node:
        block_ids: tuple[dict[BlockId, None], ...] = tuple({} for _ in self._node_of)
        node = self._nodes[digest] = _Node(digest, parent, kv_salt, tokens, block_ids)
        if parent is not None:
            parent.children[digest] = node
        return node

    def _add(self, node: _Node, kv_group: KVGroupId, block_id: BlockId) -> bool:
        """Add a block to a node; return whether it is the one that is served."""
        assert block_id not in self._node_of[kv_group], f"block {block_id} is known already"
        equals = node.block_ids[kv_group]
        equals[block_id] = None
        self._node_of[kv_group][block_id] = node
        return len(equals) == 1

    def _remove_tree(self, root: _Node) -> tuple[tuple[KVGroupId, BlockId], ...]:
        """Remove a node and everything under it; return the blocks that were still known."""
        if root.parent is not None:
            del root.parent.children[root.digest]
        orphans: list[tuple[KVGroupId, BlockId]] = []
        stack = [root]
        while stack:
            node = stack.pop()
            del self._nodes[node.digest]
            for kv_group, block_ids in enumerate(node.block_ids):
                for block_id in block_ids:
                    del self._node_of[kv_group][block_id]
                    orphans.append((kv_group, block_id))
            stack.extend(node.children.values())
        return tuple(orphans)
