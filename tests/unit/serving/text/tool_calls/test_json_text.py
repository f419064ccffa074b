"""Valid JSON stays as it is; what models write instead of it becomes valid."""

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.serving.text.text_source import Steps, TextSource
from loraplex.serving.text.tool_calls.json_text import (
    MAX_DEPTH,
    CutError,
    MalformedError,
    RepairingReader,
    json_word,
    repaired_json,
)
from support.examples import examples

MARKERS = ("<call>", "</call>")


def read(pieces: list[str], *, is_cut: bool = False, outer: str = "") -> tuple[str, str]:
    """What is given for an object, and what is left."""
    source, given = TextSource(), list[str]()
    reader = RepairingReader(source, source.advance, given.append, markers=MARKERS, outer=outer)
    steps = reader.read_object()
    for number, piece in enumerate(pieces):
        source.feed(piece, final=number == len(pieces) - 1, is_cut=is_cut)
        try:
            next(steps, None)
        except CutError:
            break
    return "".join(given), source.unread


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text() | st.text(alphabet='{}[]",:\'\\ \nn<call>/e1'),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)  # fmt: skip


@examples(10)
@given(
    value=st.dictionaries(st.text(), JSON, max_size=4),
    indent=st.sampled_from([None, 0, 2]),
    ascii_only=st.booleans(),
    outer=st.sampled_from(["", "}", "]}"]),
)
def test_valid_json_stays_as_it_is(
    value: Any, indent: int | None, ascii_only: bool, outer: str
) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    closing = outer[::-1]
    # Two markers in a row are taken for the end of a call that lacks a quote.
    if "call><" not in text.replace(" ", "").replace("\\n", ""):
        assert read([text + closing]) == (text, closing)
        assert read(list(text + closing), outer=outer) == (text, closing)
    assert repaired_json(text) == text


@pytest.mark.parametrize(
    "text",
    [
        '{"a": "see </call>, <call> and {\\"b\\": 1}</call> {\\"c\\": 2}"}',
        '{"a": "</call>", "b": "<call>"}',
        '{"a":"\\u00e9\\ud800\\n\\"\\\\\\/"}',
        ' { "a" : [ 1 , -2.5e+3 , true , null ] , "b" : { } } ',
        '{"' + "k" * 2000 + '": "x", "' + "l" * 2000 + '": 1}',
    ],
)
def test_other_valid_json(text: str) -> None:
    assert repaired_json(text) == text.strip()
    assert read([text.lstrip()])[0] == text.strip()


@pytest.mark.parametrize(
    ("written", "value"),
    [
        (r'{"a": "\d+"}', {"a": r"\d+"}),
        (r'{"a": "C:\Users\x\u12"}', {"a": r"C:\Users\x\u12"}),
        (r'{"a": "it\'s"}', {"a": "it's"}),
        ('{"a": "one\ntwo\t\x01"}', {"a": "one\ntwo\t\x01"}),
        ('{"a": "he said "hi" to "b""}', {"a": 'he said "hi" to "b"'}),
        ('{"a": "read "a", then "b" ok", "c": 1}', {"a": 'read "a", then "b" ok', "c": 1}),
        ('{"a": "{"b": "c"}", "d": ["x", "y"]}', {"a": '{"b": "c"}', "d": ["x", "y"]}),
        ("{'a': 'it's \"x\"', 'b': ['c']}", {"a": 'it\'s "x"', "b": ["c"]}),
        ('{"a": None, "b": True, "c": [False]}', {"a": None, "b": True, "c": [False]}),
        (
            '{"a": +5, "b": 007, "c": .5, "d": 5., "e": -01.50e3}',
            {"a": 5, "b": 7, "c": 0.5, "d": 5, "e": -1500.0},
        ),
        ('{"a": NaN, "b": 1_000}', {"a": "NaN", "b": "1_000"}),
        ("{a: some words, b: [x, y z]}", {"a": "some words", "b": ["x", "y z"]}),
        ('{"a": 1,}', {"a": 1}),
        ('{,"a": [,1,,2,],, "b": 1}', {"a": [1, 2], "b": 1}),
        ('{"a": 1 "b": "x" "c": 2}', {"a": 1, "b": "x", "c": 2}),
        ('{"a": [1 2]}', {"a": ["1 2"]}),
        ('{"a": , "b": }', {"a": None, "b": None}),
        ('{"a": 1, "b"}', {"a": 1, "b": None}),
        ('{"a": [1, {"b": 2]}', {"a": [1, {"b": 2}]}),
        ('{"a": {"b": [1}, "c": 2}', {"a": {"b": [1]}, "c": 2}),
        ('{"a": 1]}', {"a": 1}),
        ('{"a": "x', {"a": "x"}),
        ('{"a": "x}}\n', {"a": "x"}),
        ('{"a": {"b": [1, "c', {"a": {"b": [1, "c"]}}),
        ('{"a": 1, "b": ', {"a": 1, "b": None}),
        ('{"a": "x\\', {"a": "x"}),
        ('{"a": tru', {"a": "tru"}),
        ('{"a": "x"}}]', {"a": "x"}),
        ('{"a": 1</call>', {"a": 1}),
        ('{"a": "x</call>', {"a": "x"}),
        ('{"a": "x}</call><call>{"b": "c"}', {"a": "x"}),
        ('{"a": "x<call>{"b": "c"}', {"a": "x"}),
        ('{"a": "x</call> Bye, "you".', {"a": "x"}),
    ],
)
def test_repairs(written: str, value: Any) -> None:
    given, _ = read([written], outer="}")
    assert json.loads(given) == value
    assert read(list(written), outer="}")[0] == given


