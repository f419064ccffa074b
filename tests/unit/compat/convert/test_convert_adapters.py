"""Files of other systems, and the two commands that write them."""

import json
import os
import re

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from loraplex.adapters.canonical import digest
from loraplex.adapters.formats.export import StorageType
from loraplex.adapters.shapes import BaseShapes
from loraplex.adapters.staged import StageRequest
from loraplex.adapters.staging_worker import stage
from loraplex.cli.main import app
from loraplex.compat.convert import adapters
from loraplex.compat.convert.adapters import read_peft, write_lora_file, write_pair, write_peft
from loraplex.core.errors import InvalidAdapterError, InvalidParameterError
from support.naming import naming, refused

SHAPES = BaseShapes(12, {"q_proj": (8, 12), "up_proj": (8, 10)})
PREFIX = "base_model.model.model.layers"


@pytest.fixture
def folder(tmp_path):
    """A function (config, dtype, extra tensors) -> a PEFT folder of two layers, one module each."""

    def write(config=None, dtype="<f4", extra=None):
        rng = np.random.default_rng(0)
        tensors = {
            f"{PREFIX}.0.self_attn.q_proj.lora_A.weight": rng.normal(size=(2, 8)),
            f"{PREFIX}.0.self_attn.q_proj.lora_B.weight": rng.normal(size=(12, 2)),
            f"{PREFIX}.11.mlp.up_proj.lora_A.weight": rng.normal(size=(4, 8)),
            f"{PREFIX}.11.mlp.up_proj.lora_B.weight": rng.normal(size=(10, 4)),
        }
        path = tmp_path / "peft"
        path.mkdir(exist_ok=True)
        default = {
            "r": 2,
            "lora_alpha": 6,
            "rank_pattern": {"up_proj": 4},
            "target_modules": ["q_proj", "up_proj"],
        }
        values = {"peft_type": "LORA"} | (default if config is None else config)
        (path / "adapter_config.json").write_text(json.dumps(values))
        stored = {name: values.astype(dtype) for name, values in tensors.items()}
        save_file(stored | (extra or {}), path / "adapter_model.safetensors")
        return path

    return write


def run(*args):
    return CliRunner().invoke(app, [str(arg) for arg in args])


def digest_of(path, tmp_path, shapes=SHAPES) -> str:
    state = str(tmp_path / "state")
    request = StageRequest(request_id=1, path=str(path), state_dir=state, shapes=shapes)
    return stage(request).source.digest


EXPERTS = {"w1": (8, 6), "w2": (6, 8), "w3": (8, 6)}
MIXTURE = BaseShapes(
    2,
    {
        "router": (8, 3),
        "experts.gate_proj": (8, 6),
        "experts.down_proj": (6, 8),
        "experts.up_proj": (8, 6),
    },
    num_experts=dict.fromkeys(("experts.gate_proj", "experts.down_proj", "experts.up_proj"), 3),
)


@pytest.fixture
def mixtral(tmp_path):
    """A function (experts) -> a PEFT folder of these experts of Mixtral's layer 1.

    Expert 1 has rank 1, the others 2.
    """

    def write(*numbers: int, has_router: bool = False):
        rng = np.random.default_rng(0)
        shapes = {
            f"experts.{number}.{name}": (1 if number == 1 else 2, shape)
            for number in numbers
            for name, shape in EXPERTS.items()
        } | ({"gate": (2, (8, 3))} if has_router else {})
        tensors = {}
        for name, (rank, (num_in, num_out)) in shapes.items():
            path = f"{PREFIX}.1.block_sparse_moe.{name}"
            tensors[f"{path}.lora_A.weight"] = rng.normal(size=(rank, num_in)).astype("<f4")
            tensors[f"{path}.lora_B.weight"] = rng.normal(size=(num_out, rank)).astype("<f4")
        path = tmp_path / "mixtral"
        path.mkdir(exist_ok=True)
        config = {
            "peft_type": "LORA",
            "r": 2,
            "lora_alpha": 4,
            "rank_pattern": {r"experts\.1\.w[123]": 1},
            "target_modules": ["w1", "w2", "w3", "gate"],
        }
        (path / "adapter_config.json").write_text(json.dumps(config))
        save_file(tensors, path / "adapter_model.safetensors")
        return path

    return write


