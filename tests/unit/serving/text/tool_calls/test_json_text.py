"""A character is let through if, and only if, it can be a part of a JSON object."""

import json
import random

import pytest

from loraplex.serving.text.tool_calls.json_text import MAX_DEPTH, JsonScanner, MalformedError


def scan(text: str) -> str | None:
    """What is given out; None for a text that is no object, or not whole."""
    scanner = JsonScanner()
    given = ""
    for char in text:
        if scanner.is_complete:
            return None
        try:
            given += scanner.feed(char)
        except MalformedError:
            return None
    return given if scanner.is_complete else None


RIGHT = [
    "{}",
    '{"a":1}',
    ' { "a" : [ 1 , -2.5e+3 , true , null ] } ',
    '{"a":{"b":[[],{}]},"c":"\\u00e9\\n\\"\\\\"}',
    '{"":"","b":0}',
    '{"a":false}',
    '{"a":"\ud83d\ude00 é"}',
]
WRONG = [
    "", "[]", "1", '"a"', "{", "{a:1}", '{"a"}', '{"a":}', '{"a":1,}', '{"a":01}', '{"a":1.}',
    '{"a":.5}', '{"a":-}', '{"a":+1}', '{"a":tru}', '{"a":nulll}', '{"a":"\\x"}', '{"a":"\\u12g4"}',
    "{'a':1}", '{"a":1]', '{"a":[1}', '{,"a":1}', '{"a":[,]}', '{"a":[1,]}', '{"a":1 2}',
    '{"a" 1}', '{"a":1:2}', '{"a":NaN}', '{"a":"b"', '{"a":1e}', "}", '{"a":e5}', '{"a":"\\\'"}',
]  # fmt: skip


@pytest.mark.parametrize("text", RIGHT)
def test_right(text: str) -> None:
    assert scan(text.rstrip()) == text.rstrip()


@pytest.mark.parametrize("text", WRONG)
def test_wrong(text: str) -> None:
    assert scan(text) is None


@pytest.mark.parametrize(
    ("begun", "rest"),
    [
        ("{", '"a":1}'),
        ('{"a"', ":1}"),
        ('{"a":1', "2}"),
        ('{"a":tr', "ue}"),
        ('{"a":[1,', "2]}"),
        ('{"a":"\\u00', 'e9"}'),
    ],
)
def test_a_refused_character_changes_nothing(begun: str, rest: str) -> None:
    scanner = JsonScanner()
    for char in begun:
        scanner.feed(char)
    with pytest.raises(MalformedError):
        scanner.feed("x")
    for char in rest:
        scanner.feed(char)
    assert scanner.is_complete


def test_line_breaks_in_strings_are_escaped() -> None:
    given = scan('{"a\t":"one\ntwo\x01"}')
    assert given is not None
    assert json.loads(given) == {"a\t": "one\ntwo\x01"}


def test_depth() -> None:
    inner = MAX_DEPTH - 1
    assert scan('{"a":' + "[" * inner + "]" * inner + "}") is not None
    assert scan('{"a":' + "[" * MAX_DEPTH + "]" * MAX_DEPTH + "}") is None


def test_as_pythons_parser_on_random_faults() -> None:
    source = random.Random(7)
    for _ in range(5000):
        text = source.choice(RIGHT[:6]).strip()
        for _ in range(source.randrange(3)):
            at = source.randrange(len(text) + 1)
            text = text[:at] + source.choice('{}[]",:0 -e.tn\\u') + text[at + source.randrange(2) :]
        try:
            is_right = isinstance(json.loads(text), dict)
        except ValueError:
            is_right = False
        assert (scan(text.strip(" ")) is not None) == is_right, text
