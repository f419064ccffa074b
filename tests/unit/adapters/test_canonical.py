import dataclasses
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.adapters.canonical import (
    CanonicalRow,
    RowKind,
    digest,
    read_canonical,
    write_canonical,
)
from loraplex.adapters.state_files import canonical_path
from loraplex.adapters.tensor_file import RawTensor
from loraplex.core.errors import InvalidAdapterError
from support.naming import naming


def raw(shape, dtype="F32", fill=1) -> RawTensor:
    size = int(np.prod(shape)) * int(dtype[-2:]) // 8
    return RawTensor(dtype, shape, bytes((fill + i) % 251 for i in range(size)))


def row(layer=0, module="q_proj", scale=0.1, rank=2, dtype="F32", fill=1, **kwargs) -> CanonicalRow:
    tensors = {"a": raw((rank, 4), dtype, fill), "b": raw((6, rank), dtype, fill + 1)}
    return CanonicalRow(layer, module, None, RowKind.LORA, scale, tensors, **kwargs)


ROWS = [row(1, "q_proj"), row(0, "v_proj", 2.0, dtype="BF16", rank=3), row(0, "q_proj", rank=1)]


def test_the_digest_does_not_depend_on_order_or_names():
    named = [dataclasses.replace(r, origin="anything") for r in reversed(ROWS)]
    swapped = [
        dataclasses.replace(r, tensors={"b": r.tensors["b"], "a": r.tensors["a"]}) for r in named
    ]
    assert digest(swapped) == digest(ROWS)
    assert len(digest(ROWS)) == 64


def test_the_digest_of_an_adapter_never_changes():
    """It names files, KV blocks and versions: with another one all of them are lost."""
    assert digest(ROWS) == "09fb5fa755f7f11c3fc77e0b51ed9d0579f38a14b0e7f78bfb55154fa76f7a14"


CHANGES = {
    "layer": {"layer": 5},
    "no layer": {"layer": None},
    "module": {"module": "q_pro"},
    "expert": {"expert": 0},
    "kind": {"kind": RowKind.FULL},
    "scale": {"scale": float(np.nextafter(np.float32(0.1), np.float32(1)))},
    "values": {"tensors": {"a": raw((2, 4)), "b": raw((6, 2), fill=3)}},
    "shape": {"tensors": {"a": raw((4, 2)), "b": raw((6, 2), fill=2)}},
    "dtype": {
        "tensors": {"a": raw((2, 4)), "b": RawTensor("I32", (6, 2), raw((6, 2), fill=2).data)}
    },
    "tensor names": {"tensors": {"a": raw((2, 4)), "c": raw((6, 2), fill=2)}},
    "a tensor less": {"tensors": {"a": raw((2, 4))}},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_the_digest_covers(change):
    changed = [dataclasses.replace(ROWS[0], **change), *ROWS[1:]]
    assert digest(changed) != digest(ROWS)


def test_rows_are_not_confused_with_their_neighbours():
    one = [row(0, "q"), row(0, "k")]
    assert digest(one) != digest(one[:1])
    moved = [dataclasses.replace(one[0], tensors={}), one[1]]
    assert digest(moved) != digest(one)


@given(scale=st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_a_scale_keeps_its_bits(scale, tmp_path_factory):
    path = tmp_path_factory.mktemp("scale") / "x"
    write_canonical([row(scale=scale)], "d" * 64, path)
    got = read_canonical(path).rows[0].scale
    assert np.float32(got).tobytes() == np.float32(scale).tobytes()


def test_a_file_gives_back_its_rows(tmp_path):
    path = canonical_path(tmp_path, digest(ROWS))
    assert path == tmp_path / "adapters" / digest(ROWS)[:2] / f"{digest(ROWS)}.safetensors"
    write_canonical(ROWS, digest(ROWS), path)
    got = read_canonical(path)
    assert got.digest == digest(ROWS) == digest(got.rows)
    assert [(r.layer, r.module) for r in got.rows] == [
        (0, "q_proj"),
        (0, "v_proj"),
        (1, "q_proj"),
    ]


def test_every_tensor_in_a_file_lies_aligned(tmp_path):
    rows = [row(0, "q_proj", dtype="BF16", rank=1), row(1, "q_proj", dtype="F64"), row(2, "q_proj")]
    odd = dataclasses.replace(rows[0], tensors={"a": raw((1, 1), "F16"), "b": raw((1, 1), "F16")})
    write_canonical([odd, *rows[1:]], "d" * 64, tmp_path / "x")
    for got in read_canonical(tmp_path / "x").rows:
        for tensor in got.tensors.values():
            address = np.frombuffer(tensor.data, np.uint8).ctypes.data
            assert address % tensor.item_bytes == 0


def test_another_file_is_not_a_normal_file(tmp_path):
    with pytest.raises(InvalidAdapterError):
        read_canonical(tmp_path / "none")
    write_canonical(ROWS, "d" * 64, tmp_path / "x")
    content = (tmp_path / "x").read_bytes()
    (tmp_path / "x").write_bytes(content.replace(b"loraplex-adapter", b"another--adapter"))
    with pytest.raises(InvalidAdapterError, match=naming(1)):
        read_canonical(tmp_path / "x")
    (tmp_path / "x").write_bytes(content[:-1])
    with pytest.raises(InvalidAdapterError, match="truncated"):
        read_canonical(tmp_path / "x")
    (tmp_path / "x").write_bytes(content.replace(b'"0.a"', b'"9.a"'))
    with pytest.raises(InvalidAdapterError, match=r"9\.a"):
        read_canonical(tmp_path / "x")


def test_a_file_that_another_process_writes_meanwhile(tmp_path, monkeypatch):
    path, opened = tmp_path / "file", os.open

    def open_late(*args):
        monkeypatch.undo()
        write_canonical(ROWS, digest(ROWS), path)
        return opened(*args)

    monkeypatch.setattr(os, "open", open_late)
    assert read_canonical(path).digest == digest(ROWS)