@pytest.fixture
def base(tmp_path):
    """A function (number of experts) -> a folder with the config.json of MIXTURE."""

    def write(num_experts: int):
        folder = tmp_path / f"base-{num_experts}"
        folder.mkdir()
        fields = {"architectures": ["MixtralForCausalLM"], "vocab_size": 20, "hidden_size": 8}
        fields |= {"intermediate_size": 6, "num_hidden_layers": 2, "num_attention_heads": 2}
        fields |= {"num_local_experts": num_experts, "num_experts_per_tok": 1}
        (folder / "config.json").write_text(json.dumps(fields | {"num_key_value_heads": 2}))
        return folder

    return write


class TestExperts:
    def test_no_expert_is_written_over_another(self, mixtral, tmp_path):
        """hf_lora_convert.py wrote all experts to one place of r x (in + out) values."""
        source, out = mixtral(0, 1, 2, has_router=True), tmp_path / "out"
        result = run("convert-lora", "-i", source, "-o", out, "--storage-type", "float32")
        assert result.exit_code == 0, result.output
        weights = np.load(out / "model.lora_weights.npy")[0]
        config = np.load(out / "model.lora_config.npy")[0]
        assert config.tolist() == [[13, 1, 2], [14, 1, 2], [15, 1, 2], [16, 1, 2]]
        assert weights.shape == (4, 3 * 2 * 14)
        tensors = load_file(source / "adapter_model.safetensors")
        for row, name in enumerate(EXPERTS):
            num_in, num_out = EXPERTS[name]
            a = weights[row, : 6 * num_in].reshape(3, 2, num_in)
            b = weights[row, 6 * num_in :].reshape(3, num_out, 2)
            for expert in range(3):
                path = f"{PREFIX}.1.block_sparse_moe.experts.{expert}.{name}"
                own_a, own_b = (tensors[f"{path}.lora_{m}.weight"] for m in "AB")
                scale = np.float32(4 if expert == 1 else 2)
                np.testing.assert_allclose(
                    b[expert] @ a[expert], own_b @ own_a * scale, rtol=1e-5, atol=1e-5
                )
                assert np.count_nonzero(np.abs(b[expert]).sum(0)) == len(own_a)
        for line in (
            "  experts.gate_proj -> moe_h_to_4h (13): layers 1, experts 0, 2, rank 2, scale 2",
            "  experts.gate_proj -> moe_h_to_4h (13): layers 1, experts 1, rank 1, scale 4",
            "  router -> moe_router (16): layers 1, rank 2, scale 2",
        ):
            assert line in result.output.splitlines()

    @pytest.mark.parametrize("kind", ["pair", "file"])
    def test_the_base_s_number_of_experts(self, mixtral, base, tmp_path, kind):
        """Only the base shows that it has three, as there is no expert 2 and no router."""
        source = mixtral(0, 1)
        out = tmp_path / "out" if kind == "pair" else tmp_path / "out.safetensors"
        command = ("convert-lora" if kind == "pair" else "extract-lora", "-i", source, "-o", out)
        assert run(*command).exit_code == 0
        with pytest.raises(InvalidAdapterError, match=naming("moe_h_to_4h", 0, 1, 2, 3)):
            digest_of(out, tmp_path, MIXTURE)
        result = run(*command, "--model-dir", base(3), "--force")
        assert result.exit_code == 0, result.output
        assert digest_of(out, tmp_path, MIXTURE)
        result = run(*command, "--model-dir", base(1), "--force")
        assert result.exit_code == 1
        assert "the adapter has 2 experts, the base model 1" in result.output

    def test_one_tensor_for_all_experts(self, base, tmp_path):
        """PEFT's target_parameters: A [experts x rank, in], B [out, rank x experts]."""
        rng = np.random.default_rng(0)
        a, b = rng.normal(size=(3, 2, 6)).astype("<f4"), rng.normal(size=(8, 2, 3)).astype("<f4")
        path = f"{PREFIX}.1.mlp.experts"
        source, out = tmp_path / "stacked", tmp_path / "out"
        source.mkdir()
        tensors = {
            f"{path}.lora_A.weight": a.reshape(6, 6),
            f"{path}.lora_B.weight": b.reshape(8, 6),
        }
        save_file(tensors, source / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "peft_version": "0.21.0"}
        config |= {"target_modules": [], "target_parameters": ["mlp.experts.down_proj"]}
        (source / "adapter_config.json").write_text(json.dumps(config))
        command = ("convert-lora", "-i", source, "-o", out, "--storage-type", "float32")
        result = run(*command)
        assert result.exit_code == 1
        assert "name its folder (--model-dir)" in result.output
        result = run(*command, "--model-dir", base(3))
        assert result.exit_code == 0, result.output
        assert np.load(out / "model.lora_config.npy").tolist() == [[[14, 1, 2]]]
        (values,) = np.load(out / "model.lora_weights.npy")[0]
        np.testing.assert_array_equal(values[:36].reshape(3, 2, 6), a)
        np.testing.assert_array_equal(values[36:].reshape(3, 8, 2), b.transpose(2, 0, 1))

    def test_pair_file_and_peft_are_the_same_rows(self, mixtral, tmp_path):
        rows = read_peft(str(mixtral(0, 1, 2))).rows
        write_pair(rows, tmp_path / "pair", StorageType.FLOAT32)
        write_lora_file(rows, tmp_path / "file.safetensors", StorageType.FLOAT32)
        pair = digest_of(tmp_path / "pair", tmp_path, MIXTURE)
        assert digest_of(tmp_path / "file.safetensors", tmp_path, MIXTURE) == pair
        write_peft(rows, tmp_path / "peft")
        assert digest_of(tmp_path / "peft", tmp_path, MIXTURE) == digest(rows)


