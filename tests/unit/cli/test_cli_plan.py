"""`loraplex plan` over the capitals model and its adapters."""

import json
import re

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from loraplex.app.engine import build_engine
from loraplex.app.plan import any_fit
from loraplex.cli.main import app
from loraplex.cli.plan import _described
from loraplex.core.byte_sizes import readable_bytes
from loraplex.core.config import ModelConfig
from loraplex.demo import ADAPTER_PATHS, BASE_PATH
from loraplex.serving.model_memory import CacheGroupMemory
from support.naming import naming

FLAGS = ("--memory", "64MiB", "--max-lora-rank", "16")


def plan(*arguments):
    return CliRunner().invoke(app, ["plan", str(BASE_PATH), *arguments])


def adapter_flags(paths):
    return [part for path in paths for part in ("--adapters", str(path))]


@pytest.fixture(scope="module")
def engine():
    engine = build_engine(ModelConfig(path=str(BASE_PATH), memory_bytes=64 << 20, max_lora_rank=16))
    yield engine
    engine.close()


def test_the_device_and_its_steps():
    result = plan("--device", "cuda", "--memory", "64GiB")
    assert (
        "\n  device          cuda, bfloat16; a step has at most 256 sequences and 8192 tokens\n"
    ) in result.stdout
    found = json.loads(plan("--device", "cpu", "--max-num-seqs", "5", "--json").stdout)
    assert (found["device"], found["max_num_seqs"]) == ("cpu", 5)
    assert found["max_num_batched_tokens"] >= 512


def test_it_is_what_an_engine_takes(engine):
    result = plan(*FLAGS, "--json")
    assert result.exit_code == 0, result.output
    memory, capacity = json.loads(result.stdout)["memory"], engine.capacity
    assert memory["weights_bytes"] == pytest.approx(capacity.weights_bytes, rel=0.01)
    assert memory["kv"]["num_bytes"] == pytest.approx(capacity.kv_cache_bytes, rel=0.01)
    assert memory["device"]["page_bytes"] == capacity.adapter_page_bytes
    assert memory["device"]["pages"] == capacity.num_adapter_pages
    total = memory["weights_bytes"] + memory["kv"]["num_bytes"] + memory["device"]["num_bytes"]
    assert 0.9 * (64 << 20) < total <= 64 << 20


