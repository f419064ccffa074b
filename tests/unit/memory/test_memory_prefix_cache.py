import hashlib
import itertools

import pytest

from loraplex.core.plan import CacheGroupCapacity
from loraplex.memory import prefix_cache
from loraplex.memory.kv_blocks import KVBlocks
from loraplex.memory.prefix_cache import PACKED_BLOCKS, Forgotten, PrefixCache, pack_tokens

SALT = b"salt"


def cache_of(*blocks, salt=SALT):
    """A cache of blocks 0, 1, ... of two tokens, each after the other."""
    cache = PrefixCache(2, 1)
    for block_id, tokens in enumerate(blocks):
        assert cache.insert((block_id,), block_id - 1 if block_id else None, tokens, salt)
    cache.check()
    return cache


def test_matches_the_longest_run_of_full_blocks():
    cache = cache_of([1, 2], [3, 4], [5, 6])
    assert cache.match([1, 2, 3, 4, 5, 6, 7], SALT) == [[0, 1, 2]]
    assert cache.match([1, 2, 3, 4, 5], SALT) == [[0, 1]]
    assert cache.match([1, 2, 0, 4, 5, 6], SALT) == [[0]]
    assert cache.match([3, 4], SALT) == [[]]
    assert cache.match([1], SALT) == [[]]


@pytest.mark.parametrize(("max_tokens", "hits"), [(6, 3), (5, 2), (4, 2), (1, 0), (0, 0)])
def test_never_matches_more_than_it_may(max_tokens, hits):
    cache = cache_of([1, 2], [3, 4], [5, 6])
    assert len(cache.match([1, 2, 3, 4, 5, 6], SALT, max_tokens)[0]) == hits


def test_another_salt_is_another_content():
    cache = cache_of([1, 2], [3, 4])
    assert cache.match([1, 2, 3, 4], b"other") == [[]]
    assert cache.insert((5,), None, [1, 2], b"other")
    assert cache.match([1, 2, 3, 4], b"other") == [[5]]


def test_the_salt_is_in_every_block():
    """A block under another salt can follow, and each is found by its own salt only."""
    cache = cache_of([1, 2])
    assert cache.insert((1,), 0, [3, 4], b"activated")
    assert cache.match([1, 2, 3, 4], SALT) == [[0]]
    assert cache.match([1, 2, 3, 4], b"activated") == [[]]


def test_bytes_that_move_between_salt_and_tokens_are_another_content():
    tokens = [1, 2, 3, 4]
    cache = cache_of([3, 4], salt=SALT + pack_tokens([1, 2]))
    assert cache.match(tokens, SALT) == [[]]
    assert cache.match(tokens[2:], SALT + pack_tokens([1, 2])) == [[0]]


def test_a_block_is_found_only_after_all_the_blocks_before_it():
    cache = cache_of([1, 2], [3, 4])
    assert cache.insert((2,), None, [9, 9], SALT)
    assert cache.match([9, 9, 3, 4], SALT) == [[2]]
    assert cache.forget(0, 0) == Forgotten(orphans=((0, 1),))
    assert cache.match([1, 2, 3, 4], SALT) == [[]]
    assert cache.insert((0,), None, [1, 2], SALT)
    assert cache.match([1, 2, 3, 4], SALT) == [[0]]


def test_a_prompt_is_encoded_once_to_be_found_and_once_to_be_published(monkeypatch):
    """All requests wait for it: a digest of 128,000 tokens takes 40 ms."""
    encoded = []
    monkeypatch.setattr(
        prefix_cache, "pack_tokens", lambda ids: encoded.append(len(ids)) or pack_tokens(ids)
    )
    monkeypatch.setattr(hashlib, "sha256", lambda content=b"": pytest.fail(f"hashes {content!r}"))
    num_tokens = 8 * PACKED_BLOCKS
    prompt = list(range(num_tokens))
    kv = KVBlocks(2, [CacheGroupCapacity(num_blocks=num_tokens)])
    first = kv.admit(prompt, SALT, num_tokens)
    assert sum(encoded) <= 2 * PACKED_BLOCKS, "an unknown prompt costs its first blocks"
    encoded.clear()
    num_published = 0
    for num_computed in (100, 101, 200, num_tokens):
        num_published = kv.publish(prompt, SALT, first.block_tables, num_published, num_computed)
    assert sum(encoded) == num_tokens
    for end in (num_tokens, num_tokens - 3):
        encoded.clear()
        assert kv.admit(prompt[:end], SALT, num_tokens) is not None
        assert sum(encoded) <= end


def test_the_first_block_of_a_content_is_kept_and_the_second_inherits():
    cache = cache_of([1, 2])
    assert not cache.insert((7,), None, [1, 2], SALT)
    assert cache.match([1, 2], SALT) == [[0]]
    assert not cache.serves(0, 7)
    assert cache.forget(0, 0) == Forgotten(heir=7)
    assert cache.match([1, 2], SALT) == [[7]]
    assert cache.forget(0, 7) == Forgotten()
    assert not cache.serves(0, 0)
    cache.check()


def test_an_equal_block_can_be_forgotten_first():
    cache = cache_of([1, 2])
    cache.insert((7,), None, [1, 2], SALT)
    assert cache.forget(0, 7) == Forgotten()
    assert cache.match([1, 2], SALT) == [[0]]
    assert cache.forget(0, 7) == Forgotten()


def test_a_block_after_an_equal_block_hangs_on_the_common_content():
    cache = cache_of([1, 2])
    cache.insert((7,), None, [1, 2], SALT)
    assert cache.insert((8,), 7, [3, 4], SALT)
    assert cache.match([1, 2, 3, 4], SALT) == [[0, 8]]


def test_what_cannot_be_reached_is_forgotten():
    cache = cache_of([1, 2], [3, 4], [5, 6])
    assert cache.insert((3,), 0, [7, 7], SALT)
    forgotten = cache.forget(0, 1)
    assert set(forgotten.orphans) == {(0, 2)}
    assert cache.match([1, 2, 7, 7], SALT) == [[0, 3]]
    assert set(cache.forget(0, 0).orphans) == {(0, 3)}
    assert not cache.serves(0, 0)
    cache.check()


def test_a_block_without_a_known_parent_is_not_learnt():
    cache = PrefixCache(2, 1)
    assert not cache.insert((1,), 0, [3, 4], SALT)
    assert not cache.serves(0, 1)


def test_disabled_it_learns_nothing():
    cache = PrefixCache(2, 1, enabled=False)
    assert not cache.insert((0,), None, [1, 2], SALT)
    assert cache.match([1, 2, 3], SALT) == [[]]
    assert cache.forget(0, 0) == Forgotten()


def test_negative_and_large_token_ids_are_distinct():
    encodings = [pack_tokens([a, b]) for a, b in itertools.product([-1, 0, 2**31, 2**40], repeat=2)]
    assert len(set(encodings)) == len(encodings)
