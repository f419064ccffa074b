import zipfile

import numpy as np
import pytest
import torch

from loraplex.adapters.formats.torch_bin import read_torch_file
from loraplex.adapters.tensor_file import StagingLimits
from loraplex.core.errors import AdapterTooLargeError, InvalidAdapterError
from support.naming import naming

LIMITS = StagingLimits(max_file_bytes=1 << 20, max_tensors=10)


@pytest.mark.parametrize("is_zip", [True, False])
def test_tensors_come_as_they_are(tmp_path, is_zip):
    state = {
        "a": torch.randn(3, 4),
        "b": torch.randn(4, 3, dtype=torch.bfloat16).t(),
        "c": torch.nn.Parameter(torch.ones(2, dtype=torch.float16)),
        "d": torch.arange(3),
    }
    torch.save(state, tmp_path / "x.bin", _use_new_zipfile_serialization=is_zip)
    got = read_torch_file(tmp_path / "x.bin", LIMITS)
    assert {name: t.dtype for name, t in got.items()} == {
        "a": "F32",
        "b": "BF16",
        "c": "F16",
        "d": "int64",
    }
    np.testing.assert_array_equal(got["a"].array(), state["a"].numpy())
    np.testing.assert_array_equal(got["b"].array(), state["b"].float().numpy())
    assert not got["d"].is_float


class Payload:
    """What a hostile file would run."""

    def __reduce__(self):
        return (print, ("the payload ran",))


@pytest.mark.parametrize("is_zip", [True, False])
def test_pickled_objects_are_refused_and_not_run(tmp_path, capsys, is_zip):
    state = {"a": torch.ones(1), "b": Payload()}
    torch.save(state, tmp_path / "x.bin", _use_new_zipfile_serialization=is_zip)
    with pytest.raises(InvalidAdapterError, match=naming("x.bin", "pickled")):
        read_torch_file(tmp_path / "x.bin", LIMITS)
    assert "payload" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("state", "named"),
    [
        (torch.ones(2), ("x.bin",)),
        ({1: torch.ones(2)}, ("x.bin",)),
        ({"a": [1, 2]}, ("a",)),
        ({"a": torch.ones(2, 2).to_sparse()}, ("a",)),
    ],
)
def test_other_contents_are_refused(tmp_path, state, named):
    torch.save(state, tmp_path / "x.bin")
    with pytest.raises(InvalidAdapterError, match=naming(*named)):
        read_torch_file(tmp_path / "x.bin", LIMITS)


@pytest.mark.parametrize("content", [b"", b"no torch file at all", b"PK\x03\x04", b"\x80\x02}q\0."])
def test_broken_files_are_refused(tmp_path, content):
    (tmp_path / "x.bin").write_bytes(content)
    with pytest.raises(InvalidAdapterError):
        read_torch_file(tmp_path / "x.bin", LIMITS)


def test_a_truncated_file_is_refused(tmp_path):
    torch.save({"a": torch.ones(100)}, tmp_path / "x.bin")
    content = (tmp_path / "x.bin").read_bytes()
    (tmp_path / "x.bin").write_bytes(content[: len(content) // 2])
    with pytest.raises(InvalidAdapterError):
        read_torch_file(tmp_path / "x.bin", LIMITS)


def test_limits(tmp_path):
    torch.save({str(i): torch.ones(1) for i in range(11)}, tmp_path / "x.bin")
    with pytest.raises(AdapterTooLargeError, match="11 tensors"):
        read_torch_file(tmp_path / "x.bin", LIMITS)
    with pytest.raises(AdapterTooLargeError, match=naming(10)):
        read_torch_file(tmp_path / "x.bin", StagingLimits(max_file_bytes=10, max_tensors=100))


def test_a_view_that_repeats_its_bytes_is_not_unpacked(tmp_path):
    torch.save({"a": torch.ones(1).expand(1 << 40)}, tmp_path / "x.bin")
    with pytest.raises(AdapterTooLargeError, match="unpacks"):
        read_torch_file(tmp_path / "x.bin", LIMITS)


def test_a_compressed_archive_is_not_unpacked(tmp_path):
    torch.save({"a": torch.zeros(1000)}, tmp_path / "x.bin")
    with (
        zipfile.ZipFile(tmp_path / "x.bin") as plain,
        zipfile.ZipFile(tmp_path / "y.bin", "w", zipfile.ZIP_DEFLATED) as small,
    ):
        for name in plain.namelist():
            small.writestr(name, plain.read(name))
    with pytest.raises(InvalidAdapterError, match="compressed"):
        read_torch_file(tmp_path / "y.bin", LIMITS)