@pytest.fixture
def expert_model(tmp_path):
    """A model whose first layer is dense, and an adapter of some experts of the second."""
    config = {
        "architectures": ["Qwen2MoeForCausalLM"],
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "mlp_only_layers": [0],
        "norm_topk_prob": False,
        "vocab_size": 100,
        "max_position_embeddings": 100,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    tensors = {}
    for expert in (2, 3, 6):
        name = f"base_model.model.model.layers.1.mlp.experts.{expert}.up_proj"
        tensors[f"{name}.lora_A.weight"] = np.ones((4, 32), np.float32)
        tensors[f"{name}.lora_B.weight"] = np.ones((24, 4), np.float32)
    save_file(tensors, adapter / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["up_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(fields))
    return tmp_path


def test_experts_and_layers_that_differ(expert_model):
    def found(*flags):
        arguments = ["plan", str(expert_model), "--max-lora-rank", "8", *flags, "--json"]
        result = CliRunner().invoke(app, arguments)
        return result.exit_code, json.loads(result.stdout)

    code, report = found("--adapters", str(expert_model / "adapter"))
    (adapter,) = report["adapters"]["adapters"]
    assert (code, adapter["problem"], adapter["rank"]) == (0, "", 4)
    assert adapter["experts"] == {"experts.up_proj": {"num_adapted": 3, "layers": {"1": "2-3,6"}}}
    device = report["memory"]["device"]
    dense, experts, head = 4 + 3, 4 + 1 + 3 + 1 + 3 * 8, 3
    assert device["table_bytes"] == device["pages"] * 16 * (dense + experts + head)
    (largest,) = device["fits"]
    assert largest["rank"] == 8
    _, lower = found("--max-lora-ranks", "experts=2")
    (fewer,) = lower["memory"]["device"]["fits"]
    assert fewer["holds"] > largest["holds"]
    flags = ("--adapters", str(expert_model / "adapter"))
    code, refused = found("--max-lora-ranks", "experts=2", *flags)
    (adapter,) = refused["adapters"]["adapters"]
    assert code == 2
    assert adapter["problem"].endswith(
        "experts.2.up_proj has rank 4; the server holds ranks up to 2 on experts.up_proj: raise "
        "max_lora_ranks (experts)"
    )


def test_layers_with_different_windows_have_blocks_of_their_own():
    windows = ("--max-attention-window-size", "32,4096")
    flags = (*FLAGS, *windows, "--max-num-batched-tokens", "64", "--max-model-len", "256")
    few = ("--max-num-seqs", "2", "--kv-cache-host-memory-bytes", "1MiB")
    lines = plan(*flags, *few).output.splitlines()
    (first,) = (line for line in lines if "layers without a window" in line)
    (second,) = (line for line in lines if "layers with a window of 32" in line)
    (total,) = (line for line in lines if "KV cache" in line)

    def blocks(line):
        return int(re.search(r"(\d+) blocks", line)[1])

    # Window and step lie in at most 7 blocks of 16 tokens.
    assert blocks(second) == 2 * 7
    assert blocks(total) == blocks(first) + blocks(second)
    assert f"{16 * blocks(first)} tokens" in total
    assert "more on the host" in first
    assert "more on the host" in second


def test_adapters_one_by_one():
    result = plan(*FLAGS, *adapter_flags(ADAPTER_PATHS.values()), "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["adapters"]
    assert len(found["adapters"]) == len(ADAPTER_PATHS)
    for adapter in found["adapters"]:
        assert adapter["problem"] == ""
        assert adapter["rank"] >= 1
        assert adapter["device_pages"] >= 1
    assert found["fit_device"] == found["fit_host"] == len(ADAPTER_PATHS)


def test_a_folder_of_adapters_for_people():
    folders = adapter_flags([next(iter(ADAPTER_PATHS.values())).parent])
    result = plan(*FLAGS, *folders)
    assert f"{len(ADAPTER_PATHS)} of" in result.output
    assert "on the device at once" in result.output
    assert "of rank 16 on all modules" in result.output


def test_what_does_not_fit_is_said_and_is_exit_code_2():
    paths = list(ADAPTER_PATHS.values())
    result = plan("--max-lora-rank", "1", *adapter_flags(paths))
    assert result.exit_code == 2
    assert f"0 of {len(paths)} adapters can be served" in result.output
    assert "rank" in result.output


def test_a_host_tier_that_holds_one_of_two():
    paths = list(ADAPTER_PATHS.values())
    sizes = [
        adapter["host_bytes"]
        for adapter in json.loads(plan(*adapter_flags(paths), "--json").stdout)["adapters"][
            "adapters"
        ]
    ]
    limit = str(sum(sizes) - 1)
    result = plan("--lora-host-bytes", limit, *adapter_flags(paths), "--json")
    assert json.loads(result.stdout)["adapters"]["fit_host"] == len(paths) - 1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--memory", "1MB"), ("memory_bytes", 976.6, "KiB", "--memory")),
        (("--lora-device-bytes", "100"), (64,)),
        (("--kv-cache-fraction", "2"), (0, 1)),
    ],
)
def test_what_cannot_be_served_at_all(arguments, named):
    result = plan(*arguments)
    assert result.exit_code == 1
    assert re.search(naming(*named), result.output)


def test_a_gpu_that_is_not_here():
    result = plan("--device", "cuda", "--memory", "1GiB", "--json")
    memory = json.loads(result.stdout)["memory"]
    steps = memory["workspace_bytes"] + memory["graph_bytes"]
    assert steps > 100 << 20
    left = (1 << 30) - memory["weights_bytes"] - steps
    assert memory["kv"]["num_bytes"] == pytest.approx(0.9 * left, rel=0.01)
    assert memory["device"]["num_bytes"] == pytest.approx(0.05 * 0.1 * left, rel=0.1)


def test_what_a_gpus_steps_take_is_an_estimate():
    result = plan("--device", "cuda", "--memory", "1GiB")
    assert "recorded steps" in result.output
    assert "estimated" in result.output
    result = plan("--device", "cuda", "--memory", "1GiB", "--no-cuda-graphs", "--json")
    assert json.loads(result.stdout)["memory"]["graph_bytes"] == 0
    assert "recorded steps" not in plan("--memory", "1GiB").output


def test_a_gpu_that_is_too_small_for_its_steps():
    result = plan("--device", "cuda", "--memory", "128MiB")
    assert result.exit_code == 1
    assert "turn cuda_graphs off, which frees" in result.output


def test_an_adapter_that_is_not_there():
    result = plan("--adapters", "/nowhere/at/all")
    assert result.exit_code == 2
    assert "cannot open the adapter /nowhere/at/all" in result.output


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 40, "3 TiB")]
)
def test_bytes_for_people(num_bytes, text):
    assert readable_bytes(num_bytes) == text


def test_any_so_many_fit_whichever_they_are():
    assert any_fit([1, 1, 5], 5) == 1
    assert any_fit([1, 1, 5], 7) == 3
    assert any_fit([], 7) == any_fit([8], 7) == 0


def test_states_are_named_with_their_size():
    group = CacheGroupMemory(attention_window=0, state_tokens=64, blocks=6, block_bytes=192_000)
    assert _described(group) == "6 states in layers with a state of 187.5 KiB every 64 tokens"


def test_blocks_of_an_encoder_are_named():
    group = CacheGroupMemory(attention_window=None, is_of_encoder=True, blocks=6)
    assert _described(group) == "6 blocks in layers of cross attention"


def test_links_are_followed_and_what_is_left_out_is_counted(tmp_path):
    zh, ja = ADAPTER_PATHS["chinese"], ADAPTER_PATHS["japanese"]
    (tmp_path / "zh").symlink_to(zh)
    (tmp_path / "ja").mkdir()
    for file in ja.iterdir():
        (tmp_path / "ja" / file.name).symlink_to(file)
    result = plan(*FLAGS, "--adapters", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "2 of 2 adapters can be served" in result.stdout
    (tmp_path / "fr").symlink_to(tmp_path / "not checked out")
    result = plan(*FLAGS, "--adapters", str(tmp_path))
    assert result.exit_code == 2
    assert "2 of 3 adapters can be served" in result.stdout
    assert f"left out: symbolic link {tmp_path / 'fr'}: it leads nowhere" in result.stdout


def test_a_folder_without_adapters(tmp_path):
    result = plan("--adapters", str(tmp_path))
    assert result.exit_code == 1
    assert f"no adapter is below {tmp_path}" in result.stderr
