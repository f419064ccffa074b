import contextlib
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from loraplex.core.errors import InvalidTensorError
from loraplex.frontends.kserve.tensors import (
    DATATYPES,
    Tensor,
    from_json,
    from_raw,
    from_values,
    numbers,
    strings,
    to_bf16,
    to_raw,
    to_values,
)
from support.naming import naming, refused

NUMERIC = [name for name, row in DATATYPES.items() if row.wire_dtype is not None and name != "BF16"]


@given(st.data(), st.sampled_from(NUMERIC))
def test_raw_round_trip(data, datatype):
    dtype = DATATYPES[datatype].wire_dtype
    array = data.draw(npst.arrays(dtype, npst.array_shapes(min_dims=0, max_dims=3, min_side=0)))
    raw = to_raw(Tensor.of("t", datatype, array))
    back = from_raw("t", datatype, array.shape, raw)
    assert back.shape == array.shape
    assert to_raw(back) == raw


@given(st.lists(st.binary(max_size=20)))
def test_raw_round_trip_of_strings(elements):
    made = from_values("t", "BYTES", [len(elements)], elements)
    assert from_raw("t", "BYTES", [len(elements)], to_raw(made)).array.tolist() == elements


@given(st.lists(st.text(max_size=20)))
def test_json_round_trip_of_strings(texts):
    assert to_values(from_json("t", "BYTES", [len(texts)], texts)) == texts


@given(st.binary(max_size=40))
def test_any_bytes_are_strings_or_an_error(data):
    with contextlib.suppress(InvalidTensorError):
        assert to_raw(from_raw("t", "BYTES", [2], data)) == data


def test_one_element_and_one_row_of_a_batch():
    numbers_ = from_raw("t", "INT16", [2, 2], b"\x01\x00\x02\x00\x03\x00\xff\xff")
    assert [numbers_.element(index) for index in range(4)] == [1, 2, 3, -1]
    row = numbers_.rows(2, 4)
    assert (row.shape, row.array.tolist(), row.num_bytes) == ((2,), [3, -1], 4)
    words = from_values("t", "BYTES", [2, 1], ["a", "bc"])
    assert (words.element(1), words.num_bytes) == (b"bc", 3)
    assert words.rows(1, 2).array.tolist() == [b"bc"]


def test_raw_is_little_endian_and_row_major():
    tensor = from_raw("t", "INT16", [2, 2], b"\x01\x00\x02\x00\x03\x00\xff\xff")
    assert tensor.array.tolist() == [[1, 2], [3, -1]]


def test_bf16_is_kept_bit_for_bit():
    # 1.0, -2.5, a signalling NaN
    data = b"\x80\x3f\x20\xc0\x81\x7f"
    tensor = from_raw("t", "BF16", [3], data)
    assert tensor.array.tolist() == [0x3F80, 0xC020, 0x7F81]
    assert to_raw(tensor) == data


