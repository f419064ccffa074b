"""A canonical adapter file that a user brings: checked as any other adapter."""

import json
from pathlib import Path

import pytest

from loraplex.core.errors import (
    AdapterMismatchError,
    InvalidAdapterError,
)


class TestNormalFilesOfUsers:
    """Such a file is the user's word, not ours."""

    @pytest.fixture
    def broken(self, staged, tmp_path, pair):
        def change(edit, name="0.a", value=None):
            source = staged(pair.write(tmp_path / "pair")).source.path
            content = Path(source).read_bytes()
            length = int.from_bytes(content[:8], "little")
            header = json.loads(content[8 : 8 + length])
            rows = json.loads(header["__metadata__"]["rows"])
            edit(rows, header)
            header["__metadata__"]["rows"] = json.dumps(rows)
            text = json.dumps(header).encode()
            path = tmp_path / "mine.safetensors"
            path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
            return path

        return change

    @pytest.mark.parametrize(
        ("edit", "error", "named"),
        [
            (lambda rows, _: rows[0].update(kind="magnitude"), InvalidAdapterError,
             "magnitude or factor are needed"),
            (lambda rows, _: rows[0].update(layer=None), AdapterMismatchError, "can be adapted in"),
            (lambda rows, _: rows[0].update(expert=1), AdapterMismatchError,
             "expert 1 of .* has no experts"),
            (lambda rows, _: rows[0].update(layer=99), AdapterMismatchError, "layer 99"),
            (lambda rows, _: rows[0].update(module="x"), AdapterMismatchError, "module 'x'"),
            (lambda rows, _: rows[0].update(scale_bits=0x7FC00000), InvalidAdapterError, "nan"),
            (lambda rows, _: rows[0].update(scale_bits=-1), InvalidAdapterError,
             "broken canonical"),
            (lambda rows, _: rows[0].update(scale_bits=1 << 40), InvalidAdapterError, "broken"),
            (lambda rows, _: rows[0].update(layer=1, module="k_proj"), InvalidAdapterError,
             "occurs twice"),
            (lambda rows, _: rows.clear(), InvalidAdapterError, "broken canonical"),
            (lambda rows, header: header.update({"9" * 5000 + ".a": header.pop("0.a")}),
             InvalidAdapterError, "broken canonical"),
            (lambda rows, header: header.update({"0.c": header.pop("0.a")}), InvalidAdapterError,
             "a and b or a and b and bias are needed"),
            (lambda rows, header: header["0.a"].update(dtype="I32"), InvalidAdapterError,
             "float of 2 dimensions"),
            (lambda rows, header: header["0.a"].update(shape=[16]), InvalidAdapterError,
             "float of 2 dimensions"),
            (lambda rows, header: header["0.a"].update(shape=[1, 16]), InvalidAdapterError,
             "different ranks"),
        ],
    )  # fmt: skip
    def test_each_lie_is_refused(self, staged, broken, edit, error, named):
        with pytest.raises(error, match=named):
            staged(broken(edit))

    def test_the_digest_is_computed_not_believed(self, staged, broken):
        def lie(rows, header):
            header["__metadata__"]["digest"] = "0" * 64

        honest = staged(broken(lambda rows, header: None)).source.digest
        assert staged(broken(lie)).source.digest == honest