class TestConvertLora:
    def test_values(self, folder, tmp_path):
        source = folder()
        result = run(
            "convert-lora", "-i", source, "-o", tmp_path / "out", "--storage-type", "float32"
        )
        assert result.exit_code == 0, result.output
        weights = np.load(tmp_path / "out" / "model.lora_weights.npy")
        config = np.load(tmp_path / "out" / "model.lora_config.npy")
        assert (weights.dtype, weights.shape) == (np.float32, (1, 2, 4 * 18))
        assert (config.dtype, config.tolist()) == (np.int32, [[[1, 0, 2], [7, 11, 4]]])
        tensors = load_file(source / "adapter_model.safetensors")
        q = [tensors[f"{PREFIX}.0.self_attn.q_proj.lora_{m}.weight"].ravel() for m in "AB"]
        up = [tensors[f"{PREFIX}.11.mlp.up_proj.lora_{m}.weight"].ravel() for m in "AB"]
        np.testing.assert_array_equal(weights[0, 0, :40], np.concatenate([q[0], q[1] * 3]))
        assert not weights[0, 0, 40:].any()
        np.testing.assert_array_equal(
            weights[0, 1], np.concatenate([up[0], up[1] * np.float32(1.5)])
        )

    @pytest.mark.parametrize(
        ("config", "scales"),
        [
            ({"r": 2, "lora_alpha": 6, "rank_pattern": {"up_proj": 4}, "use_rslora": True},
             (6 / 2**0.5, 3.0)),
            ({"r": 4, "lora_alpha": 8, "rank_pattern": {"q_proj": 2},
              "alpha_pattern": {"layers.11.mlp.up_proj": 1}}, (4.0, 0.25)),
        ],
    )  # fmt: skip
    def test_the_scale_of_each_row(self, folder, tmp_path, config, scales):
        source = folder(config)
        write_pair(read_peft(str(source)).rows, tmp_path / "out", StorageType.FLOAT32)
        weights = np.load(tmp_path / "out" / "model.lora_weights.npy")[0]
        tensors = load_file(source / "adapter_model.safetensors")
        for row, start, name, scale in (
            (weights[0], 16, "0.self_attn.q_proj", scales[0]),
            (weights[1], 32, "11.mlp.up_proj", scales[1]),
        ):
            b = tensors[f"{PREFIX}.{name}.lora_B.weight"].ravel()
            np.testing.assert_array_equal(row[start : start + b.size], b * np.float32(scale))

    @pytest.mark.parametrize(
        ("flags", "kind", "note"),
        [
            ([], "<f2", "float16"),
            (["--storage-type", "bfloat16"], "V2", "bfloat16"),
            (["--storage-type", "float32"], "<f4", "float32"),
        ],
    )
    def test_storage_types(self, folder, tmp_path, flags, kind, note):
        result = run("convert-lora", "-i", folder(), "-o", tmp_path / "out", *flags)
        assert np.load(tmp_path / "out" / "model.lora_weights.npy").dtype == np.dtype(kind)
        assert f"[1, 2, 72] {note}" in result.output

    def test_it_reports_the_result_for_everything(self, folder, tmp_path):
        out = tmp_path / "out"
        result = run("convert-lora", "-i", folder(), "-o", out, "--verbose")
        assert result.output.splitlines() == [
            "converted 4 tensors of 2 modules",
            "  q_proj -> attn_q (1): layers 0, rank 2, scale 3",
            "  up_proj -> mlp_gate (7): layers 11, rank 4, scale 1.5",
            "  model.layers.0.self_attn.q_proj.lora_A F32 [2, 8]",
            "  model.layers.0.self_attn.q_proj.lora_B F32 [12, 2]",
            "  model.layers.11.mlp.up_proj.lora_A F32 [4, 8]",
            "  model.layers.11.mlp.up_proj.lora_B F32 [10, 4]",
            "not converted: nothing",
            f"wrote {out}/model.lora_weights.npy: [1, 2, 72] float16",
            f"wrote {out}/model.lora_config.npy: [1, 2, 3] int32",
        ]

    def test_a_target_without_tensors_is_reported(self, folder, tmp_path):
        config = {"r": 2, "lora_alpha": 6, "rank_pattern": {"up_proj": 4},
                  "target_modules": ["q_proj", "up_proj", "v_proj"]}  # fmt: skip
        result = run("convert-lora", "-i", folder(config), "-o", tmp_path / "out")
        assert "warning: target_modules names v_proj" in result.output

    def test_what_cannot_be_converted_is_named_and_nothing_is_written(self, folder, tmp_path):
        extra = {
            f"{PREFIX}.0.self_attn.q_proj.lora_magnitude_vector": np.zeros(12, "f4"),
            f"{PREFIX}.11.mlp.up_proj.lora_magnitude_vector": np.zeros(10, "f4"),
            "base_model.model.lm_head.weight": np.zeros((2, 2), "f4"),
        }
        config = {"r": 2, "lora_alpha": 6, "rank_pattern": {"up_proj": 4}, "use_dora": True}
        result = run("convert-lora", "-i", folder(config, extra=extra), "-o", tmp_path / "out")
        assert result.exit_code == 1
        for name in extra:
            path = name.removeprefix("base_model.model.").rpartition(".")[0]
            assert path in result.output
        assert not (tmp_path / "out").exists()

    def test_nothing_is_overwritten_unasked(self, folder, tmp_path):
        out = tmp_path / "out"
        out.mkdir()
        (out / "model.lora_keys.npy").write_text("mine")
        source = folder()
        refused = run("convert-lora", "-i", source, "-o", out)
        assert refused.exit_code == 1
        assert re.search(naming("model.lora_keys.npy", "--force"), refused.output)
        assert os.listdir(out) == ["model.lora_keys.npy"]
        assert run("convert-lora", "-i", source, "-o", out, "--force").exit_code == 0
        assert sorted(os.listdir(out)) == ["model.lora_config.npy", "model.lora_weights.npy"]
        assert run("convert-lora", "-i", source, "-o", out, "--force").exit_code == 0

    def test_a_conversion_that_is_cut_off_leaves_no_mixture(self, folder, tmp_path, monkeypatch):
        out, source = tmp_path / "out", folder()
        rows = read_peft(str(source)).rows
        write_pair(rows, out, StorageType.FLOAT16)
        written = []

        def cut_off(path, pieces):
            written.append(path.name)
            raise OSError("no space left")

        monkeypatch.setattr(adapters, "write_atomically", cut_off)
        with pytest.raises(OSError, match="no space"):
            write_pair(rows[:1], out, StorageType.FLOAT16, force=True)
        assert written == ["model.lora_weights.npy"]
        assert os.listdir(out) == ["model.lora_weights.npy"]

    def test_only_peft_folders(self, folder, tmp_path):
        run("convert-lora", "-i", folder(), "-o", tmp_path / "out")
        with pytest.raises(
            InvalidAdapterError, match=naming("out", "PEFT", "adapter_model.safetensors")
        ):
            read_peft(str(tmp_path / "out"))


