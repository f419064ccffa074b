"""What the named parts of a grammar matched, piece by piece."""

import json

import pytest

from loraplex.core.grammar import GrammarLimits
from loraplex.serving.grammar.captures import Capture, CaptureReader

LARK = """
start: "a: " number "; b: " word "."
number[capture="num"]: /[0-9]+/
word[capture]: /[a-zé]+/
"""
TEXT = "a: 123; b: été."
CAPTURES = [Capture("num", b"123"), Capture("word", "été".encode())]


def reader(lark=LARK, **limits):
    grammar = json.dumps({"grammars": [{"lark_grammar": lark}]})
    return CaptureReader(grammar, GrammarLimits(**limits))


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_pieces_of_any_size(size):
    following = reader()
    pieces = [TEXT[at : at + size] for at in range(0, len(TEXT), size)]
    assert [capture for piece in pieces for capture in following.push(piece)] == CAPTURES


def test_a_text_that_leaves_the_grammar_has_no_more():
    following = reader()
    assert following.push("a: 1; c") == [Capture("num", b"1")]
    assert following.push(" b: word.") == []


def test_after_the_end_there_is_nothing():
    following = reader()
    assert following.push(TEXT) == CAPTURES
    assert following.push(TEXT) == []


def test_a_grammar_without_captures():
    assert reader("start: /[a-z]*/").push("abc") == []
