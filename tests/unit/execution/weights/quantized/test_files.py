"""Checkpoints that are quantised already: decoded to the bit, or refused by name."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from loraplex.core.errors import ConfigError, UnsupportedModelError
from loraplex.core.weight_precision import WeightPrecision
from loraplex.execution.weights.checkpoint import Checkpoint
from loraplex.execution.weights.packing import WeightFormat, pack_checkpoint
from loraplex.execution.weights.stored_head import read_model
from loraplex.kernels.reference import ReferenceKernels
from loraplex.models.parameters import checkpoint_shapes
from support.checkpoints import save_random_model, tiny_sizes
from support.families.experts import gpt_oss
from support.naming import naming
from support.quantized_checkpoints import CASES, encode_experts, quantize_folder
from support.reference_quantizers import QUANTIZERS, ROUNDED_TWICE

LAYER = "model.layers.1.self_attn.q_proj"
KERNELS = ReferenceKernels(torch.device("cpu"))

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_random_model(tmp_path, LlamaConfig(**tiny_sizes(48, hidden_size=64, intermediate_size=96)))
    return tmp_path


def change_tensors(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder / "model.safetensors")


def change_config(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= fields
    (folder / "config.json").write_text(json.dumps(config))


def read_all(folder: Path) -> Tensors:
    spec = read_model(folder)
    with Checkpoint(folder, spec) as checkpoint:
        return {name: checkpoint.read(name).clone() for name in checkpoint_shapes(spec)}


@pytest.mark.parametrize("name", QUANTIZERS)
def test_every_format_is_decoded_to_the_bit(name: str, tmp_path: Path) -> None:
    # 80 is no multiple of 64, 32 or 24, and 192 none of 128; 49 outputs do not fill words.
    hidden_size = 64 if "mx" in name else 80
    sizes = tiny_sizes(49, hidden_size=hidden_size, intermediate_size=192, attention_bias=True)
    model = save_random_model(
        tmp_path, LlamaConfig(**sizes, tie_word_embeddings=name.startswith("ct"))
    )
    wanted = QUANTIZERS[name](tmp_path)
    found = read_all(tmp_path)
    assert f"{LAYER}.weight" in wanted
    for weight, tensor in found.items():
        expected = wanted.get(weight, model.state_dict().get(weight))
        rounded = tensor.to(expected.dtype)
        assert torch.allclose(rounded, expected, rtol=ROUNDED_TWICE.get(name, 0), atol=0), weight


def test_the_experts_of_gpt_oss(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2}
    save_random_model(tmp_path, gpt_oss(**sizes))
    wanted = encode_experts(tmp_path)
    found = read_all(tmp_path)
    for name, (gate, up, down) in wanted.items():
        for part, tensor in (("gate", gate), ("up", up), ("down", down)):
            for expert, weight in enumerate(tensor):
                assert torch.equal(found[f"{name}.{expert}.{part}_proj.weight"], weight)


REFUSED = {
    "without scales": ("gptq-4", lambda t: t.pop(f"{LAYER}.scales"), "has no scales"),
    "short words": (
        "gptq-4",
        lambda t: t.update({f"{LAYER}.qweight": t[f"{LAYER}.qweight"][:-1]}),
        "no weight of 64 inputs",
    ),
    "zeros of another shape": (
        "gptq-4",
        lambda t: t.update({f"{LAYER}.qzeros": t[f"{LAYER}.qzeros"][:2]}),
        "qzeros has shape [2, 8], [4, 8] is meant",
    ),
    "a group that is not there": (
        "gptq-4-order",
        lambda t: t[f"{LAYER}.g_idx"].index_fill_(0, torch.tensor([3]), 4),
        "one of 0 to 3",
    ),
    "zeros off the middle": (
        "gptq-4-v2-undeclared",
        lambda t: t[f"{LAYER}.qzeros"].fill_(0),
        "the zeros are not all 8",
    ),
    "an infinite scale": (
        "awq-gemm",
        lambda t: t[f"{LAYER}.scales"].fill_(torch.inf),
        "infinite or no number",
    ),
    "words of another type": (
        "awq-gemm",
        lambda t: t.update({f"{LAYER}.qweight": t[f"{LAYER}.qweight"].long()}),
        "qweight is torch.int64",
    ),
    "blocks that do not fit": (
        "fp8-block",
        lambda t: t.update({f"{LAYER}.weight_scale_inv": t[f"{LAYER}.weight_scale_inv"][:1]}),
        "is meant for blocks of [24, 24]",
    ),
    "codes that are no number": (
        "fp8-tensor",
        lambda t: t[f"{LAYER}.weight"].view(torch.uint8).fill_(0x7F),
        "a weight is no number",
    ),
    "a shape of its own": (
        "ct-int4",
        lambda t: t.update({f"{LAYER}.weight_shape": torch.tensor([64, 4096])}),
        "is meant for 4 bits",
    ),
    "an exponent that is no number": (
        "ct-mxfp4",
        lambda t: t[f"{LAYER}.weight_scale"].fill_(255),
        "a scale is no number",
    ),
    "a broken state": (
        "bnb-nf4",
        lambda t: t[f"{LAYER}.weight.quant_state.bitsandbytes__nf4"].fill_(0),
        "quant_state",
    ),
    "too few blocks": (
        "bnb-nf4",
        lambda t: t.update({f"{LAYER}.weight.absmax": t[f"{LAYER}.weight.absmax"][:-1]}),
        "in blocks of 64",
    ),
    "a tensor without its layer": (
        "gptq-4",
        lambda t: t.pop(f"{LAYER}.qweight"),
        "does not account for it",
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_files_that_are_refused(reason: str, folder: Path) -> None:
    name, change, message = REFUSED[reason]
    QUANTIZERS[name](folder)
    change_tensors(folder, change)
    with pytest.raises(ConfigError, match=re.escape(message)) as raised:
        read_all(folder)
    assert LAYER in str(raised.value)


@pytest.mark.parametrize(
    ("name", "fields", "named"),
    [
        ("gptq-4", {"quant_method": "hqq"}, ("quant_method", "hqq", "quantization_config")),
        (
            "gptq-4",
            {"checkpoint_format": "marlin"},
            ("checkpoint_format", "marlin", "quantization_config"),
        ),
        (
            "gptq-4",
            {"is_marlin_format": True},
            ("is_marlin_format", "quantization_config", "checkpoint_format"),
        ),
        ("gptq-4", {"quant_method": "marlin"}, ("quant_method", "marlin", "quantization_config")),
        (
            "gptq-4",
            {"quant_method": "auto-round", "packing_format": "auto_round:gptqmodel"},
            ("packing_format", "auto_round:gptqmodel", "quantization_config"),
        ),
        ("awq-gemm", {"version": "gemv_fast"}, ("version", "gemv_fast", "quantization_config")),
        ("awq-gemm", {"bits": 8}, ("AWQ", 8, "bits")),
        (
            "ct-int4",
            {"transform_config": {"config_groups": {}}},
            ("transform_config", "quantization_config"),
        ),
        (
            "ct-int4",
            {"sparsity_config": {"format": "sparse-24-bitmask"}},
            ("sparsity_config", "quantization_config"),
        ),
        ("ct-int4", {"config_groups": None}, ("config_groups", "quantization_config")),
        (
            "ct-int4",
            {"ignore": ["re:.*q_proj"]},
            ("ignore", "model.layers.0.self_attn.q_proj", "quantization_config"),
        ),
        (
            "fp8-tensor",
            {"weight_scale_semantics": "inverse"},
            ("weight_scale_semantics", "inverse", "quantization_config"),
        ),
    ],
)
def test_formats_that_are_refused(
    name: str, fields: dict[str, Any], named: tuple[object, ...], folder: Path
) -> None:
    QUANTIZERS[name](folder)
    change_config(folder, **fields)
    with pytest.raises((ConfigError, UnsupportedModelError), match=naming(*named)):
        read_all(folder)


@pytest.mark.parametrize(
    ("file", "fields", "name"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 16, "sym": False}, "gptq-4"),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 16, "version": "GEMM"}, "awq-gemm"),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}}, "fp8-tensor"),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "MXFP8"}}, "mxfp8"),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "NVFP4"}}, "modelopt-nvfp4"),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "FP8_PB_WO"}}, "modelopt-blocks"),
    ],
)
def test_files_of_early_programs(
    file: str, fields: dict[str, Any], name: str, folder: Path
) -> None:
    wanted = QUANTIZERS[name](folder)[f"{LAYER}.weight"]
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / file).write_text(json.dumps(fields))
    assert torch.equal(read_all(folder)[f"{LAYER}.weight"], wanted)


def test_an_output_layer_that_is_quantised_is_not_the_embedding(tmp_path: Path) -> None:
    sizes = tiny_sizes(48, hidden_size=64, intermediate_size=96)
    save_random_model(tmp_path, LlamaConfig(**sizes, tie_word_embeddings=True))
    quantize_folder(tmp_path, CASES["gptq-4"])
    encoded = CASES["gptq-4"].encode(48, 64)
    head = {f"lm_head{end}": tensor for end, tensor in encoded.tensors.items()}
    change_tensors(tmp_path, lambda tensors: tensors.update(head))
    assert not read_model(tmp_path).tie_word_embeddings
    assert torch.equal(read_all(tmp_path)["lm_head.weight"], encoded.decoded)


def test_what_is_quantised_is_not_quantised_again(folder: Path) -> None:
    quantize_folder(folder, CASES["awq-gemm"])
    form = WeightFormat(dtype=torch.float32, precision=WeightPrecision.INT8)
    with pytest.raises(ConfigError, match=naming("quantization_config")) as raised:
        pack_checkpoint(folder, read_model(folder), KERNELS, form)
    assert raised.value.param == "quantization"


def test_the_widening_is_reported(folder: Path) -> None:
    QUANTIZERS["ct-int4"](folder)
    weights = pack_checkpoint(
        folder, read_model(folder), KERNELS, WeightFormat(dtype=torch.bfloat16)
    )
    assert weights.summary.startswith(
        "weights that are stored as compressed-tensors are widened to bfloat16: "
    )


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        # Ministral 3 and Devstral 2.
        ("fp8-tensor", (".self_attn.q_proj.activation_scale", ".mlp.up_proj.activation_scale")),
        # AutoFP8, and vLLM's names of scales of the KV cache.
        ("fp8-tensor", (".self_attn.kv_scale", ".self_attn.attn.k_scale")),
        ("ct-int4", (".self_attn.q_proj.input_global_scale",)),
        ("ct-int4", (".self_attn.k_scale", ".self_attn.k_zero_point", ".self_attn.q_scale")),
        ("ct-int4", (".self_attn.q_proj.output_scale", ".self_attn.q_proj.output_zero_point")),
        ("modelopt-nvfp4", (".self_attn.k_proj.k_scale", ".self_attn.q_proj.input_scale")),
    ],
)
def test_scales_of_activations_and_of_the_kv_cache_are_not_used(
    name: str, ends: tuple[str, ...], folder: Path
) -> None:
    wanted = QUANTIZERS[name](folder)
    scales = {f"model.layers.1{end}": torch.tensor([0.5]) for end in ends}
    change_tensors(folder, lambda tensors: tensors.update(scales))
    found = read_all(folder)
    assert torch.equal(
        found[f"{LAYER}.weight"].to(wanted[f"{LAYER}.weight"].dtype), wanted[f"{LAYER}.weight"]
    )


def test_names_of_mistral_s_fp8(folder: Path) -> None:
    wanted = QUANTIZERS["fp8-tensor"](folder)

    def rename(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith(".weight_scale")]:
            module = name.removesuffix(".weight_scale")
            tensors[f"{module}.weight_scale_inv"] = tensors.pop(name)
            tensors[f"{module}.activation_scale"] = tensors.pop(f"{module}.input_scale")

    change_tensors(folder, rename)
    change_config(folder, activation_scheme="static", weight_block_size=None, dequantize=False)
    assert torch.equal(read_all(folder)[f"{LAYER}.weight"], wanted[f"{LAYER}.weight"])


@pytest.mark.parametrize("name", ["gptq-4", "awq-gemm", "fp8-tensor"])
def test_biases_that_are_zero_are_left_out(
    name: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = QUANTIZERS[name](folder)
    biases = {
        weight.replace(".weight", ".bias"): torch.zeros(len(tensor))
        for weight, tensor in wanted.items()
        if weight.endswith("_proj.weight")
    }
    change_tensors(folder, lambda tensors: tensors.update(biases))
    with caplog.at_level("INFO"):
        assert torch.equal(read_all(folder)[f"{LAYER}.weight"], wanted[f"{LAYER}.weight"])
    assert f"{len(biases)} biases that are zero" in caplog.text


def test_a_bias_that_is_not_zero_is_refused(folder: Path) -> None:
    QUANTIZERS["gptq-4"](folder)
    bias = torch.zeros(64)
    bias[7] = 1e-7
    change_tensors(folder, lambda tensors: tensors.update({f"{LAYER}.bias": bias}))
    with pytest.raises(ConfigError, match=naming(LAYER, "model.layers.1.self_attn.q_proj.bias")):
        read_all(folder)
