"""TensorRT-LLM's checkpoint folders give the very weights that they were made from."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from loraplex.core.errors import ConfigError, UnsupportedModelError
from loraplex.execution.weights.checkpoint import Checkpoint
from loraplex.execution.weights.weight_files import weight_files
from loraplex.models.engine_folder import BuildLimits, read_build_limits
from loraplex.models.linear_group import TensorShard
from loraplex.models.registry import read_config
from loraplex.models.sharding import shard
from loraplex.models.stages import PipelineStage, stage
from support.naming import naming
from support.tiny_model import TinyCheckpoint
from support.trtllm_checkpoint import write_trtllm_checkpoint

LLAMA: dict[str, Any] = {"num_hidden_layers": 4}
BIASED = LLAMA | {"attention_bias": True}
QWEN2: dict[str, Any] = {"architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 2}
QWEN3: dict[str, Any] = {"architectures": ["Qwen3ForCausalLM"], "head_dim": 8}


@pytest.fixture
def original(tmp_path: Path, request: pytest.FixtureRequest) -> TinyCheckpoint:
    folder = tmp_path / "original"
    folder.mkdir()
    return TinyCheckpoint(folder, **getattr(request, "param", LLAMA))


def written(original: TinyCheckpoint, **choices: Any) -> Path:
    folder = original.folder.parent / "checkpoint"
    write_trtllm_checkpoint(folder, original.config, original.tensors, **choices)
    return folder


def check_same(folder: Path, original: TinyCheckpoint) -> None:
    config = read_config(folder)
    assert config.layers == original.config.layers
    with Checkpoint(folder, config) as checkpoint:
        assert len(checkpoint) == len(original.tensors)
        for name, tensor in original.tensors.items():
            assert torch.equal(checkpoint.read(name), tensor), name


@pytest.mark.parametrize("original", [LLAMA, BIASED, QWEN2, QWEN3], indirect=True)
@pytest.mark.parametrize("tp_size", [1, 2, 4])  # of 2 key-value heads
@pytest.mark.parametrize("pp_size", [1, 2])
def test_every_split(original: TinyCheckpoint, tp_size: int, pp_size: int) -> None:
    folder = written(original, tp_size=tp_size, pp_size=pp_size)
    check_same(folder, original)
    assert len(weight_files(folder)) == tp_size * pp_size
    assert read_build_limits(folder) == BuildLimits(tp_size=tp_size, pp_size=pp_size)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_rank_reads_a_folder_that_was_split_for_others(
    original: TinyCheckpoint, num_ranks: int
) -> None:
    """The rows of a file's q, k and v follow from the whole model, not from the rank's part."""
    folder = written(original, tp_size=num_ranks)
    own = stage(shard(read_config(folder), TensorShard(1, 2)), PipelineStage(1, 2))
    with Checkpoint(folder, own) as checkpoint:
        for name, tensor in original.tensors.items():
            assert torch.equal(checkpoint.read(name), tensor), name


@pytest.mark.parametrize("dim", [0, 1])
def test_a_split_embedding(original: TinyCheckpoint, dim: int) -> None:
    folder = written(original, tp_size=2, use_parallel_embedding=True, embedding_sharding_dim=dim)
    check_same(folder, original)


def test_a_quantised_kv_cache_is_ours(original: TinyCheckpoint) -> None:
    folder = written(original, quantization={"kv_cache_quant_algo": "INT8"})
    rank = folder / "rank0.safetensors"
    scale = {"transformer.layers.0.attention.kv_cache_scaling_factor": torch.ones(1)}
    save_file(load_file(rank) | scale, rank)
    check_same(folder, original)
    limits = read_build_limits(folder)
    assert limits is not None
    assert limits.kv_dtype == "int8"


def test_gpt2(tmp_path: Path) -> None:
    """Written by hand: its linear layers are stored the other way round, q, k and v as one."""
    config = {"architectures": ["GPT2LMHeadModel"], "n_embd": 16, "n_layer": 1, "n_head": 4}
    sizes = {"n_positions": 32, "vocab_size": 50, "tie_word_embeddings": False}
    original = TinyCheckpoint(tmp_path, **config, **sizes)
    tensors = original.tensors
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    described = {
        "architecture": "GPTForCausalLM",
        "dtype": "float32",
        "hidden_size": 16,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "max_position_embeddings": 32,
        "vocab_size": 50,
        "norm_epsilon": 1e-5,
        "hidden_act": "gelu",
        "mapping": {"tp_size": 2, "pp_size": 1},
    }
    (folder / "config.json").write_text(json.dumps(described))
    for rank in range(2):
        rows: dict[str, torch.Tensor] = {
            "transformer.vocab_embedding.weight": tensors["transformer.wte.weight"],
            "transformer.position_embedding.weight": tensors["transformer.wpe.weight"],
            "lm_head.weight": tensors["lm_head.weight"].chunk(2)[rank],
        }
        for kind in ("weight", "bias"):
            rows[f"transformer.ln_f.{kind}"] = tensors[f"transformer.ln_f.{kind}"]
            for theirs, ours, dim in (
                ("input_layernorm", "ln_1", None),
                ("post_layernorm", "ln_2", None),
                ("attention.dense", "attn.c_proj", 1),
                ("mlp.fc", "mlp.c_fc", 0),
                ("mlp.proj", "mlp.c_proj", 1),
            ):
                tensor = tensors[f"transformer.h.0.{ours}.{kind}"]
                tensor = tensor.t() if tensor.ndim == 2 else tensor
                split = dim is not None and dim < tensor.ndim
                rows[f"transformer.layers.0.{theirs}.{kind}"] = (
                    tensor.chunk(2, dim)[rank] if split else tensor
                )
            qkv = tensors[f"transformer.h.0.attn.c_attn.{kind}"]
            parts = (qkv.t() if qkv.ndim == 2 else qkv).chunk(3)
            own = torch.cat([part.chunk(2)[rank] for part in parts])
            rows[f"transformer.layers.0.attention.qkv.{kind}"] = own
        contiguous = {name: tensor.contiguous().clone() for name, tensor in rows.items()}
        save_file(contiguous, folder / f"rank{rank}.safetensors")
    with Checkpoint(folder, read_config(folder)) as checkpoint:
        for name, tensor in tensors.items():
            assert torch.equal(checkpoint.read(name), tensor), name


class TestRefused:
    def refused(self, folder: Path) -> str:
        with pytest.raises((ConfigError, UnsupportedModelError)) as caught:
            Checkpoint(folder, read_config(folder))
        return str(caught.value)

    def test_a_rank_that_is_missing(self, original: TinyCheckpoint) -> None:
        folder = written(original, tp_size=2)
        (folder / "rank1.safetensors").unlink()
        assert re.search(naming("rank1.safetensors", "config.json", 2), self.refused(folder))

    def test_a_weight_that_one_rank_lacks(self, original: TinyCheckpoint) -> None:
        folder = written(original, tp_size=2)
        tensors = load_file(folder / "rank1.safetensors")
        del tensors["transformer.layers.0.mlp.fc.weight"]
        save_file(tensors, folder / "rank1.safetensors")
        assert re.search(
            naming("transformer.layers.0.mlp.fc.weight", "rank0.safetensors"), self.refused(folder)
        )

    def test_an_unknown_weight(self, original: TinyCheckpoint) -> None:
        folder = written(original)
        tensors = load_file(folder / "rank0.safetensors")
        tensors["transformer.layers.0.mlp.router.weight"] = torch.ones(2)
        save_file(tensors, folder / "rank0.safetensors")
        assert re.search(
            naming("transformer.layers.0.mlp.router", "transformer.layers.0.mlp.router.weight"),
            self.refused(folder),
        )

    def test_another_split_of_the_heads(self, original: TinyCheckpoint) -> None:
        folder = written(original)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 1}))
        with (
            Checkpoint(folder, read_config(folder)) as checkpoint,
            pytest.raises(ConfigError, match=naming(32, "config.json", "attention.qkv")),
        ):
            checkpoint.read("model.layers.0.self_attn.k_proj.weight")

    @pytest.mark.parametrize(
        ("fields", "named"),
        [
            ({"quantization": {"quant_algo": "W4A16_AWQ"}}, ("quant_algo", "W4A16_AWQ")),
            ({"moe": {"num_experts": 8}}, ("TensorRT-LLM",)),
            ({"architecture": "FalconForCausalLM"}, ("architecture", "FalconForCausalLM")),
            (
                {"architecture": "GPTForCausalLM", "gpt_variant": "santacoder"},
                ("gpt_variant", "santacoder"),
            ),
        ],
    )
    def test_what_is_not_read(
        self, original: TinyCheckpoint, fields: dict[str, Any], named: tuple[object, ...]
    ) -> None:
        assert re.search(naming(*named), self.refused(written(original, **fields)))
