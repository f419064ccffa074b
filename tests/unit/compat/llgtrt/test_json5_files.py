"""JSON5 files: what is read, what is refused by file and place, and how several are merged."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.compat.llgtrt import MAX_FILE_BYTES, merge_files, read_json5
from loraplex.core.errors import ConfigError
from support.naming import naming

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=10,
)
OBJECTS = st.dictionaries(st.text(max_size=3), VALUES, max_size=4)


def write(folder, text, name="a.json5"):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_comments_trailing_commas_and_bare_keys(tmp_path):
    text = """\ufeff// one
    {runtime: {/* two */ max_batch_size: 0x10, 'x': [1, .5,],}, tokenizer: null, y: "a\\
b",}"""
    assert read_json5(write(tmp_path, text)) == {
        "runtime": {"max_batch_size": 16, "x": [1, 0.5]},
        "tokenizer": None,
        "y": "ab",
    }


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{a: 1", ("line 1", "column 6")),
        ("[1]", ("object", "list")),
        ("{a: 1, a: 2}", ("'a'", "twice")),
        ('{"a": 1, "a": 2}', ("'a'", "twice")),
        ("{a: NaN}", ("NaN",)),
        ('{"a": -Infinity}', ("-Infinity",)),
        (b"\xff", ("UTF-8", "byte 0")),
        ("[" * 5000, ("nested",)),
        (b" " * (MAX_FILE_BYTES + 1), (MAX_FILE_BYTES,)),
    ],
)
def test_what_is_no_json5_is_reported_with_its_file(tmp_path, text, named):
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=naming(path, *named)):
        read_json5(path)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match=naming("gone")):
        read_json5(tmp_path / "gone")


def test_later_files_win_at_any_depth_and_null_stays_null(tmp_path):
    first = write(tmp_path, "{a: {b: 1, c: {d: 2}}, e: [1], f: {g: 1}}", "1")
    second = write(tmp_path, "{a: {b: null, c: {x: 3}}, e: [2], f: 4, h: {i: 1}}", "2")
    merged = merge_files([first, second])
    assert merged.values == {
        "a": {"b": None, "c": {"d": 2, "x": 3}},
        "e": [2],
        "f": 4,
        "h": {"i": 1},
    }
    assert merged.source(("a", "c", "d")) == first
    assert merged.source(("a", "b")) == second
    assert merged.source(("f",)) == second
    assert merge_files([second, first]).values["f"] == {"g": 1}
    assert merge_files([]).values == {}


@given(OBJECTS, OBJECTS)
def test_merging_is_the_deep_union(tmp_path_factory, first, second):
    import json

    folder = tmp_path_factory.mktemp("files")
    paths = [write(folder, json.dumps(v), str(i)) for i, v in enumerate((first, second))]

    def expected(low, high):
        if isinstance(low, dict) and isinstance(high, dict):
            return {**low, **{k: expected(low.get(k), v) for k, v in high.items()}}
        return high

    assert merge_files(paths).values == expected(first, second)
