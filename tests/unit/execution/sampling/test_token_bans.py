"""Bans that follow from the tokens before, against transformers' processors."""

import random

import pytest
import torch
from transformers.generation import logits_process as hf

from loraplex.execution.sampling.row_rules import BadWords, NGramIndex

VOCAB = 6


def banned_by(processor: hf.LogitsProcessor, tokens: list[int]) -> set[int]:
    scores = processor(torch.tensor([tokens]), torch.zeros(1, VOCAB))
    return set(torch.isinf(scores[0]).nonzero().flatten().tolist())


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_no_run_comes_twice(size):
    rng, processor = random.Random(size), hf.NoRepeatNGramLogitsProcessor(size)
    for length in range(1, 60):
        tokens = [rng.randrange(VOCAB - 2) for _ in range(length)]
        split, end = sorted((rng.randrange(length + 1), rng.randrange(length + 1)))
        index = NGramIndex(size, tokens[:split])
        for token_id in tokens[split:end]:
            index.add([token_id])
        expected = banned_by(processor, tokens)
        assert set(index.banned(tokens[end:])) == expected
        index.add(tokens[end:])
        assert set(index.banned(())) == expected


def test_what_might_come_is_not_remembered():
    index = NGramIndex(2, [1, 2, 1])
    assert index.banned(()) == [2]
    assert set(index.banned((3, 1))) == {2, 3}
    assert index.banned(()) == [2]


def test_bad_words_are_those_of_transformers():
    runs = [(1,), (2, 3), (3, 3), (0, 2, 4), (2, 4), (5, 4, 3, 2, 1, 0)]
    processor = hf.NoBadWordsLogitsProcessor([list(run) for run in runs])
    rng = random.Random(1)
    for length in range(1, 80):
        tokens = [rng.randrange(VOCAB) for _ in range(length)]
        split, end = sorted((rng.randrange(length + 1), rng.randrange(length + 1)))
        words = BadWords(runs, tokens[:split])
        for token_id in tokens[split:end]:
            words.add([token_id])
        expected = banned_by(processor, tokens)
        assert set(words.banned(tokens[end:])) == expected
        words.add(tokens[end:])
        assert set(words.banned(())) == expected


def test_the_longest_bad_word_is_seen_across_steps():
    words = BadWords([(5, 4, 3, 2)], [])
    for token_id in (5, 4):
        words.add([token_id])
        assert words.banned(()) == []
    assert words.banned((3,)) == [2]
    words.add([3])
    assert words.banned(()) == [2]


def test_bad_words_of_one_token_need_nothing_before():
    assert BadWords([(3,), (1,)], []).banned(()) == [3, 1]