def test_nested_and_flat_json_are_the_same():
    nested = from_json("t", "INT32", [2, 2], [[1, 2], [3, 4]])
    flat = from_json("t", "INT32", [2, 2], [1, 2, 3, 4])
    assert nested.array.tolist() == flat.array.tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("datatype", "shape", "data", "named"),
    [
        ("INT32", [1], [True], ("t", "True", "INT32", "[-2147483648, 2147483647]")),
        ("INT32", [1], [1.0], ("t", 1.0, "INT32", "[-2147483648, 2147483647]")),
        ("INT32", [1], [2**31], (2147483648, "t", "INT32")),
        ("UINT64", [1], [-1], ("[0, 18446744073709551615]", "t", -1, "UINT64")),
        ("BOOL", [1], [1], ("t", 1, "BOOL", "true or false")),
        ("FP32", [1], ["1"], ("t", "'1'", "FP32")),
        ("FP32", [1], [True], ("t", "True", "FP32")),
        ("FP32", [1], [1e300], ("[-3.40282e+38, 3.40282e+38]", "t", "FP32")),
        ("FP64", [1], [10**400], ("t", "FP64")),
        ("BYTES", [1], [5], ("t", 5, "BYTES")),
        ("BYTES", [1], ["\ud800"], ("t", "BYTES", "UTF-8", "\\ud800")),
        ("INT32", [2], [1], (1, "[2]", 2, "t")),
        ("INT32", [1], [[[1]]], ("t",)),
        ("INT32", [1], 1, ("t",)),
        ("FP16", [1], [1.0], ("receiving FP16 data via JSON is not supported",)),  # Triton's text.
        ("BF16", [1], [1.0], ("receiving BF16 data via JSON is not supported",)),  # Triton's text.
        ("TEXT", [1], ["a"], ("TEXT", "t")),
        ("INT32", [-1], [1], ("[-1]", "t")),
        ("INT32", [True], [1], ("t", "[True]")),
        ("INT32", [1] * 9, [1], ("t", 8, 2147483647)),
        ("INT32", [2**20, 2**20, 0], [], (2147483647, "t")),
    ],
)
def test_bad_json(datatype, shape, data, named):
    with pytest.raises(InvalidTensorError, match=r"'t'|input t$") as raised:
        from_json("t", datatype, shape, data)
    assert re.search(naming(*named), raised.value.message)
    assert raised.value.param == "t"


@pytest.mark.parametrize(
    ("datatype", "data", "named"),
    [
        ("INT32", b"\0" * 3, (4, "INT32", "[1]", 3, "t")),
        ("BYTES", b"\1\0\0", (3, "t", "BYTES")),
        ("BYTES", b"\2\0\0\0a", (0, 2, 1, "t", "BYTES")),  # language: quoted
        ("BYTES", b"", (0, "[1]", 1, "t")),
        ("BYTES", b"\0\0\0\0" * 2, (2, "t", "[1]", 1)),
    ],
)
def test_bad_raw(datatype, data, named):
    with pytest.raises(InvalidTensorError) as raised:
        from_raw("t", datatype, [1], data)
    assert re.search(naming(*named), raised.value.message)


def test_extreme_numbers_are_taken_as_they_are():
    assert from_json("t", "UINT64", [1], [2**64 - 1]).array.tolist() == [2**64 - 1]
    values = [1, -0.5, float("inf")]
    assert from_values("t", "FP32", [3], values).array.tolist() == [1.0, -0.5, np.inf]


def test_strings_that_are_no_text():
    tensor = from_values("t", "BYTES", [1], [b"a\xff"])
    with refused(InvalidTensorError, "'t'", "byte 1", repr(b"a\xff"), param="t"):
        to_values(tensor)


def test_tensors_that_we_make():
    assert strings("s", ["a\0", "é"]).array.tolist() == [b"a\0", "é".encode()]
    assert strings("s", ["a", "b"]).shape == (2,)
    assert numbers("n", "INT32", [[1, 2]]).array.dtype == np.int32


def test_a_scalar_has_an_empty_shape():
    assert from_json("t", "INT32", [], [5]).shape == ()
    assert from_json("t", "INT32", [], [5]).array.shape == ()


@given(npst.arrays(np.float32, npst.array_shapes(max_dims=2), elements=st.floats(width=32)))
def test_bf16_is_rounded_as_torch_rounds(array):
    bits = to_bf16(array)
    assert bits.dtype == np.uint16
    expected = torch.from_numpy(array).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    is_number = ~np.isnan(array)
    assert (bits[is_number] == expected[is_number]).all()
    assert (bits[~is_number] == 0x7FC0).all()


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_halves_are_not_sent_as_json(datatype):
    # Triton's text.
    with pytest.raises(InvalidTensorError, match=f"sending {datatype} data via JSON is not supp"):
        to_values(numbers("t", datatype, [1]))
