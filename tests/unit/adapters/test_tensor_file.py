import json
import math
import os
import struct

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from loraplex.adapters.durable_files import write_atomically
from loraplex.adapters.tensor_file import (
    RawTensor,
    StagingLimits,
    encode_header,
    read_bounded,
    read_tensors,
    tensor_names,
)
from loraplex.core.errors import AdapterTooLargeError, InvalidAdapterError, LoraplexError
from support.examples import examples
from support.naming import naming

LIMITS = StagingLimits(max_file_bytes=1 << 20, max_header_bytes=1 << 16, max_tensors=100)


def file_of(path, header, data=b"", header_bytes=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = len(text) if header_bytes is None else header_bytes
    path.write_bytes(struct.pack("<Q", length) + text + data)
    return path


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_reads_what_the_library_writes(tmp_path):
    tensors = {
        "x": np.arange(6, dtype="f4").reshape(2, 3),
        "y": np.float16([1.5]),
        "empty": np.zeros((0, 4), "f8"),
    }
    save_file(tensors, tmp_path / "t", metadata={"k": "v"})
    got = read_tensors(tmp_path / "t", LIMITS)
    assert got.metadata == {"k": "v"}
    assert got.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert got.tensors[name].shape == tensor.shape
        np.testing.assert_array_equal(got.tensors[name].array(), tensor)


def test_the_library_reads_what_is_written(tmp_path):
    tensors = {"a": RawTensor("F32", (1, 2), b"\0" * 8), "b": RawTensor("BF16", (3,), b"\1" * 6)}
    data = [tensor.data for tensor in tensors.values()]
    write_atomically(tmp_path / "deep" / "t", [encode_header(tensors, {"k": "v"}), *data])
    with safe_open(tmp_path / "deep" / "t", "pt") as file:
        assert file.metadata() == {"k": "v"}
        assert file.get_tensor("a").tolist() == [[0.0, 0.0]]
        assert file.get_tensor("b").shape == (3,)
    assert os.listdir(tmp_path / "deep") == ["t"]


BROKEN = {
    "empty": b"",
    "short": b"\x01\0\0",
    "no json": struct.pack("<Q", 4) + b"{{{{",
    "not an object": struct.pack("<Q", 2) + b"[]",
    "deep": struct.pack("<Q", 40_000) + b"[" * 40_000,
    "truncated header": struct.pack("<Q", 100) + b"{}",
    "a tail": struct.pack("<Q", 2) + b"{}" + b"tail",
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_file_is_an_error_that_names_it(tmp_path, content):
    (tmp_path / "t").write_bytes(content)
    with pytest.raises(InvalidAdapterError, match=str(tmp_path / "t")):
        read_tensors(tmp_path / "t", LIMITS)


@pytest.mark.parametrize(
    ("header", "named"),
    [
        ({"x": entry(offsets=(0, 16))}, "needs 8 bytes"),
        ({"x": entry(shape=(3,))}, "needs 12 bytes"),
        ({"x": entry(shape=(-2,))}, "x"),
        ({"x": entry(shape=(-1, -2))}, "x"),
        ({"x": entry(shape=(2**40, 2**40))}, "x"),
        ({"x": entry(shape=(2**63 - 1,) * 50)}, "length <= 32"),
        ({"x": entry(shape=(10**400,))}, "x"),
        ({"x": entry(offsets=(0, 10**400))}, "x"),
        ({"x": entry(dtype="C128")}, "C128"),
        ({"x": entry(), "y": entry()}, "from 8 on"),
        ({"x": entry(offsets=(8, 16))}, "from 0 on"),
        ({"x": entry(shape=(1,), offsets=(0, 4))}, "tail"),
        ({"x": entry(offsets=(8, 0))}, "x"),
        ({"x": {"dtype": "F32"}}, "shape"),
        ({"x": entry() | {"extra": 1}}, "extra"),
        ({"__metadata__": {"k": 1}}, "str"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path, header, named):
    with pytest.raises(InvalidAdapterError, match=named):
        read_tensors(file_of(tmp_path / "t", header, b"\0" * 8), LIMITS)


def test_the_same_name_twice_leaves_bytes_without_a_tensor(tmp_path):
    first, second = json.dumps(entry()), json.dumps(entry(offsets=(8, 16)))
    header = f'{{"x": {first}, "x": {second}}}'.encode()
    with pytest.raises(InvalidAdapterError):
        read_tensors(file_of(tmp_path / "t", header, b"\0" * 16), LIMITS)


@pytest.mark.parametrize("limit", ["max_file_bytes", "max_header_bytes", "max_tensors"])
def test_limits_are_kept_before_reading(tmp_path, limit):
    save_file({"x": np.zeros(4, "f4"), "y": np.zeros(4, "f4")}, tmp_path / "t")
    read_tensors(tmp_path / "t", LIMITS)
    with pytest.raises(AdapterTooLargeError, match=naming(1)):
        read_tensors(tmp_path / "t", msgspec.structs.replace(LIMITS, **{limit: 1}))


def test_a_huge_declared_header_is_not_allocated(tmp_path):
    with pytest.raises(AdapterTooLargeError, match="header"):
        read_tensors(file_of(tmp_path / "t", {}, header_bytes=2**62), LIMITS)


def test_what_is_not_a_regular_file_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "none"):
        with pytest.raises(InvalidAdapterError):
            read_bounded(path, 100)


@examples(1, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_damage_gives_anything_but_an_error_of_ours(tmp_path, data):
    save_file({"x": np.arange(6, dtype="f4"), "y": np.zeros((2, 2), "f2")}, tmp_path / "t")
    content = bytearray((tmp_path / "t").read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    del content[data.draw(st.integers(0, len(content))) :]
    (tmp_path / "t").write_bytes(content)
    try:
        got = read_tensors(tmp_path / "t", LIMITS)
    except LoraplexError:
        return
    assert sum(tensor.num_bytes for tensor in got.tensors.values()) <= len(content)


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    write_atomically(tmp_path / "t", [b"old"])

    def pieces():
        yield b"new"
        raise RuntimeError("disk")

    with pytest.raises(RuntimeError):
        write_atomically(tmp_path / "t", pieces())
    assert (tmp_path / "t").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["t"]


BF16_ONE, BF16_NAN, BF16_INF = b"\x80\x3f", b"\xc0\x7f", b"\x80\x7f"


@pytest.mark.parametrize(
    ("dtype", "data", "finite", "zero"),
    [
        ("F32", np.float32([1, -0.0]).tobytes(), True, False),
        ("F32", np.float32([0, -0.0]).tobytes(), True, True),
        ("F32", np.float32([np.nan]).tobytes(), False, False),
        ("F16", np.float16([np.inf]).tobytes(), False, False),
        ("F16", np.float16([65504]).tobytes(), True, False),
        ("F64", np.float64([-np.inf]).tobytes(), False, False),
        ("BF16", BF16_ONE, True, False),
        ("BF16", BF16_NAN, False, False),
        ("BF16", BF16_INF, False, False),
        ("BF16", b"\0\0\0\x80", True, True),
    ],
)
def test_finite_and_zero(dtype, data, finite, zero):
    tensor = RawTensor(dtype, (len(data) * 8 // int(dtype[-2:]),), data)
    assert tensor.is_finite() == finite
    assert tensor.is_zero() == zero


def test_a_bfloat16_array_is_its_values():
    assert RawTensor("BF16", (2,), BF16_ONE + BF16_INF).array().tolist() == [1.0, np.inf]


@pytest.mark.parametrize(
    ("dtype", "array_type"), [("F64", "<f8"), ("F32", "<f4"), ("F16", "<f2"), ("BF16", "<u2")]
)
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], 0.0),
        ([0.0, -0.0], 0.0),
        ([1.0, -2.5, 2.0], 2.5),
        ([1.0, -math.inf], math.inf),
        ([math.inf, -math.nan, 1.0], math.nan),
    ],
)
def test_largest_magnitude(dtype, array_type, values, expected):
    if dtype == "BF16":
        data = (np.array(values, "<f4").view("<u4") >> 16).astype(array_type)
    else:
        data = np.array(values, array_type)
    tensor = RawTensor(dtype, data.shape, data.tobytes())
    assert tensor.largest_magnitude() == pytest.approx(expected, nan_ok=True)
    assert tensor.is_finite() == math.isfinite(expected)
    assert tensor.is_zero() == (expected == 0.0)


@pytest.mark.parametrize("read", [lambda path: read_tensors(path, LIMITS), tensor_names])
def test_a_pointer_of_git_lfs(tmp_path, read):
    path = tmp_path / "adapter_model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    with pytest.raises(InvalidAdapterError, match=naming("LFS", "git lfs pull")):
        read(path)
