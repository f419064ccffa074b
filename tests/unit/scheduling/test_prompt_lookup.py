"""Draft tokens by prompt lookup: repetitions, pace, and that a prompt is indexed once, in parts."""

import random

import pytest

from loraplex.scheduling.prompt_lookup import LAST_PAUSE, Drafter, DraftPace, PromptIndex


def new_drafter(max_ngram, *, num_draft_tokens=8, num_prompt_tokens=0, window=10_000):
    return Drafter(num_draft_tokens, PromptIndex(num_prompt_tokens, max_ngram, window))


def propose(drafter, token_ids, num_wanted):
    """Index all of the text, then propose."""
    drafter.index(token_ids, len(token_ids))
    return drafter.propose(token_ids, num_wanted)


def longest_suffix_draft(token_ids, max_ngram, num_wanted):
    """The rule of Drafter, by searching the whole text."""
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
@pytest.mark.parametrize("num_prompt_tokens", [0, 1, 30])
def test_index_finds_what_a_search_finds(max_ngram, vocab_size, num_prompt_tokens):
    draws = random.Random(vocab_size)
    text = [draws.randrange(vocab_size) for _ in range(num_prompt_tokens)]
    drafter = new_drafter(max_ngram, num_prompt_tokens=num_prompt_tokens)
    for _ in range(150):
        text += [draws.randrange(vocab_size) for _ in range(draws.choice([1, 1, 1, 4]))]
        num_wanted = draws.randint(1, 6)
        assert propose(drafter, text, num_wanted) == longest_suffix_draft(
            text, max_ngram, num_wanted
        )


def test_the_longest_ending_counts_and_then_the_latest():
    assert propose(new_drafter(3), [1, 2, 3, 9, 2, 3, 8, 1, 2, 3], 2) == (9, 2)
    assert propose(new_drafter(2), [1, 2, 3, 9, 2, 3, 8, 1, 2, 3], 2) == (8, 1)
    assert propose(new_drafter(3), [1, 2, 3], 2) == ()


def test_a_period_goes_on():
    assert propose(new_drafter(3), [7, 5, 6, 5, 6], 5) == (5, 6, 5, 6, 5)


class CountingList(list):
    """Counts how many of its tokens are read."""

    num_read = 0

    def __getitem__(self, key):
        found = super().__getitem__(key)
        self.num_read += len(found) if isinstance(key, slice) else 1
        return found


def test_a_long_text_is_read_once():
    drafter, text = new_drafter(3), CountingList(range(5000))
    propose(drafter, text, 4)
    text.num_read = 0
    for token_id in range(5000, 5050):
        text.append(token_id)
        propose(drafter, text, 4)
    assert text.num_read <= 50 * 12


def test_a_draft_from_an_early_place_copies_no_more_than_it_needs():
    text = CountingList([*range(5000), 0, 1, 2])
    drafter = new_drafter(3, num_prompt_tokens=5003)
    drafter.index(text, 5003)
    text.num_read = 0
    assert drafter.propose(text, 4) == (3, 4, 5, 6)
    assert text.num_read <= 10


def test_the_sequences_of_a_request_index_their_prompt_once():
    prompt = [token_id % 97 for token_id in range(20_000)]
    index = PromptIndex(len(prompt), 3, window=20_000)
    drafters = [Drafter(4, index) for _ in range(8)]
    assert drafters[0].index(prompt, 30_000) == 19_999
    for token_id, drafter in enumerate(drafters):
        text = [*prompt, token_id]
        assert drafter.index(text, 30_000) == 1  # the run that ends with the prompt
        assert drafter.propose(text, 2) == ((token_id + 1) % 97, (token_id + 2) % 97)


def test_a_prompt_is_indexed_in_parts_and_no_draft_comes_before_the_last():
    prompt = [1, 2, 3, 4] * 25
    drafter = new_drafter(3, num_prompt_tokens=100)
    for num_indexed in (40, 40, 19):
        assert drafter.propose([*prompt, 1, 2], 2) == ()
        assert drafter.index(prompt, 40) == num_indexed
    assert drafter.index([*prompt, 1, 2], 40) == 2
    assert drafter.propose([*prompt, 1, 2], 2) == (3, 4)


def test_drafts_are_looked_up_in_the_window_of_the_prompt():
    prompt = [7, 8, 9, *range(20, 60), 4, 5, 6, 1]
    for window, expected in ((2, (6, 1)), (1, ())):
        drafter = new_drafter(2, num_prompt_tokens=len(prompt), window=window)
        assert propose(drafter, [*prompt, 4, 5], 2) == expected
        assert propose(drafter, [*prompt, 4, 5, 7, 8], 2) == ()


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


def test_a_draft_that_gains_no_time_is_tried_from_time_to_time():
    pace = DraftPace(4)
    assert pace.num_wanted(10, needed_share=0.9) == 4, "nothing is known yet"
    pace.verified(4, 2, 20)
    assert [pace.num_wanted(21, needed_share=share) for share in (0.0, 0.7, 0.8)] == [3, 3, 0]
    assert [
        pace.num_wanted(n, needed_share=0.8) for n in (20 + LAST_PAUSE - 1, 20 + LAST_PAUSE)
    ] == [0, 3]
    for num_tokens in range(200, 230):
        pace.verified(4, 4, num_tokens)
    assert pace.num_wanted(230, needed_share=0.9) == 4, "what is long ago counts little"


def test_forced_tokens_come_first_and_do_not_change_the_pace():
    drafter = new_drafter(3, num_draft_tokens=2)
    text = [1, 2, 1, 2]
    drafter.index(text, 4)
    drafter.force((8, 9, 8))
    assert drafter.propose(text, 10) == (8, 9, 8)
    assert drafter.propose(text, 2) == (8, 9)
    for _ in range(5):
        drafter.verified(2, 0, 4)
    drafter.force(())
    assert drafter.propose(text, 10) == (1, 2)


def test_without_text_only_what_is_forced():
    drafter = new_drafter(3, num_draft_tokens=0)
    assert propose(drafter, [1, 1, 1], 4) == ()
    drafter.force((5,))
    assert drafter.propose([1, 1, 1], 4) == (5,)
