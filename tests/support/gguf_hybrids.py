"""GGUF files of models with recurrences, as llama.cpp's converters write them."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file

from support.gguf_files import (
    ENCODERS,
    TYPES,
    gguf_bytes,
    rotated,
    small_blocks,
    tokenizer_fields,
)

Numbers = npt.NDArray[np.float32]

_QWEN_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    **{f"self_attn.{part}_proj.weight": f"attn_{part}.weight" for part in "qkv"},
    "self_attn.o_proj.weight": "attn_output.weight",
    **{f"self_attn.{part}_norm.weight": f"attn_{part}_norm.weight" for part in "qk"},
    **{f"mlp.{part}_proj.weight": f"ffn_{part}.weight" for part in ("gate", "up", "down")},
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.in_proj_qkvz.weight": "ssm_in.weight",
    "linear_attn.in_proj_ba.weight": "ssm_ba.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
    **{
        f"mlp.shared_expert.{part}_proj.weight": f"ffn_{part}_shexp.weight"
        for part in ("gate", "up", "down")
    },
    **{f"mlp.experts.{part}_proj": f"ffn_{part}_exps.weight" for part in ("gate", "up", "down")},
}
_OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def gguf_of_qwen3_5(
    folder: Path,
    kinds: Mapping[str, str] | None = None,
    *,
    drafts: bool = False,
    splits: bool = True,
) -> bytes:
    """Return a Qwen 3.5 of a folder, dense or with experts, or a Qwen3-Next, in float32.

    kinds: types of weights by a part of their names, the first that fits; those but Q8_0 are
    random. drafts: whether the file has a layer that drafts tokens. splits: whether the inputs of
    Qwen3-Next's delta rules are two tensors, as newer files have them.
    """
    config = json.loads((folder / "config.json").read_text())
    config = config.get("text_config", config)
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    for name, stored in _stacked(load_file(folder / "model.safetensors")).items():
        for own, numbers in _tensors_of(name, stored, config, splits=splits):
            kind = next((k for part, k in (kinds or {}).items() if part in name), "F32")
            is_weight = numbers.ndim > 1 and "conv1d" not in name
            if not is_weight or numbers.shape[-1] % TYPES[kind][1]:
                kind = "F32"
            if kind in ENCODERS:
                data = ENCODERS[kind](numbers)
            else:
                rows = numbers.size // numbers.shape[-1]
                data = small_blocks(kind, rows, numbers.shape[-1], len(tensors)).tobytes()
            tensors[own] = (kind, numbers.shape, data)
    if drafts:
        last = f"blk.{config['num_hidden_layers']}"
        tensors[f"{last}.nextn.eh_proj.weight"] = ("F32", (2, 4), bytes(32))
        tensors[f"{last}.attn_norm.weight"] = ("F32", (2,), bytes(8))
    return gguf_bytes(
        {**_metadata(config, drafts=drafts), **tokenizer_fields(_tokenizer(folder))}, tensors
    )


def _stacked(tensors: Mapping[str, torch.Tensor]) -> dict[str, Numbers]:
    """Return the tensors, and one for all experts where the checkpoint has one for each."""
    found: dict[str, Numbers] = {}
    experts: dict[str, dict[int, Numbers]] = {}
    for name, tensor in tensors.items():
        name = name.replace("model.language_model.", "model.")
        of_expert = re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", name)
        if of_expert is None:
            found[name] = tensor.float().numpy()
        else:
            whole = f"{of_expert[1]}.{of_expert[3]}"
            experts.setdefault(whole, {})[int(of_expert[2])] = tensor.float().numpy()
    stacks = {whole: [parts[n] for n in sorted(parts)] for whole, parts in experts.items()}
    return found | {whole: np.stack(parts) for whole, parts in stacks.items()}


def _tokenizer(folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((folder / "tokenizer.json").read_text())
    return loaded


def _metadata(config: Mapping[str, Any], *, drafts: bool) -> dict[str, Any]:
    name = "qwen35moe" if "num_experts" in config else "qwen35"
    name = "qwen3next" if _is_next(config) else name
    rope = config["rope_parameters"]
    num_values = config["linear_num_value_heads"]
    fields: dict[str, Any] = {
        "block_count": config["num_hidden_layers"] + drafts,
        "embedding_length": config["hidden_size"],
        "context_length": config["max_position_embeddings"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": int(config["head_dim"] * rope.get("partial_rotary_factor", 0.25)),
        "rope.dimension_sections": [1, 1, 1, 0],
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": num_values,
        "ssm.inner_size": config["linear_value_head_dim"] * num_values,
        "full_attention_interval": 4,
    }
    if drafts:
        fields["nextn_predict_layers"] = 1
    if name == "qwen35":
        fields["feed_forward_length"] = config["intermediate_size"]
    else:
        fields |= {
            "expert_count": config["num_experts"],
            "expert_used_count": config["num_experts_per_tok"],
            "expert_feed_forward_length": config["moe_intermediate_size"],
            "expert_shared_feed_forward_length": config["shared_expert_intermediate_size"],
        }
    prefixed = {f"{name}.{key}": value for key, value in fields.items()}
    return {"general.architecture": name, **prefixed}


def _is_next(config: Mapping[str, Any]) -> bool:
    return bool(config["model_type"] == "qwen3_next")


def _tensors_of(
    name: str, numbers: Numbers, config: Mapping[str, Any], *, splits: bool
) -> list[tuple[str, Numbers]]:
    """Return what the converter makes of one tensor of the checkpoint."""
    if name in _OUTSIDE:
        is_norm = name == "model.norm.weight"
        return [(_OUTSIDE[name], numbers + 1 if is_norm else numbers)]
    _, _, layer, part = name.split(".", 3)
    prefix = f"blk.{layer}."
    if part == "mlp.experts.gate_up_proj":
        gate, up = np.split(numbers, 2, axis=1)
        return [(f"{prefix}ffn_gate_exps.weight", gate), (f"{prefix}ffn_up_exps.weight", up)]
    if part.endswith("in_proj_qkvz.weight") and splits:
        qkv, z = _by_part(numbers, config)
        return [(f"{prefix}attn_qkv.weight", qkv), (f"{prefix}attn_gate.weight", z)]
    if part.startswith("linear_attn.") and not _is_next(config):
        numbers = _with_tiled_values(part, numbers, config)
    if part.endswith("norm.weight") and part != "linear_attn.norm.weight":
        numbers = numbers + 1
    if part.endswith("A_log"):
        numbers = -np.exp(numbers)
    if part.endswith("conv1d.weight"):
        numbers = numbers.squeeze(1)
    return [(prefix + _QWEN_NAMES[part], numbers)]


def _by_part(numbers: Numbers, config: Mapping[str, Any]) -> tuple[Numbers, Numbers]:
    """Split rows that lie by key head into all q, k and v, and all z."""
    key_size, num_keys = config["linear_key_head_dim"], config["linear_num_key_heads"]
    values = config["linear_value_head_dim"] * config["linear_num_value_heads"] // num_keys
    heads = numbers.reshape(num_keys, -1, numbers.shape[-1])
    ends = (key_size, 2 * key_size, 2 * key_size + values)
    q, k, v, z = (part.reshape(-1, numbers.shape[-1]) for part in np.split(heads, ends, axis=1))
    return np.concatenate((q, k, v)), z


def _with_tiled_values(part: str, numbers: Numbers, config: Mapping[str, Any]) -> Numbers:
    """Put the first value head of every key head first, then the second ones."""
    size = config["linear_value_head_dim"]
    keys = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    match part.split(".")[1]:
        case "in_proj_qkv" | "conv1d":
            values = _tiled(numbers[keys:], 0, size, config)
            return np.concatenate((numbers[:keys], values))
        case "in_proj_z":
            return _tiled(numbers, 0, size, config)
        case "in_proj_b" | "in_proj_a" | "A_log" | "dt_bias":
            return _tiled(numbers, 0, 1, config)
        case "out_proj":
            return _tiled(numbers, 1, size, config)
    return numbers


def _tiled(numbers: Numbers, axis: int, size: int, config: Mapping[str, Any]) -> Numbers:
    keys = config["linear_num_key_heads"]
    per_key = config["linear_num_value_heads"] // keys
    shape = (*numbers.shape[:axis], keys, per_key, size, *numbers.shape[axis + 1 :])
    return numbers.reshape(shape).swapaxes(axis, axis + 1).reshape(numbers.shape)


_LFM2_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.embedding_norm": "token_embd_norm",
    "lm_head": "output",
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    **{f"conv.{part}": f"shortconv.{part}" for part in ("conv", "in_proj", "out_proj")},
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    "self_attn.out_proj": "attn_output",
    **{f"self_attn.{part}_layernorm": f"attn_{part}_norm" for part in "qk"},
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
    "feed_forward.gate": "ffn_gate_inp",
    "feed_forward.expert_bias": "exp_probs_b",
    **{
        f"feed_forward.experts.{part}": f"ffn_{own}_exps"
        for part, own in (("w1", "gate"), ("w2", "down"), ("w3", "up"))
    },
}


def gguf_of_lfm2(folder: Path, kind: str = "F32") -> bytes:
    """Return an LFM2 of a folder, dense or with experts.

    kind: of weights whose rows are whole blocks.
    """
    config = json.loads((folder / "config.json").read_text())
    own_layers = [name == "full_attention" for name in config["layer_types"]]
    fields = {
        "block_count": config["num_hidden_layers"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "context_length": config["max_position_embeddings"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": [config["num_key_value_heads"] * own for own in own_layers],
        "attention.layer_norm_rms_epsilon": float(config["norm_eps"]),
        "rope.freq_base": float(config["rope_parameters"]["rope_theta"]),
        "shortconv.l_cache": config["conv_L_cache"],
        "vocab_size": config["vocab_size"],
    }
    name = "lfm2"
    if "num_experts" in config:
        name = "lfm2moe"
        fields |= {
            "expert_count": config["num_experts"],
            "expert_used_count": config["num_experts_per_tok"],
            "expert_feed_forward_length": config["moe_intermediate_size"],
            "leading_dense_block_count": config["num_dense_layers"],
            "expert_gating_func": 2,
        }
    metadata = {f"{name}.{field}": value for field, value in fields.items()}
    tensors = {}
    for place, numbers in _stacked(load_file(folder / "model.safetensors")).items():
        own = _lfm2_name(place)
        is_conv = own.endswith("shortconv.conv.weight")
        numbers = numbers.squeeze(1) if is_conv else numbers
        is_weight = numbers.ndim > 1 and not is_conv
        stored = kind if is_weight and numbers.shape[-1] % TYPES[kind][1] == 0 else "F32"
        tensors[own] = (stored, numbers.shape, ENCODERS[stored](numbers))
    tokens = tokenizer_fields(_tokenizer(folder))
    return gguf_bytes({"general.architecture": name, **metadata, **tokens}, tensors)


def _lfm2_name(name: str) -> str:
    """Return the name of a tensor of a checkpoint in a file."""
    module, kind = name.removesuffix(".weight").removesuffix(".bias"), name.rpartition(".")[2]
    own = _LFM2_NAMES.get(module)
    if own is None:
        _, _, layer, part = module.split(".", 3)
        own = f"blk.{layer}.{_LFM2_NAMES[part]}"
    # Stacks and biases of experts have no such ending.
    return (
        f"{own}.{kind}"
        if kind in ("weight", "bias")
        else own + (".bias" if kind == "expert_bias" else ".weight")
    )


def gguf_of_hybrid_lora(folder: Path, base: Path, *, reorders: bool = True) -> bytes:
    """Return a PEFT adapter of linear layers as llama.cpp's converter stores it, in float32.

    reorders: False is a mistake that readers must show.
    """
    adapter = json.loads((folder / "adapter_config.json").read_text())
    config = json.loads((base / "config.json").read_text())
    config = config.get("text_config", config)
    family = _LORA_FAMILIES[config["model_type"]]
    metadata = {
        "general.architecture": family.architecture,
        "general.type": "adapter",
        "adapter.type": "lora",
        "adapter.lora.alpha": float(adapter["lora_alpha"]),
    }
    tensors = {}
    for name, tensor in load_file(folder / "adapter_model.safetensors").items():
        layer, part, factor = re.fullmatch(  # type: ignore[union-attr]
            r"base_model\.model\..*layers\.(\d+)\.(.+)\.lora_([AB])\.weight", name
        ).groups()
        numbers = tensor.float().numpy()
        if reorders:
            numbers = family.reordered(part, factor, numbers, config)
        halves = family.halves.get(part, (part,))
        stored = np.split(numbers, len(halves)) if factor == "B" else [numbers] * len(halves)
        for half, own_numbers in zip(halves, stored, strict=True):
            own = f"blk.{layer}.{family.names[half]}.lora_{factor.lower()}"
            tensors[own] = ("F32", own_numbers.shape, ENCODERS["F32"](own_numbers))
    return gguf_bytes(metadata, tensors)


def _with_tiled_factors(
    part: str, factor: str, numbers: Numbers, config: Mapping[str, Any]
) -> Numbers:
    is_columns = part == "linear_attn.out_proj"
    if part.startswith("linear_attn.") and is_columns == (factor == "A"):
        return _with_tiled_values(part, numbers, config)
    return numbers


def _with_rotated_factors(
    part: str, factor: str, numbers: Numbers, config: Mapping[str, Any]
) -> Numbers:
    module = part.rpartition(".")[2]
    if factor == "A" or module not in ("q_proj", "k_proj"):
        return numbers
    heads = "num_attention_heads" if module == "q_proj" else "num_key_value_heads"
    return rotated(numbers, config[heads])


def _as_they_are(part: str, factor: str, numbers: Numbers, config: Mapping[str, Any]) -> Numbers:
    del part, factor, config
    return numbers


_GRANITE_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    **{f"self_attn.{part}_proj.weight": f"attn_{part}.weight" for part in "qkv"},
    "self_attn.o_proj.weight": "attn_output.weight",
    "mamba.in_proj.weight": "ssm_in.weight",
    "mamba.conv1d.weight": "ssm_conv1d.weight",
    "mamba.conv1d.bias": "ssm_conv1d.bias",
    "mamba.dt_bias": "ssm_dt.bias",
    "mamba.A_log": "ssm_a",
    "mamba.D": "ssm_d",
    "mamba.norm.weight": "ssm_norm.weight",
    "mamba.out_proj.weight": "ssm_out.weight",
    "block_sparse_moe.router.layer.weight": "ffn_gate_inp.weight",
    "block_sparse_moe.output_linear.weight": "ffn_down_exps.weight",
}


def gguf_of_granite(folder: Path, kinds: Mapping[str, str] | None = None) -> bytes:
    """Return a Granite 4 H of a folder. kinds: as in gguf_of_qwen3_5, but of floats or Q8_0."""
    config = json.loads((folder / "config.json").read_text())
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        for own, numbers in _granite_tensors(name, tensor.float().numpy(), config):
            kind = next((k for part, k in (kinds or {}).items() if part in own), "F32")
            if numbers.ndim < 2 or numbers.shape[-1] % TYPES[kind][1]:
                kind = "F32"
            tensors[own] = (kind, numbers.shape, ENCODERS[kind](numbers))
    inner_size = config["mamba_n_heads"] * config["mamba_d_head"]
    has_experts = bool(config["num_local_experts"])
    fields: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "embedding_length": config["hidden_size"],
        "context_length": config["max_position_embeddings"],
        "feed_forward_length": config["intermediate_size"],
        "expert_shared_feed_forward_length": config["shared_intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": [
            config["num_key_value_heads"] if "attention" in kind and "linear" not in kind else 0
            for kind in config["layer_types"]
        ],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "attention.scale": float(config["attention_multiplier"]),
        "embedding_scale": float(config["embedding_multiplier"]),
        "residual_scale": float(config["residual_multiplier"]),
        "logit_scale": float(config["logits_scaling"]),
        "rope.scaling.finetuned": config.get("position_embedding_type") == "rope",
        "ssm.conv_kernel": config["mamba_d_conv"],
        "ssm.state_size": config["mamba_d_state"],
        "ssm.group_count": config["mamba_n_groups"],
        "ssm.inner_size": inner_size,
        "ssm.time_step_rank": config["mamba_n_heads"],
    }
    if has_experts:
        fields["expert_count"] = config["num_local_experts"]
        fields["expert_used_count"] = config["num_experts_per_tok"]
    prefixed = {f"granitehybrid.{key}": value for key, value in fields.items()}
    metadata = {"general.architecture": "granitehybrid", **prefixed}
    return gguf_bytes({**metadata, **tokenizer_fields(_tokenizer(folder))}, tensors)


def _granite_tensors(
    name: str, numbers: Numbers, config: Mapping[str, Any]
) -> list[tuple[str, Numbers]]:
    """Return what the converter makes of one tensor of the checkpoint."""
    if name in _OUTSIDE:
        return [(_OUTSIDE[name], numbers)]
    _, _, layer, part = name.split(".", 3)
    prefix = f"blk.{layer}."
    shared = "_shexp" if config["num_local_experts"] else ""
    match part:
        case "shared_mlp.input_linear.weight":
            gate, up = np.split(numbers, 2)
            return [
                (f"{prefix}ffn_gate{shared}.weight", gate),
                (f"{prefix}ffn_up{shared}.weight", up),
            ]
        case "shared_mlp.output_linear.weight":
            return [(f"{prefix}ffn_down{shared}.weight", numbers)]
        case "block_sparse_moe.input_linear.weight":
            gate, up = np.split(numbers, 2, axis=1)
            return [(f"{prefix}ffn_gate_exps.weight", gate), (f"{prefix}ffn_up_exps.weight", up)]
        case "self_attn.q_proj.weight" | "self_attn.k_proj.weight":
            heads = "num_attention_heads" if "q_proj" in part else "num_key_value_heads"
            numbers = rotated(numbers, config[heads])
        case "mamba.A_log":
            numbers = -np.exp(numbers)[:, None]
        case "mamba.D":
            numbers = numbers[:, None]
        case "mamba.conv1d.weight":
            numbers = numbers.squeeze(1)
        case "mamba.norm.weight":
            numbers = numbers.reshape(config["mamba_n_groups"], -1)
    return [(prefix + _GRANITE_NAMES[part], numbers)]


_NEMOTRON_NAMES = {
    "norm.weight": "attn_norm.weight",
    **{f"mixer.{part}_proj.weight": f"attn_{part}.weight" for part in "qkv"},
    "mixer.o_proj.weight": "attn_output.weight",
    "mixer.up_proj.weight": "ffn_up.weight",
    "mixer.down_proj.weight": "ffn_down.weight",
    "mixer.in_proj.weight": "ssm_in.weight",
    "mixer.conv1d.weight": "ssm_conv1d.weight",
    "mixer.conv1d.bias": "ssm_conv1d.bias",
    "mixer.dt_bias": "ssm_dt.bias",
    "mixer.A_log": "ssm_a",
    "mixer.D": "ssm_d",
    "mixer.norm.weight": "ssm_norm.weight",
    "mixer.out_proj.weight": "ssm_out.weight",
    "mixer.gate.weight": "ffn_gate_inp.weight",
    "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mixer.fc1_latent_proj.weight": "ffn_latent_down.weight",
    "mixer.fc2_latent_proj.weight": "ffn_latent_up.weight",
    **{f"mixer.experts.{part}_proj": f"ffn_{part}_exps.weight" for part in ("up", "down")},
    **{
        f"mixer.shared_experts.{part}_proj.weight": f"ffn_{part}_shexp.weight"
        for part in ("up", "down")
    },
}
_NEMOTRON_OUTSIDE = {
    "embeddings.weight": "token_embd.weight",
    "norm_f.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def gguf_of_nemotron(folder: Path) -> bytes:
    """Return a Nemotron-H of a folder, in float32."""
    config = json.loads((folder / "config.json").read_text())
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    for name, numbers in _stacked(load_file(folder / "model.safetensors")).items():
        bare = name.removeprefix("model.").removeprefix("backbone.")
        if bare in _NEMOTRON_OUTSIDE:
            own = _NEMOTRON_OUTSIDE[bare]
        else:
            _, layer, part = bare.split(".", 2)
            own = f"blk.{layer}.{_NEMOTRON_NAMES[part]}"
            numbers = _nemotron_numbers(part, numbers, config)
        tensors[own] = ("F32", numbers.shape, ENCODERS["F32"](numbers))
    kinds = config["layers_block_type"]
    has_experts = "moe" in kinds
    inner = config["moe_intermediate_size" if has_experts else "intermediate_size"]
    num_kv = config["num_key_value_heads"]
    fields: dict[str, Any] = {
        "block_count": len(kinds),
        "embedding_length": config["hidden_size"],
        "context_length": config["max_position_embeddings"],
        "feed_forward_length": [inner if kind in ("mlp", "moe") else 0 for kind in kinds],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": [
            num_kv if kind in ("attention", "full_attention") else 0 for kind in kinds
        ],
        "attention.key_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": float(config["layer_norm_epsilon"]),
        "ssm.conv_kernel": config["conv_kernel"],
        "ssm.state_size": config["ssm_state_size"],
        "ssm.group_count": config["n_groups"],
        "ssm.inner_size": config["mamba_num_heads"] * config["mamba_head_dim"],
        "ssm.time_step_rank": config["mamba_num_heads"],
    }
    if has_experts:
        fields |= {
            "expert_count": config["n_routed_experts"],
            "expert_used_count": config["num_experts_per_tok"],
            "expert_feed_forward_length": config["moe_intermediate_size"],
            "expert_shared_feed_forward_length": config["moe_shared_expert_intermediate_size"],
            "expert_weights_norm": config["norm_topk_prob"],
            "expert_weights_scale": float(config["routed_scaling_factor"]),
            "expert_group_count": config["n_group"],
        }
    if config.get("moe_latent_size"):
        fields["moe_latent_size"] = config["moe_latent_size"]
    name = "nemotron_h_moe" if has_experts else "nemotron_h"
    prefixed = {f"{name}.{key}": value for key, value in fields.items()}
    metadata = {"general.architecture": name, **prefixed}
    return gguf_bytes({**metadata, **tokenizer_fields(_tokenizer(folder))}, tensors)


def _nemotron_numbers(part: str, numbers: Numbers, config: Mapping[str, Any]) -> Numbers:
    """Return what the converter makes of a tensor of a layer."""
    match part.removeprefix("mixer."):
        case "q_proj.weight":
            return rotated(numbers, config["num_attention_heads"])
        case "k_proj.weight":
            return rotated(numbers, config["num_key_value_heads"])
        case "A_log":
            return -np.exp(numbers)[:, None]
        case "D":
            return numbers[:, None]
        case "conv1d.weight":
            return numbers.squeeze(1)
        case "norm.weight" if part.startswith("mixer."):
            return numbers.reshape(config["n_groups"], -1)
    return numbers


class _LoraFamily(NamedTuple):
    architecture: str
    names: Mapping[str, str]
    """Names of weights in files."""
    reordered: Callable[[str, str, Numbers, Mapping[str, Any]], Numbers] = _as_they_are
    halves: Mapping[str, tuple[str, ...]] = {}
    """Modules of which files have the parts."""


_LORA_FAMILIES: Mapping[str, _LoraFamily] = {
    "qwen3_5_text": _LoraFamily(
        "qwen35",
        {name.removesuffix(".weight"): own for name, own in _QWEN_NAMES.items()},
        _with_tiled_factors,
    ),
    "qwen3_next": _LoraFamily(
        "qwen3next", {name.removesuffix(".weight"): own for name, own in _QWEN_NAMES.items()}
    ),
    "granitemoehybrid": _LoraFamily(
        "granitehybrid",
        {
            **{name.removesuffix(".weight"): own for name, own in _GRANITE_NAMES.items()},
            "gate": "ffn_gate.weight",
            "up": "ffn_up.weight",
            "shared_mlp.output_linear": "ffn_down.weight",
        },
        _with_rotated_factors,
        {"shared_mlp.input_linear": ("gate", "up")},
    ),
    "nemotron_h": _LoraFamily(
        "nemotron_h",
        {name.removesuffix(".weight"): own for name, own in _NEMOTRON_NAMES.items()},
        _with_rotated_factors,
    ),
    "lfm2_moe": _LoraFamily(
        "lfm2moe", {name: f"{own}.weight" for name, own in _LFM2_NAMES.items()}
    ),
}
