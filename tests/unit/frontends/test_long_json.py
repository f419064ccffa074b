import json

import msgspec
import pytest

from loraplex.frontends.long_json import SENT_BYTES, LongList, encoded, parts_of


class Body(msgspec.Struct):
    values: LongList[object]
    others: list[LongList[object]]
    text: str = "a\0b"


@pytest.mark.parametrize("length", [0, 1, 127, 128, 129, 300])
def test_the_text_is_that_of_lists(length):
    values = [{"index": index, "text": "\0,é"} for index in range(length)]
    body = Body(LongList(values), [LongList(range(length), str), LongList([])])
    expected = {"values": values, "others": [list(map(str, range(length))), []], "text": "a\0b"}
    assert b"".join(encoded(body)) == msgspec.json.encode(expected)
    assert json.loads(b"".join(encoded(LongList(values)))) == values


def test_elements_are_made_when_they_are_encoded_and_a_few_at_a_time():
    made = [0]

    def make(index: int) -> int:
        made[0] += 1
        return index

    pieces = LongList(range(1000), make, piece_length=10).encoded()
    assert made == [0]
    next(pieces)
    next(pieces)
    assert made == [10]


def test_a_list_of_other_objects_is_refused():
    with pytest.raises(NotImplementedError):
        encoded({"x": object()})


def test_a_long_list_is_read_as_a_list():
    values = LongList([1, 2, 3], str)
    assert (values, len(values), values[1], values[1:]) == (["1", "2", "3"], 3, "2", ["2", "3"])
    assert values != ["1", "2"]
    assert values == LongList(["1", "2", "3"])
    assert not LongList([])


@pytest.mark.parametrize("sizes", [[], [1], [SENT_BYTES], [SENT_BYTES + 1], [3, 700_000, 5, 5]])
def test_parts_have_the_bytes_of_the_pieces(sizes):
    pieces = [bytes([index % 251]) * size for index, size in enumerate(sizes)]
    parts = list(parts_of(pieces))
    assert b"".join(parts) == b"".join(pieces)
    assert all(0 < len(part) <= 2 * SENT_BYTES for part in parts)