class TestExtractLora:
    def test_values_and_the_type_of_the_source(self, folder, tmp_path):
        out = tmp_path / "v1.2.safetensors"
        result = run("extract-lora", "-i", folder(dtype="<f2"), "-o", out)
        assert result.exit_code == 0, result.output
        tensors = load_file(out)
        assert {name: (t.dtype, t.shape) for name, t in tensors.items()} == {
            "weights": (np.float16, (2, 72)),
            "config": (np.int32, (2, 3)),
        }
        assert "weights [2, 72] float16, config [2, 3] int32" in result.output

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_it_is_the_pair_in_one_file(self, folder, tmp_path, dtype):
        source, out = folder(), tmp_path / "x.safetensors"
        run("extract-lora", "-i", source, "-o", out, "-t", dtype)
        run("convert-lora", "-i", source, "-o", tmp_path / "pair", "--storage-type", dtype)
        assert digest_of(out, tmp_path) == digest_of(tmp_path / "pair", tmp_path)

    def test_refusals(self, folder, tmp_path):
        source, out = folder(), tmp_path / "x.safetensors"
        assert "must end in .safetensors" in run("extract-lora", "-i", source, "-o", "x.npz").output
        out.write_text("mine")
        refused = run("extract-lora", "-i", source, "-o", out)
        assert (refused.exit_code, out.read_text()) == (1, "mine")
        assert run("extract-lora", "-i", source, "-o", out, "--force").exit_code == 0
        other = folder(dtype="<f8")
        refused = run("extract-lora", "-i", other, "-o", out, "--force")
        assert re.search(naming("F64", "float32", "float16"), refused.output)


class TestPeft:
    def test_out_and_in_again(self, folder, tmp_path):
        source = folder()
        write_peft(read_peft(str(source)).rows, tmp_path / "copy", "some/base")
        assert digest_of(tmp_path / "copy", tmp_path) == digest_of(source, tmp_path)
        config = json.loads((tmp_path / "copy" / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == "some/base"
        with refused(InvalidParameterError, "adapter_config.json", param="force"):
            write_peft(read_peft(str(source)).rows, tmp_path / "copy")

    def test_a_file_that_is_written_is_whole_for_others(self, folder, tmp_path):
        rows = read_peft(str(folder())).rows
        write_peft(rows, tmp_path / "copy")
        tensors = load_file(tmp_path / "copy" / "adapter_model.safetensors")
        assert len(tensors) == 4
        write_lora_file(rows, tmp_path / "x.safetensors", StorageType.FLOAT16)
        assert load_file(tmp_path / "x.safetensors")["config"].tolist() == [[1, 0, 2], [7, 11, 4]]
