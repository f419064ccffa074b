"""Checkpoints and engine folders that are written from a Hugging Face folder."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from loraplex.adapters.canonical import CanonicalRow, RowKind
from loraplex.adapters.tensor_file import RawTensor
from loraplex.app.builder import served_shapes
from loraplex.compat.convert.adapters import write_peft
from loraplex.compat.convert.checkpoint import ModelChoices, convert_checkpoint
from loraplex.compat.convert.engine import build_engine_folder
from loraplex.compat.convert.flag_tables import BUILD_FLAGS, CHECKPOINT_FLAGS
from loraplex.compat.flags import read_flags
from loraplex.core.config import ModelConfig
from loraplex.core.errors import ConfigError, LoraplexError, UnsupportedModelError
from loraplex.demo import ADAPTER_PATHS, BASE_PATH
from loraplex.execution.weights.loading import load_weights
from loraplex.execution.weights.packing import WeightFormat, pack_checkpoint
from loraplex.kernels.dispatch import select_kernels
from loraplex.models.engine_folder import BuildLimits, read_build_limits
from loraplex.models.registry import read_config
from support.checkpoints import save_random_model, tiny_gpt2
from support.naming import naming
from support.tiny_decoder import tiny_spec
from support.tiny_model import TinyCheckpoint
from support.toy_recurrence import with_recurrence
from support.trtllm_checkpoint import write_trtllm_checkpoint

BASE = ("--model_dir", str(BASE_PATH))


def convert(*words: str) -> Path:
    return convert_checkpoint(read_flags(CHECKPOINT_FLAGS, words, "convert"))


def build(*words: str) -> Path | None:
    return build_engine_folder(read_flags(BUILD_FLAGS, words, "build"))


@pytest.mark.parametrize("part", ["mixer", "feed_forward"])
def test_a_model_that_the_format_cannot_describe_is_refused(part):
    spec = tiny_spec()
    layers = tuple(dataclasses.replace(layer, **{part: None}) for layer in spec.layers)
    choices = ModelChoices("float32", BuildLimits())
    assert choices.pretrained(spec)["num_attention_heads"] == 4
    with pytest.raises(UnsupportedModelError, match=naming(spec.architecture)):
        choices.pretrained(dataclasses.replace(spec, layers=layers))


def test_a_model_with_some_layers_of_another_kind_is_refused():
    """The format describes one kind for all of them."""
    spec = with_recurrence(tiny_spec(), (0,), 32)
    with pytest.raises(UnsupportedModelError, match=naming(spec.architecture)):
        ModelChoices("float32", BuildLimits()).pretrained(spec)


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def lora_row(layer: int, module: str, path: str, expert: int | None = None) -> CanonicalRow:
    tensors = {
        "a": RawTensor("F32", (1, 16), b"1" * 64),
        "b": RawTensor("F32", (3, 1), b"1" * 12),
    }
    origin = f"model.layers.{layer}.{path}"
    return CanonicalRow(layer, module, expert, RowKind.LORA, 1.0, tensors, origin)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    (folder / "generation_config.json").write_text('{"eos_token_id": 7}')
    return TinyCheckpoint(folder, torch_dtype="float32").save()


@pytest.fixture
def checkpoint(model: Path, tmp_path: Path) -> Path:
    return convert("--model_dir", str(model), "--output_dir", str(tmp_path / "ckpt"))


class TestConvertCheckpoint:
    def test_files_that_users_look_for(self, checkpoint: Path) -> None:
        names = {path.name for path in checkpoint.iterdir()}
        assert names == {
            *("config.json", "hf_config.json", "rank0.safetensors"),
            *("tokenizer.json", "generation_config.json"),
        }

    def test_config_has_the_keys_of_tensorrt_llm(self, checkpoint: Path) -> None:
        written = config_of(checkpoint)
        assert written["architecture"] == "LlamaForCausalLM"
        assert written["dtype"] == "float16"
        assert written["num_hidden_layers"] == 2
        assert written["num_key_value_heads"] == 2
        assert written["mapping"] == {"world_size": 1, "tp_size": 1, "pp_size": 1}
        assert written["quantization"]["quant_algo"] is None

    @pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
    def test_weights_are_of_the_type(self, model: Path, tmp_path: Path, dtype: str) -> None:
        folder = convert(
            "--model_dir", str(model), "--output_dir", str(tmp_path / "o"), "--dtype", dtype
        )
        before, after = (
            load_file(model / "model.safetensors"),
            load_file(folder / "rank0.safetensors"),
        )
        assert after.keys() == before.keys()
        wanted = getattr(torch, dtype)
        for name, tensor in before.items():
            assert torch.equal(after[name], tensor.to(wanted)), name
        assert read_config(folder).dtype == dtype

    def test_auto_keeps_the_type(self, model: Path, tmp_path: Path) -> None:
        folder = convert(
            "--model_dir", str(model), "--output_dir", str(tmp_path / "o"), "--dtype", "auto"
        )
        assert config_of(folder)["dtype"] == "float32"

    def test_it_is_a_model_folder(self, model: Path, checkpoint: Path) -> None:
        source, written = read_config(model), read_config(checkpoint)
        assert written.eos_token_ids == (7,)
        assert (written.hidden_size, written.layers) == (source.hidden_size, source.layers)

    def test_what_float16_cannot_hold_is_named(self, tmp_path: Path) -> None:
        tiny = TinyCheckpoint(tmp_path)
        tiny.tensors["model.norm.weight"][0] = 1e6
        with pytest.raises(ConfigError, match=naming("model.norm.weight", "1e+06", "bfloat16")):
            convert("--model_dir", str(tiny.save()), "--output_dir", str(tmp_path / "o"))
        assert not (tmp_path / "o" / "config.json").exists()

    def test_quantization_is_noted(self, model: Path, tmp_path: Path) -> None:
        folder = convert(
            *("--model_dir", str(model), "--output_dir", str(tmp_path / "o"), "--use_weight_only"),
            *("--weight_only_precision", "int4", "--int8_kv_cache", "--tp_size", "2"),
        )
        written = config_of(folder)
        assert written["quantization"]["quant_algo"] == "W4A16"
        assert written["quantization"]["kv_cache_quant_algo"] == "INT8"
        assert written["mapping"]["world_size"] == 2
        limits = read_build_limits(folder)
        assert limits == BuildLimits(quantization="int4", kv_dtype="int8", tp_size=2)

    def test_the_configuration_alone(self, model: Path, tmp_path: Path) -> None:
        folder = convert(
            "--model_dir", str(model), "--output_dir", str(tmp_path / "o"), "--save_config_only"
        )
        assert not (folder / "rank0.safetensors").exists()
        with pytest.raises(
            ConfigError, match=naming("rank0.safetensors", "--checkpoint_dir", "--save_config_only")
        ):
            build("--checkpoint_dir", str(folder), "--output_dir", str(tmp_path / "e"))

    @pytest.mark.parametrize(
        ("words", "named"),
        [
            ([], ("--model_dir",)),
            (["--model_dir", "/nowhere"], ("/nowhere",)),
            (["--model_dir", "gpt2b.nemo"], ("NeMo", "gpt2b.nemo", "--model_dir")),
            (["--nemo_ckpt_path", "x"], ("NeMo", "--nemo_ckpt_path", "--model_dir")),
            (["--meta_ckpt_dir", "x"], ("Meta", "--meta_ckpt_dir", "--model_dir")),
            (["--smoothquant", "0.5"], ("--smoothquant", 0.5, "--use_weight_only")),
            (["--model_dir", str(BASE_PATH), "--tp_size", "0"], ("--tp_size", 1, 0)),
            (
                ["--use_weight_only", "--weight_only_precision", "int4_awq", *BASE],
                ("int4_awq", "--weight_only_precision"),
            ),
        ],
    )
    def test_what_is_refused(
        self, words: list[str], named: tuple[object, ...], tmp_path: Path
    ) -> None:
        with pytest.raises(LoraplexError, match=naming(*named)):
            convert(*words, "--output_dir", str(tmp_path / "o"))

    def test_a_folder_with_nemo_files_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "gpt.nemo").touch()
        with pytest.raises(ConfigError, match="NeMo"):
            convert("--model_dir", str(tmp_path), "--output_dir", str(tmp_path / "o"))

    def test_another_model_is_not_overwritten(self, model: Path, tmp_path: Path) -> None:
        other = tmp_path / "other"
        other.mkdir()
        before = TinyCheckpoint(other).save() / "config.json"
        text = before.read_text()
        with pytest.raises(ConfigError, match=naming("--output_dir")):
            convert("--model_dir", str(model), "--output_dir", str(other))
        with pytest.raises(ConfigError, match=naming("--output_dir")):
            convert("--model_dir", str(model), "--output_dir", str(model))
        assert before.read_text() == text


class TestBuild:
    def test_files_that_users_look_for(self, checkpoint: Path, tmp_path: Path) -> None:
        folder = build("--checkpoint_dir", str(checkpoint), "--output_dir", str(tmp_path / "e"))
        assert folder == tmp_path / "e"
        names = {path.name for path in folder.iterdir()}
        assert {"config.json", "rank0.engine", "rank0.safetensors", "tokenizer.json"} <= names

    def test_limits(self, checkpoint: Path, tmp_path: Path) -> None:
        folder = build(
            *("--checkpoint_dir", str(checkpoint), "--output_dir", str(tmp_path / "e")),
            *("--max_batch_size", "8", "--max_seq_len", "40", "--max_beam_width=4"),
            *("--lora_plugin", "float16", "--lora_target_modules", "attn_q", "attn_k", "attn_v"),
            *("--max_lora_rank", "8", "--max_num_tokens", "100", "--max_input_len", "30"),
        )
        assert folder is not None
        assert read_build_limits(folder) == BuildLimits(
            max_batch_size=8,
            max_input_len=30,
            max_seq_len=40,
            max_beam_width=4,
            max_num_tokens=100,
            max_lora_rank=8,
            lora_target_modules=("attn_q", "attn_k", "attn_v"),
        )

    def test_limits_that_were_not_requested(self, checkpoint: Path, tmp_path: Path) -> None:
        folder = build("--checkpoint_dir", str(checkpoint), "--output_dir", str(tmp_path / "e"))
        assert folder is not None
        assert read_build_limits(folder) == BuildLimits(
            max_batch_size=2048,
            max_input_len=64,
            max_seq_len=64,
            max_beam_width=1,
            max_num_tokens=8192,
            max_lora_rank=64,
            allows_lora=False,
        )

    def test_flags_without_effect_are_recorded(self, checkpoint: Path, tmp_path: Path) -> None:
        folder = build(
            *("--checkpoint_dir", str(checkpoint), "--output_dir", str(tmp_path / "e")),
            *("--gemm_plugin", "float16", "--context_fmha", "enable", "--kv_cache_type", "paged"),
        )
        assert folder is not None
        written = config_of(folder)["build_config"]
        assert written["kv_cache_type"] == "paged"
        assert written["plugin_config"]["gemm_plugin"] == "float16"
        assert written["plugin_config"]["context_fmha"] is True

    def test_the_older_script(self, model: Path, tmp_path: Path) -> None:
        folder = build(
            *(f"--model_dir={model}", f"--output_dir={tmp_path / 'e'}", "--dtype", "float16"),
            *("--remove_input_padding", "--use_gpt_attention_plugin", "float16"),
            *("--enable_context_fmha", "--use_inflight_batching", "--paged_kv_cache"),
            *("--max_batch_size", "16", "--max_input_len", "32", "--max_output_len", "8"),
            *("--use_lora_plugin", "float16", "--lora_target_modules", "attn_q"),
            *("--world_size", "1", "--tp_size", "1"),
        )
        assert folder is not None
        limits = read_build_limits(folder)
        assert limits is not None
        assert (limits.max_seq_len, limits.max_input_len, limits.max_batch_size) == (40, 32, 16)
        assert limits.lora_target_modules == ("attn_q", "attn_k", "attn_v")
        assert config_of(folder)["pretrained_config"]["dtype"] == "float16"

    def test_a_length_beyond_the_model_is_brought_down(self, model: Path, tmp_path: Path) -> None:
        words = ("--model_dir", str(model), "--output_dir", str(tmp_path / "e"))
        folder = build(*words, "--max_input_len", "2048", "--max_output_len", "512")
        assert folder is not None
        limits = read_build_limits(folder)
        assert limits is not None
        assert (limits.max_seq_len, limits.max_input_len) == (64, 64)

    def test_a_checkpoint_of_tensorrt_llm(self, tmp_path: Path) -> None:
        (tmp_path / "tiny").mkdir()
        tiny = TinyCheckpoint(tmp_path / "tiny")
        write_trtllm_checkpoint(tmp_path / "ckpt", tiny.config, tiny.tensors, tp_size=2)
        folder = build(
            *("--checkpoint_dir", str(tmp_path / "ckpt"), "--output_dir", str(tmp_path / "engine"))
        )
        assert folder is not None
        weights = load_file(folder / "rank0.safetensors")
        assert weights.keys() == tiny.tensors.keys()
        assert all(torch.equal(weights[name], tiny.tensors[name]) for name in weights)
        assert config_of(folder)["pretrained_config"]["mapping"]["tp_size"] == 2

    @pytest.mark.parametrize(("source", "dtype"), [("checkpoint", "float32"), ("model", "float16")])
    def test_weights_have_the_type_that_the_folder_names(
        self, model: Path, tmp_path: Path, source: str, dtype: str
    ) -> None:
        """A checkpoint keeps its type; the same folder as --model_dir gets that of the flags."""
        first, second = tmp_path / "ckpt", tmp_path / "engine"
        convert("--model_dir", str(model), "--output_dir", str(first), "--dtype", "float32")
        folder = build(f"--{source}_dir", str(first), "--output_dir", str(second))
        assert folder is not None
        weights = load_file(folder / "rank0.safetensors")
        assert {tensor.dtype for tensor in weights.values()} == {getattr(torch, dtype)}
        assert config_of(folder)["pretrained_config"]["dtype"] == dtype

    def test_build_config_file(self, model: Path, tmp_path: Path) -> None:
        file = tmp_path / "build.json"
        plugins = {"lora_plugin": "auto", "gemm_plugin": None}
        values = {"max_batch_size": 4, "max_seq_len": 20, "plugin_config": plugins, "strange": None}
        file.write_text(json.dumps(values))
        words = ("--model_dir", str(model), "--output_dir", str(tmp_path / "e"))
        folder = build(*words, "--build_config", str(file), "--max_batch_size", "2")
        assert folder is not None
        limits = read_build_limits(folder)
        assert limits is not None
        assert (limits.max_batch_size, limits.max_seq_len, limits.allows_lora) == (2, 20, True)
        file.write_text('{"max_batch": 4}')
        with pytest.raises(
            ConfigError,
            match=naming("build.json", "max_batch", "--max_batch_size"),
        ):
            build(*words, "--build_config", str(file))

    def test_adapters_come_along(self, tmp_path: Path) -> None:
        folder = build(
            *("--model_dir", str(BASE_PATH), "--output_dir", str(tmp_path / "e")),
            *("--lora_plugin", "auto", "--lora_dir", *map(str, ADAPTER_PATHS.values())),
        )
        assert folder is not None
        assert {path.name for path in (folder / "lora").iterdir()} == {"chinese", "japanese"}
        weights = "adapter_model.safetensors"
        copied = folder / "lora" / "chinese" / weights
        assert copied.read_bytes() == (ADAPTER_PATHS["chinese"] / weights).read_bytes()
        lora = config_of(folder)["build_config"]["lora_config"]
        assert lora["lora_dir"] == ["lora/chinese", "lora/japanese"]
        # Those of the first adapter.
        assert lora["lora_target_modules"] == ["attn_q", "attn_k", "attn_v"]

    def test_adapters_of_experts_come_along(self, tmp_path: Path) -> None:
        """Modules are named as TensorRT-LLM does, and they enable those that the adapter needs."""
        folder = tmp_path / "mixtral"
        folder.mkdir()
        fields = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 3}
        TinyCheckpoint(folder, **fields, torch_dtype="float32").save()
        adapter = tmp_path / "adapter"
        rows = [
            lora_row(1, "experts.gate_proj", "block_sparse_moe.experts.2.w1", expert=2),
            lora_row(1, "router", "block_sparse_moe.gate"),
        ]
        write_peft(rows, adapter)
        words = ("--model_dir", str(folder), "--output_dir", str(tmp_path / "ckpt"))
        checkpoint = convert(*words, "--dtype", "float32")
        words = ("--checkpoint_dir", str(checkpoint), "--output_dir", str(tmp_path / "engine"))
        engine = build(*words, "--lora_plugin", "auto", "--lora_dir", str(adapter))
        assert engine is not None
        lora = config_of(engine)["build_config"]["lora_config"]
        assert lora["lora_target_modules"] == ["moe_h_to_4h", "moe_router"]
        names = lora["trtllm_modules_to_hf_modules"]
        assert {name: names[name] for name in names if "mo" in name} == {
            "moe_router": "gate",
            "moe_h_to_4h": "w1",
            "moe_gate": "w3",
            "moe_4h_to_h": "w2",
        }
        assert names["attn_q"] == "q_proj"
        limits = read_build_limits(engine)
        assert limits is not None
        model = ModelConfig(path=str(engine), lora_target_modules=limits.lora_target_modules)
        shapes = served_shapes(read_config(engine), model)
        assert shapes.enabled_modules == ("experts.gate_proj", "router")

    def test_a_second_build_leaves_nothing_of_the_first(self, tmp_path: Path) -> None:
        words = ("--model_dir", str(BASE_PATH), "--output_dir", str(tmp_path / "e"))
        build(*words, "--lora_plugin", "auto", "--lora_dir", str(ADAPTER_PATHS["chinese"]))
        folder = build(*words)
        assert folder is not None
        assert not (folder / "lora").exists()

    def test_adapters_without_the_plugin_stay_out(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        words = ("--model_dir", str(BASE_PATH), "--output_dir", str(tmp_path / "e"))
        folder = build(*words, "--lora_dir", str(ADAPTER_PATHS["chinese"]))
        assert folder is not None
        assert not (folder / "lora").exists()
        assert "--lora_dir has no effect without --lora_plugin" in caplog.text

    def test_a_dry_run_writes_nothing(self, model: Path, tmp_path: Path) -> None:
        words = ("--model_dir", str(model), "--output_dir", str(tmp_path / "e"))
        assert build(*words, "--dry_run") is None
        assert not (tmp_path / "e").exists()

    @pytest.mark.parametrize(
        ("words", "named"),
        [
            ([], ("--checkpoint_dir", "--model_dir")),
            (["--model_dir", "x", "--checkpoint_dir", "y"], ("--checkpoint_dir", "--model_dir")),
            (
                ["--checkpoint_dir", str(BASE_PATH)],
                ("--model_dir", "--checkpoint_dir"),
            ),
            (["--ft_model_dir", "x"], ("NeMo", "--ft_model_dir", "--model_dir")),
            (
                ["--model_dir", str(BASE_PATH), "--world_size", "2"],
                ("--world_size", 2, "--tp_size", 1, "--pp_size"),
            ),
            (["--model_dir", str(BASE_PATH), "--max_lora_rank", "0"], (1, "--max_lora_rank", 0)),
            (
                ["--model_dir", str(BASE_PATH), "--lora_ckpt_source", "nemo"],
                ("NeMo", "--lora_ckpt_source"),
            ),
            (
                ["--model_dir", str(BASE_PATH), "--lora_plugin", "--lora_dir", str(BASE_PATH)],
                ("PEFT", "adapter_model.safetensors", "adapter_model.bin"),
            ),
            (
                ["--model_dir", str(BASE_PATH), "--lora_plugin", "--lora_dir"]
                + [str(ADAPTER_PATHS["chinese"])] * 2,
                ("--lora_dir",),
            ),
            (
                ["--model_dir", str(BASE_PATH), "--model_config", "x"],
                ("--model_config", "--checkpoint_dir"),
            ),
        ],
    )
    def test_what_is_refused(
        self, words: list[str], named: tuple[object, ...], tmp_path: Path
    ) -> None:
        with pytest.raises(LoraplexError, match=naming(*named)):
            build(*words, "--output_dir", str(tmp_path / "e"))
        assert not (tmp_path / "e").exists()

    def test_a_foreign_lora_folder_is_left_alone(self, model: Path, tmp_path: Path) -> None:
        (tmp_path / "e" / "lora").mkdir(parents=True)
        with pytest.raises(ConfigError, match=naming("lora", "--output_dir")):
            build("--model_dir", str(model), "--output_dir", str(tmp_path / "e"))

    def test_gpt2_by_the_older_script(self, tmp_path: Path) -> None:
        save_random_model(tmp_path / "gpt", tiny_gpt2(100))
        folder = build(
            *(f"--model_dir={tmp_path / 'gpt'}", f"--output_dir={tmp_path / 'e'}"),
            *("--dtype", "float32", "--use_inflight_batching", "--paged_kv_cache"),
            *("--use_layernorm_plugin", "float16", "--hidden_act", "gelu"),
        )
        assert folder is not None
        form, kernels = WeightFormat(dtype=torch.float32), select_kernels(torch.device("cpu"))
        config = read_config(folder)
        found = load_weights(folder, config, kernels, form, None)
        wanted = pack_checkpoint(tmp_path / "gpt", config, kernels, form)
        for one, other in zip(found.entries, wanted.entries, strict=True):
            for left, right in zip(one.tensors, other.tensors, strict=True):
                assert (left is None) == (right is None)
                assert left is None or right is None or torch.equal(left, right)