@pytest.mark.parametrize(
    "text", ["", "[]", "1", '"a"', "{", "{a", "{a}", '{"a"}', '{"a" 1}', "{,", '{"a":', "{]1", "}"]
)
def test_what_does_not_begin_like_an_object(text: str) -> None:
    source, given = TextSource(), list[str]()
    source.feed(text, final=True)
    with pytest.raises(MalformedError):
        next(RepairingReader(source, source.advance, given.append).read_object())
    assert given == []


@pytest.mark.parametrize("text", ['{"a": "b\\u00e9", "c": [1.5, null]}', '{"a": "</call> b"}'])
def test_a_cut_gives_the_beginning_and_leaves_nothing(text: str) -> None:
    for length in range(len(text)):
        given, left = read([text[:length]], is_cut=True)
        assert text.startswith(given)
        assert left == ""


@pytest.mark.parametrize(
    "unit",
    ["</call>x", '"', '", ', '", "', "\\", " ", "}", "<", "'", '"x":', "</call>{", "</call>\\"],
)
def test_the_work_is_linear(unit: str) -> None:
    """A model may write anything, and the event loop reads it."""

    class CountingSource(TextSource):
        num_steps = 0

        def peek(self, ahead: int = 0) -> Steps[str]:
            self.num_steps += 1
            return (yield from super().peek(ahead))

    counts = []
    for number in (1000, 2000):
        source, given = CountingSource(), list[str]()
        source.feed('{"a": "' + unit * number + 'x"}', final=True)
        reader = RepairingReader(source, source.advance, given.append, markers=MARKERS)
        next(reader.read_object(), None)
        counts.append(source.num_steps)
    assert counts[1] < 2.5 * counts[0]


def test_depth() -> None:
    inner = MAX_DEPTH - 1
    text = '{"a":' + "[" * inner + "]" * inner + "}"
    assert repaired_json(text) == text
    deeper = repaired_json('{"a":' + "[" * 5000 + "]" * 5000 + "}")
    assert deeper is not None
    assert isinstance(json.loads(deeper)["a"], list)


@pytest.mark.parametrize(
    ("text", "word"),
    [("None", "null"), ("+5", "5"), ("-0", "-0"), ("1e5", "1e5"), ("00", "0"), ("5.e1", "5e1")],
)
def test_words(text: str, word: str) -> None:
    assert json_word(text) == word


@pytest.mark.parametrize("text", ["", "-", "+", ".", "e5", "nulll", "0x1", "1e", "١", "Infinity"])
def test_no_words(text: str) -> None:
    assert json_word(text) is None


PIECES = (*"{}[]\"',: \n0-.et\\u", '"b": ', *MARKERS, "None", "x")


def test_whatever_follows_is_an_object() -> None:
    source = random.Random(7)
    for _ in range(3000):
        text = '{"a": [' + "".join(source.choices(PIECES, k=source.randrange(20)))
        given, left = read([text])
        assert isinstance(json.loads(given), dict), text
        assert read(list(text)) == (given, left), text
