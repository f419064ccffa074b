import re

import pytest

from loraplex.adapters.version import MAX_NAME_LENGTH, check_name
from loraplex.core.errors import InvalidParameterError


@pytest.mark.parametrize(
    "name", ["zh", "a/b", "base:zh", "..zh", "a..b", "ñ 日本", "עברית", "x" * MAX_NAME_LENGTH]
)
def test_names_of_adapters(name):
    check_name(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "1 to 256 characters, got 0"),
        ("x" * 257, "1 to 256 characters, got 257"),
        ("a\x00b", "control character U+0000"),
        ("a\nb", "control character U+000A"),
        ("a\x7fb", "control character U+007F"),
        ("a\u2028b", "control character U+2028"),
        ("a\u202eb", "control character U+202E"),
        ("a\u2066b", "control character U+2066"),
        ("a\u200fb", "control character U+200F"),
        ("a\ud800b", "control character U+D800"),
        ("..", "'..' cannot be the name of an adapter"),
        ("a/../b", "cannot be the name of an adapter"),
        ("./a", "cannot be the name of an adapter"),
    ],
)
def test_names_that_are_refused(name, message):
    with pytest.raises(InvalidParameterError, match=re.escape(message)) as caught:
        check_name(name)
    assert caught.value.param == "name"
