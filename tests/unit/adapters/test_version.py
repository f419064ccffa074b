import pytest

from loraplex.adapters.version import MAX_NAME_LENGTH, check_name
from loraplex.core.errors import InvalidParameterError
from support.naming import naming


@pytest.mark.parametrize(
    "name", ["zh", "a/b", "base:zh", "..zh", "a..b", "ñ 日本", "עברית", "x" * MAX_NAME_LENGTH]
)
def test_names_of_adapters(name):
    check_name(name)


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("", (1, 256, 0)),
        ("x" * 257, (1, 256, 257)),
        ("a\x00b", ("U+0000",)),
        ("a\nb", ("U+000A",)),
        ("a\x7fb", ("U+007F",)),
        ("a\u2028b", ("U+2028",)),
        ("a\u202eb", ("U+202E",)),
        ("a\u2066b", ("U+2066",)),
        ("a\u200fb", ("U+200F",)),
        ("a\ud800b", ("U+D800",)),
        ("..", ("'..'",)),
        ("a/../b", ("a/../b",)),
        ("./a", ("./a",)),
    ],
)
def test_names_that_are_refused(name, named):
    with pytest.raises(InvalidParameterError, match=naming(*named)) as caught:
        check_name(name)
    assert caught.value.param == "name"
