"""Stop strings against an oracle that sees the whole text."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.serving.text.sequence_text import StopStrings
from support.examples import examples

SMALL_TEXT = st.text(alphabet="ab", max_size=12)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=7), max_size=3)


def oracle(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Grow the text by characters until it ends with a stop."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def is_proper_beginning(text: str, stops: list[str]) -> bool:
    return any(len(text) < len(stop) and stop.startswith(text) for stop in stops)


@examples(5)
@given(
    parts=st.lists(SMALL_TEXT, min_size=1, max_size=6),
    stops=STOPS,
    include=st.booleans(),
)
def test_any_split_equals_the_oracle(parts, stops, include):
    matcher = StopStrings(stops, include)
    text, matched = "", None
    expected, expected_match = oracle("".join(parts), stops, include)
    for index, part in enumerate(parts):
        piece, matched = matcher.push(part, final=index == len(parts) - 1)
        text += piece
        assert expected.startswith(text)
    assert (text, matched) == (expected, expected_match)


@given(text=SMALL_TEXT, stops=STOPS)
def test_holds_back_no_more_than_it_must(text, stops):
    matcher = StopStrings(stops)
    shown, matched = matcher.push(text)
    if matched is None:
        held = text[len(shown) :]
        assert not held or is_proper_beginning(held, stops)
        longer = [text[-n:] for n in range(len(held) + 1, len(text) + 1)]
        assert not any(is_proper_beginning(end, stops) for end in longer)


def test_without_stops_everything_passes():
    assert StopStrings([]).push("abc") == ("abc", None)


def test_text_after_the_match_is_cut():
    matcher = StopStrings(["\n\n"])
    assert matcher.push("a\n") == ("a", None)
    assert matcher.push("\nb") == ("", "\n\n")
    assert matcher.push("c", final=True) == ("", "\n\n")


def test_beginning_that_did_not_become_a_stop_is_given():
    matcher = StopStrings(["</answer>"])
    assert matcher.push("1 < 2 </ans") == ("1 < 2 ", None)
    assert matcher.push("wers") == ("</answers", None)
    assert matcher.push(" </", final=True) == (" </", None)


def test_first_complete_wins_and_then_the_longest():
    assert StopStrings(["abcd", "bc"]).push("xabcd") == ("xa", "bc")
    assert StopStrings(["cd", "bcd"]).push("xabcd") == ("xa", "bcd")


def test_stop_that_begins_within_a_failed_one():
    assert StopStrings(["aab"]).push("xaaab") == ("xa", "aab")
    assert StopStrings(["abacab"]).push("abacabacab") == ("", "abacab")
    assert StopStrings(["abacabx"]).push("abacabacabx") == ("abac", "abacabx")


def test_included_stop():
    matcher = StopStrings(["END"], include_in_output=True)
    assert matcher.push("a EN") == ("a EN", None)
    assert matcher.push("D b") == ("D", "END")


@pytest.mark.parametrize("pattern", ["a" * 4095 + "b", "ab" * 2048])
def test_hostile_stops_cost_no_more_than_others(pattern):
    """Searched naively this would take minutes."""
    matcher = StopStrings([pattern[i:] for i in range(16)])
    start = time.thread_time()
    for _ in range(200):
        matcher.push(pattern[:20])
    assert time.thread_time() - start < 10
