"""Draft tokens by prompt lookup: repetitions, pace, and that a text is indexed once."""

import random

import pytest

from loraplex.scheduling.prompt_lookup import Drafter, DraftPace, NgramIndex


def longest_suffix_draft(token_ids, max_ngram, num_wanted):
    """The rule of NgramIndex, by searching the whole text."""
    for size in range(min(max_ngram, len(token_ids)), 0, -1):
        suffix = token_ids[len(token_ids) - size :]
        for end in range(len(token_ids) - 1, size - 1, -1):
            if token_ids[end - size : end] == suffix:
                text = list(token_ids)
                for i in range(num_wanted):
                    text.append(text[end + i])
                return tuple(text[len(token_ids) :])
    return ()


@pytest.mark.parametrize("max_ngram", [1, 2, 3, 5])
@pytest.mark.parametrize("vocab_size", [2, 5, 40])
def test_index_finds_what_a_search_finds(max_ngram, vocab_size):
    draws = random.Random(vocab_size)
    index, text = NgramIndex(max_ngram), []
    for _ in range(150):
        text += [draws.randrange(vocab_size) for _ in range(draws.choice([1, 1, 1, 4]))]
        num_wanted = draws.randint(1, 6)
        assert index.propose(text, num_wanted) == longest_suffix_draft(text, max_ngram, num_wanted)


def test_the_longest_ending_counts_and_then_the_latest():
    assert NgramIndex(3).propose([1, 2, 3, 9, 2, 3, 8, 1, 2, 3], 2) == (9, 2)
    assert NgramIndex(2).propose([1, 2, 3, 9, 2, 3, 8, 1, 2, 3], 2) == (8, 1)
    assert NgramIndex(3).propose([1, 2, 3], 2) == ()


def test_a_period_goes_on():
    assert NgramIndex(3).propose([7, 5, 6, 5, 6], 5) == (5, 6, 5, 6, 5)


class CountingList(list):
    """Counts how many of its tokens are read."""

    num_read = 0

    def __getitem__(self, key):
        found = super().__getitem__(key)
        self.num_read += len(found) if isinstance(key, slice) else 1
        return found


def test_a_long_text_is_read_once():
    index, text = NgramIndex(3), CountingList(range(5000))
    index.propose(text, 4)
    text.num_read = 0
    for token_id in range(5000, 5050):
        text.append(token_id)
        index.propose(text, 4)
    assert text.num_read <= 50 * 12


def test_the_pace_follows_what_was_right():
    pace = DraftPace(8)
    assert pace.num_wanted(10) == 8
    pace.verified(8, 2, 13)
    assert pace.num_wanted(13) == 3
    pace.verified(3, 3, 17)
    assert pace.num_wanted(17) == 5
    pace.verified(5, 5, 23)
    pace.verified(7, 7, 31)
    assert pace.num_wanted(31) == 8


def test_poor_drafts_pause_and_are_tried_again():
    pace = DraftPace(4)
    pace.verified(4, 0, 11)
    assert pace.num_wanted(11) == 1
    pace.verified(1, 0, 12)
    assert [pace.num_wanted(n) for n in (12, 19, 20)] == [0, 0, 1]
    pace.verified(1, 0, 21)
    assert [pace.num_wanted(n) for n in (36, 37)] == [0, 1]
    for _ in range(50):
        pace.verified(1, 0, 1000)
    assert [pace.num_wanted(n) for n in (1127, 1128)] == [0, 1]
    pace.verified(1, 1, 1130)
    assert pace.num_wanted(1130) == 3


def test_forced_tokens_come_first_and_do_not_change_the_pace():
    drafter = Drafter(2, 3)
    text = [1, 2, 1, 2]
    drafter.force((8, 9, 8))
    assert drafter.propose(text, 10) == (8, 9, 8)
    assert drafter.propose(text, 2) == (8, 9)
    for _ in range(5):
        drafter.verified(2, 0, 4)
    drafter.force(())
    assert drafter.propose(text, 10) == (1, 2)


def test_without_text_only_what_is_forced():
    drafter = Drafter(0, 3)
    assert drafter.propose([1, 1, 1], 4) == ()
    drafter.force((5,))
    assert drafter.propose([1, 1, 1], 4) == (5,)
