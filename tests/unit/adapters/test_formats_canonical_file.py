"""A canonical adapter file that a user brings: checked as any other adapter."""

import json
from pathlib import Path

import pytest

from loraplex.core.errors import (
    AdapterMismatchError,
    InvalidAdapterError,
)
from support.naming import naming


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
             ("magnitude", 0, "q_proj")),
            (lambda rows, _: rows[0].update(layer=None), AdapterMismatchError,
             ("model.layers.0.self_attn.q_proj.lora_A", "k_proj", "down_proj")),
            (lambda rows, _: rows[0].update(expert=1), AdapterMismatchError,
             ("expert", 1, "model.layers.0.self_attn.q_proj.lora_A")),
            (lambda rows, _: rows[0].update(layer=99), AdapterMismatchError,
             ("layer", 99)),
            (lambda rows, _: rows[0].update(module="x"), AdapterMismatchError,
             ("module", "x", "model.layers.0.self_attn.q_proj.lora_A")),
            (lambda rows, _: rows[0].update(scale_bits=0x7FC00000), InvalidAdapterError,
             ("nan", 0, "q_proj")),
            (lambda rows, _: rows[0].update(scale_bits=-1), InvalidAdapterError,
             (-1,)),
            (lambda rows, _: rows[0].update(scale_bits=1 << 40), InvalidAdapterError,
             ("broken",)),
            (lambda rows, _: rows[0].update(layer=1, module="k_proj"), InvalidAdapterError,
             (1, "k_proj")),
            (lambda rows, _: rows.clear(), InvalidAdapterError,
             ("mine.safetensors",)),
            (lambda rows, header: header.update({"9" * 5000 + ".a": header.pop("0.a")}),
             InvalidAdapterError,
             ("mine.safetensors",)),
            (lambda rows, header: header.update({"0.c": header.pop("0.a")}), InvalidAdapterError,
             (0, "q_proj", "['b', 'c']")),
            (lambda rows, header: header["0.a"].update(dtype="I32"), InvalidAdapterError,
             (2, 0, "I32")),
            (lambda rows, header: header["0.a"].update(shape=[16]), InvalidAdapterError,
             (2, 0, "[16]")),
            (lambda rows, header: header["0.a"].update(shape=[1, 16]), InvalidAdapterError,
             ("[1, 16]", 0, "[12, 2]")),
        ],
    )  # fmt: skip
    def test_each_lie_is_refused(self, staged, broken, edit, error, named):
        with pytest.raises(error, match=naming(*named)):
            staged(broken(edit))

    def test_the_digest_is_computed_not_believed(self, staged, broken):
        def lie(rows, header):
            header["__metadata__"]["digest"] = "0" * 64

        honest = staged(broken(lambda rows, header: None)).source.digest
        assert staged(broken(lie)).source.digest == honest
