"""Which tokens become text, where runs of tokens may end a sequence."""

import pytest

from loraplex.core.output import FinishReason
from loraplex.serving.text.sequence_text import ShownTokens

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def test_without_stop_sequences_only_the_stop_token_is_hidden():
    assert ShownTokens((), shows_stop=False).push((1, 2)) == (1, 2)
    assert ShownTokens((), shows_stop=False).finish((1, 2), STOP, 2) == (1,)
    assert ShownTokens((), shows_stop=False).finish((1, 2), LENGTH, None) == (1, 2)
    assert ShownTokens((), shows_stop=True).finish((1, 2), STOP, 2) == (1, 2)


def test_a_beginning_is_held_until_it_is_none():
    shown = ShownTokens(((5, 6, 7),), shows_stop=False)
    assert shown.push((1, 5)) == (1,)
    assert shown.push((6,)) == ()
    assert shown.push((5,)) == (5, 6)
    assert shown.push((6,)) == ()
    assert shown.finish((7,), STOP, None) == ()


def test_what_was_held_is_shown_at_another_end():
    shown = ShownTokens(((5, 6, 7),), shows_stop=False)
    assert shown.push((5, 6)) == ()
    assert shown.finish((9,), LENGTH, None) == (5, 6, 9)
    shown = ShownTokens(((5, 6, 7),), shows_stop=False)
    assert shown.push((5, 6)) == ()
    assert shown.finish((2,), STOP, 2) == (5, 6), "a stop token of its own"


def test_a_complete_run_that_the_engine_goes_on_after_is_shown():
    """A stop sequence before min_tokens does not end the output."""
    shown = ShownTokens(((5, 6),), shows_stop=False)
    assert shown.push((5, 6)) == (5, 6)
    assert shown.push((5,)) == ()
    assert shown.finish((6,), STOP, None) == ()


def test_the_longest_of_the_runs_that_end_together_is_cut():
    shown = ShownTokens(((6,), (5, 6)), shows_stop=False)
    assert shown.push((4, 5)) == (4,)
    assert shown.finish((6,), STOP, None) == ()


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1, 1), (5,), (2, 3), (4, 1)])
def test_the_split_does_not_matter(sizes):
    tokens = (1, 5, 5, 6, 7)
    shown = ShownTokens(((5, 6, 7), (1, 1)), shows_stop=False)
    given, start = (), 0
    for size in sizes[:-1]:
        given += shown.push(tokens[start : start + size])
        start += size
    given += shown.finish(tokens[start:], STOP, None)
    assert given == (1, 5)
