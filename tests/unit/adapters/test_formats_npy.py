"""NumPy's files: what numpy writes is read, and what is broken or hostile is refused."""

import io
import os

import numpy as np
import pytest

from loraplex.adapters.formats.npy import encode_npy_header, read_npy
from loraplex.adapters.tensor_file import RawTensor
from loraplex.core.errors import AdapterTooLargeError, InvalidAdapterError
from support.naming import naming


def saved(tmp_path, array, **kwargs):
    path = tmp_path / "a.npy"
    np.save(path, array, **kwargs)
    return path


@pytest.mark.parametrize(
    ("kind", "dtype"), [("<f2", "F16"), ("<f4", "F32"), ("<i4", "I32"), ("<i8", "I64")]
)
@pytest.mark.parametrize("order", ["C", "F"])
def test_what_numpy_saves(tmp_path, kind, dtype, order):
    array = np.asarray(np.arange(24).reshape(1, 4, 6), kind, order=order)
    tensor = read_npy(saved(tmp_path, array), 10_000)
    assert (tensor.dtype, tensor.shape) == (dtype, (1, 4, 6))
    np.testing.assert_array_equal(np.ndarray(tensor.shape, kind, tensor.data), array)


def test_big_endian_files_are_turned_round(tmp_path):
    tensor = read_npy(saved(tmp_path, np.arange(6, dtype=">f4").reshape(2, 3)), 10_000)
    assert tensor.array().tolist() == [[0, 1, 2], [3, 4, 5]]


def test_raw_elements_of_two_bytes_are_bfloat16(tmp_path):
    bits = np.array([[0x3F80, 0xC000, 0x0000]], "<u2")
    tensor = read_npy(saved(tmp_path, bits.view("V2")), 10_000)
    assert tensor.dtype == "BF16"
    assert tensor.array().tolist() == [[1.0, -2.0, 0.0]]


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_all_versions_of_the_format(tmp_path, version):
    stream = io.BytesIO()
    np.lib.format.write_array(stream, np.ones((2, 2), "<f4"), version=version)
    (tmp_path / "a.npy").write_bytes(stream.getvalue())
    assert read_npy(tmp_path / "a.npy", 10_000).shape == (2, 2)


@pytest.mark.parametrize(("dtype", "kind"), [("F16", "<f2"), ("F32", "<f4"), ("I32", "<i4")])
def test_what_we_write_numpy_reads(tmp_path, dtype, kind):
    array = np.arange(6, dtype=kind).reshape(1, 2, 3)
    tensor = RawTensor(dtype, array.shape, array.tobytes())
    (tmp_path / "a.npy").write_bytes(encode_npy_header(tensor) + tensor.data)
    np.testing.assert_array_equal(np.load(tmp_path / "a.npy"), array)


class TestRefusals:
    def test_pickled_objects(self, tmp_path):
        path = saved(tmp_path, np.array([{"a": 1}], dtype=object), allow_pickle=True)
        with pytest.raises(InvalidAdapterError, match=r"supported: F16|not a plain NumPy"):
            read_npy(path, 10_000)

    @pytest.mark.parametrize("kind", ["<u2", "<c8", "S4", "V3", "?", "<M8[s]", [("x", "<f2")]])
    def test_other_types(self, tmp_path, kind):
        with pytest.raises(InvalidAdapterError, match=r"supported: F16|not a plain NumPy"):
            read_npy(saved(tmp_path, np.zeros(2, kind)), 10_000)

    @pytest.mark.parametrize("size", [0, 5, 9, 60, 128, 151])
    def test_cut_off_anywhere(self, tmp_path, size):
        path = saved(tmp_path, np.zeros((2, 3), "<f4"))
        os.truncate(path, size)
        with pytest.raises(InvalidAdapterError, match=r"a\.npy"):
            read_npy(path, 10_000)

    def test_a_tail(self, tmp_path):
        path = saved(tmp_path, np.zeros((2, 3), "<f4"))
        path.write_bytes(path.read_bytes() + b"\0")
        with pytest.raises(InvalidAdapterError, match=naming(24, 25)):
            read_npy(path, 10_000)

    @pytest.mark.parametrize(
        "header",
        [
            "{'descr': '<f4', 'fortran_order': False, 'shape': (-2, -3)}",
            "{'descr': '<f4', 'fortran_order': False, 'shape': (99999999, 99999999)}",
            "{'descr': '<f4', 'fortran_order': False}",
            "{'descr': __import__('os'), 'fortran_order': False, 'shape': (6,)}",
            "(" * 3000,
            "{'descr': '<f4', 'fortran_order': False, 'shape': (" + "1" * 3000 + "), }",
            "{'descr': '<f4', 'fortran_order': False, 'shape': (" + "1, " * 1000 + "x), }",
            "",
        ],
    )
    def test_headers_that_lie(self, tmp_path, header):
        text = header.encode()
        head = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text
        (tmp_path / "a.npy").write_bytes(head + bytes(24))
        with pytest.raises(InvalidAdapterError, match=r"a\.npy"):
            read_npy(tmp_path / "a.npy", 10_000)

    def test_the_size_is_limited(self, tmp_path):
        with pytest.raises(AdapterTooLargeError, match=naming(100)):
            read_npy(saved(tmp_path, np.zeros(100, "<f4")), 100)
