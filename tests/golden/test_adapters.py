"""Adapters that PEFT itself made: the canonical form changes a layer exactly as PEFT would."""

from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from loraplex.adapters.canonical import read_canonical
from loraplex.adapters.shapes import BaseShapes
from loraplex.adapters.staged import StageRequest
from loraplex.adapters.staging_worker import stage
from loraplex.core.adapter import AdapterSource
from loraplex.execution.adapters.loader import read_host_adapter

HIDDEN, INNER, KV, NUM_LAYERS = 32, 48, 16, 3
SHAPES = BaseShapes(
    NUM_LAYERS,
    {
        "q_proj": (HIDDEN, HIDDEN),
        "k_proj": (HIDDEN, KV),
        "v_proj": (HIDDEN, KV),
        "o_proj": (HIDDEN, HIDDEN),
        "gate_proj": (HIDDEN, INNER),
        "up_proj": (HIDDEN, INNER),
        "down_proj": (INNER, HIDDEN),
    },
)

CONFIGS = {
    "plain": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "all linear": {"r": 3, "lora_alpha": 5, "target_modules": "all-linear"},
    "rank-stabilised": {
        "r": 8,
        "lora_alpha": 16,
        "use_rslora": True,
        "target_modules": ["o_proj", "down_proj"],
    },
    "ranks and alphas by pattern": {
        "r": 4,
        "lora_alpha": 8,
        "use_rslora": True,
        "target_modules": ["q_proj", "k_proj", "gate_proj"],
        "rank_pattern": {"k_proj": 2, r"layers\.(0|2)\.self_attn.q_proj": 6},
        "alpha_pattern": {"q_proj": 5, "layers.1.self_attn.q_proj": 32, "gate_proj": 1},
    },
    "some layers": {
        "r": 2,
        "lora_alpha": 3,
        "target_modules": ["q_proj", "up_proj"],
        "layers_to_transform": [0, 2],
        "layers_pattern": "layers",
    },
    "a regular expression": {
        "r": 1,
        "lora_alpha": 1,
        "target_modules": r"model\.layers\.[12]\.(self_attn\.[qk]_proj|mlp\.down_proj)",
    },
    "with exclusions": {
        "r": 4,
        "lora_alpha": 4,
        "target_modules": ["q_proj", "k_proj", "v_proj"],
        "exclude_modules": ["k_proj"],
    },
}


@pytest.fixture(scope="module")
def base_config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=64,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
    )


def trained(base_config, dtype=torch.float32, **config):
    """A PEFT model whose A and B are random."""
    torch.manual_seed(3)
    model = get_peft_model(LlamaForCausalLM(base_config), LoraConfig(**config))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn_like(parameter).to(dtype)
    return model


def loaded(base_config, folder):
    """Load the adapter with PEFT: saving sorts the patterns, and the first that matches counts."""
    torch.manual_seed(3)
    return PeftModel.from_pretrained(LlamaForCausalLM(base_config), folder)


def deltas_of(model) -> dict[tuple[int, str], torch.Tensor]:
    """What PEFT would add to each weight when it merges."""
    found = {}
    for name, module in model.named_modules():
        if hasattr(module, "get_delta_weight"):
            parts = name.split(".")
            layer, kind = int(parts[parts.index("layers") + 1]), parts[-1]
            found[layer, kind] = module.get_delta_weight("default").detach()
    return found


def staged(folder, tmp_path) -> AdapterSource:
    state_dir = str(tmp_path / "state")
    request = StageRequest(request_id=1, path=str(folder), state_dir=state_dir, shapes=SHAPES)
    return stage(request).source


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_the_normal_rows_are_peft_s_delta(config, base_config, tmp_path):
    trained(base_config, **config).save_pretrained(tmp_path / "adapter")
    expected = deltas_of(loaded(base_config, tmp_path / "adapter"))
    rows = read_canonical(Path(staged(tmp_path / "adapter", tmp_path).path)).rows
    assert {(row.layer, row.module) for row in rows} == set(expected)
    for row in rows:
        delta = row.scale * row.tensors["b"].array() @ row.tensors["a"].array()
        want = expected[row.layer, row.module].numpy()
        np.testing.assert_allclose(delta, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_other_types_reach_host_memory_bit_for_bit(dtype, base_config, tmp_path):
    model = trained(base_config, dtype, r=2, lora_alpha=2, target_modules=["q_proj"])
    model.save_pretrained(tmp_path / "adapter")
    adapter = read_host_adapter(staged(tmp_path / "adapter", tmp_path))
    state = dict(model.named_parameters())
    for weight in adapter.weights:
        name = f"base_model.model.model.layers.{weight.target.layer}.self_attn.q_proj"
        assert weight.a.dtype is dtype
        assert torch.equal(weight.a, state[f"{name}.lora_A.default.weight"])
        assert torch.equal(weight.b, state[f"{name}.lora_B.default.weight"])


def test_safetensors_and_bin_are_one_adapter(base_config, tmp_path):
    model = trained(base_config, **CONFIGS["plain"])
    model.save_pretrained(tmp_path / "safe")
    model.save_pretrained(tmp_path / "torch", safe_serialization=False)
    assert (tmp_path / "torch" / "adapter_model.bin").exists()
    digests = {staged(tmp_path / name, tmp_path).digest for name in ("safe", "torch")}
    assert len(digests) == 1


def test_a_merged_model_equals_base_and_rows(base_config, tmp_path):
    config = CONFIGS["ranks and alphas by pattern"]
    trained(base_config, **config).save_pretrained(tmp_path / "adapter")
    model = loaded(base_config, tmp_path / "adapter")
    adapter = read_host_adapter(staged(tmp_path / "adapter", tmp_path))
    torch.manual_seed(3)
    base = LlamaForCausalLM(base_config)
    for weight in adapter.weights:
        layer = base.model.layers[weight.target.layer]
        parent = layer.self_attn if hasattr(layer.self_attn, weight.target.module) else layer.mlp
        linear = getattr(parent, weight.target.module)
        linear.weight.data += weight.scale * weight.b @ weight.a
    tokens = torch.arange(10).unsqueeze(0)
    with torch.no_grad():
        torch.testing.assert_close(base(tokens).logits, model(tokens).logits, rtol=1e-3, atol=1e-3)
