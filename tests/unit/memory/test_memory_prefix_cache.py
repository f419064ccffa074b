import itertools

import pytest

from loraplex.memory.prefix_cache import (
    ROOT_HASH,
    Forgotten,
    PrefixCache,
    hash_block,
    pack_tokens,
)

SALT = b"salt"


def cache_of(*blocks, salt=SALT, **kwargs):
    """A cache of blocks 0, 1, ... of two tokens, each after the other."""
    cache = PrefixCache(2, 1, **kwargs)
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
    tokens = pack_tokens([3, 4])
    for parent_hash in (ROOT_HASH, hash_block(ROOT_HASH, SALT, tokens)):
        assert hash_block(parent_hash, b"a", tokens) != hash_block(parent_hash, b"b", tokens)


def test_the_encoding_has_one_reading():
    """Bytes that move between salt and tokens give another hash."""
    tokens = pack_tokens([1, 2])
    hashes = {hash_block(ROOT_HASH, SALT + tokens[:n], tokens[n:]) for n in range(16)}
    assert len(hashes) == 16


def test_sequences_of_one_prompt_hash_it_once():
    hashed = []

    def counting(*content):
        hashed.append(content)
        return hash_block(*content)

    blocks = [[2 * index, 2 * index + 1] for index in range(10)]
    cache = cache_of(*blocks[:9], hash_function=counting)
    tokens = [*itertools.chain(*blocks)]
    hashed.clear()
    for _ in range(3):
        assert cache.match(list(tokens), SALT, 19) == [list(range(9))]
        assert len(hashed) == 9
    assert cache.match([*tokens, 50, 51], SALT, 21) == [list(range(9))]
    assert len(hashed) == 10, "only the block after the known ones"
    assert cache.match(tokens, SALT, 6) == [[0, 1, 2]]
    assert cache.match(tokens[:5] + [9] * 15, SALT) == [[0, 1]]
    assert cache.match(tokens, b"other") == cache.match([9, *tokens], SALT) == [[]]
    cache.forget(0, 4)
    assert cache.match(tokens, SALT, 19) == [[0, 1, 2, 3]]
    assert cache.insert((30,), 3, [8, 9], SALT)
    assert cache.match(tokens, SALT, 19) == [[0, 1, 2, 3, 30]]
    hashed.clear()
    assert cache.match(tokens, SALT, 10) == [[0, 1, 2, 3, 30]]
    assert not hashed


def test_a_planted_collision_is_not_served():
    cache = PrefixCache(2, 1, hash_function=lambda *_: b"always the same")
    assert cache.insert((0,), None, [1, 2], SALT)
    assert cache.match([1, 2], SALT) == [[0]]
    assert cache.match([1, 3], SALT) == [[]]
    assert cache.match([1, 2], b"other") == [[]]
    assert cache.match([1, 2, 1, 2], SALT) == [[0]]
    assert not cache.insert((1,), None, [1, 3], SALT)
    assert not cache.insert((2,), 1, [5, 6], SALT)
    cache.check()


def test_a_child_of_a_colliding_parent_is_not_served():
    """The parent is compared, not only its hash: two parents here have one hash."""
    digests = {pack_tokens([1, 2]): b"same", pack_tokens([9, 9]): b"same"}
    cache = PrefixCache(
        2, 1, hash_function=lambda _parent, _salt, tokens: digests.get(tokens, tokens)
    )
    cache.insert((0,), None, [1, 2], SALT)
    cache.insert((1,), 0, [3, 4], SALT)
    assert cache.forget(0, 0) == Forgotten(orphans=((0, 1),))
    cache.insert((2,), None, [9, 9], SALT)
    assert cache.match([9, 9, 3, 4], SALT) == [[2]]


def test_the_first_block_of_a_content_is_kept_and_the_second_inherits():
    cache = cache_of([1, 2])
    assert not cache.insert((7,), None, [1, 2], SALT)
    assert cache.match([1, 2], SALT) == [[0]]
    assert not cache.serves(0, 7)
    assert cache.forget(0, 0) == Forgotten(heir=7)
    assert cache.match([1, 2], SALT) == [[7]]
    assert cache.forget(0, 7) == Forgotten()
    assert len(cache) == 0


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
    assert len(cache) == 0
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
