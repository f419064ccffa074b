"""Writes a model as TensorRT-LLM's convert_checkpoint.py does: split by rows, columns and layers.

Made from the format's description alone, so that it shares nothing with the code that reads it.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from loraplex.models.spec import ModelSpec
from loraplex.models.specs.attention import QKV, AttentionSpec

Tensors = Mapping[str, torch.Tensor]


def write_trtllm_checkpoint(
    folder: Path,
    config: ModelSpec,
    tensors: Tensors,
    *,
    tp_size: int = 1,
    pp_size: int = 1,
    **fields: Any,
) -> None:
    """A Llama-like model of Hugging Face `tensors`; fields: more of config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    layer = config.layers[0]
    assert all(shapes == layer.module_shapes for shapes in config.module_shapes)
    attention = next(config.mixers_of(AttentionSpec))
    assert layer.feed_forward is not None
    described = {
        "architecture": config.architecture,
        "dtype": "float32",
        "logits_dtype": "float32",
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_size": attention.head_dim,
        "hidden_act": "silu",
        "intermediate_size": layer.feed_forward.inner_size,
        "norm_epsilon": config.final_norm.eps,
        "position_embedding_type": "rope_gpt_neox",
        "rotary_base": 10_000.0 if attention.rope is None else attention.rope.theta,
        "rotary_scaling": None,
        "attn_bias": layer.linears[QKV].has_bias,
        "mapping": {"world_size": tp_size * pp_size, "tp_size": tp_size, "pp_size": pp_size},
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
    }
    (folder / "config.json").write_text(json.dumps(described | fields))
    is_split = bool(fields.get("use_parallel_embedding"))
    for rank in range(tp_size * pp_size):
        stage, part = divmod(rank, tp_size)
        writer = _RankWriter(config, tensors, tp_size, part)
        written = writer.layers(stage, pp_size)
        if stage == 0:
            embedding = tensors["model.embed_tokens.weight"]
            dim = fields.get("embedding_sharding_dim", 0) if is_split else None
            written["transformer.vocab_embedding.weight"] = writer.part_of(embedding, dim)
        if stage == pp_size - 1:
            written["transformer.ln_f.weight"] = tensors["model.norm.weight"]
            if "lm_head.weight" in tensors:
                head = _padded(tensors["lm_head.weight"], tp_size)
                written["lm_head.weight"] = writer.part_of(head, 0)
        whole = {name: tensor.contiguous().clone() for name, tensor in written.items()}
        save_file(whole, folder / f"rank{rank}.safetensors")


class _RankWriter:
    """What one GPU of a stage holds."""

    def __init__(self, config: ModelSpec, tensors: Tensors, tp_size: int, part: int) -> None:
        self._config, self._tensors = config, tensors
        self._tp_size, self._part = tp_size, part

    def part_of(self, tensor: torch.Tensor, dim: int | None) -> torch.Tensor:
        return tensor if dim is None else tensor.chunk(self._tp_size, dim)[self._part]

    def layers(self, stage: int, num_stages: int) -> dict[str, torch.Tensor]:
        per_stage = self._config.num_layers // num_stages
        written: dict[str, torch.Tensor] = {}
        for position in range(per_stage):
            theirs = f"transformer.layers.{position}."
            ours = f"model.layers.{stage * per_stage + position}."
            written |= {theirs + name: t for name, t in self._layer(ours).items()}
        return written

    def _layer(self, ours: str) -> dict[str, torch.Tensor]:
        tensors = self._tensors
        layer = {
            "input_layernorm.weight": tensors[f"{ours}input_layernorm.weight"],
            "post_layernorm.weight": tensors[f"{ours}post_attention_layernorm.weight"],
            "attention.qkv.weight": self._qkv(ours, "weight"),
            "attention.dense.weight": self.part_of(tensors[f"{ours}self_attn.o_proj.weight"], 1),
            "mlp.fc.weight": self.part_of(tensors[f"{ours}mlp.gate_proj.weight"], 0),
            "mlp.gate.weight": self.part_of(tensors[f"{ours}mlp.up_proj.weight"], 0),
            "mlp.proj.weight": self.part_of(tensors[f"{ours}mlp.down_proj.weight"], 1),
        }
        if f"{ours}self_attn.q_proj.bias" in tensors:
            layer["attention.qkv.bias"] = self._qkv(ours, "bias")
        if f"{ours}self_attn.o_proj.bias" in tensors:
            layer["attention.dense.bias"] = tensors[f"{ours}self_attn.o_proj.bias"]
        if next(self._config.mixers_of(AttentionSpec)).q_norm is not None:
            layer["attention.q_layernorm.weight"] = tensors[f"{ours}self_attn.q_norm.weight"]
            layer["attention.k_layernorm.weight"] = tensors[f"{ours}self_attn.k_norm.weight"]
        return layer

    def _qkv(self, ours: str, kind: str) -> torch.Tensor:
        q, k, v = (self._tensors[f"{ours}self_attn.{name}_proj.{kind}"] for name in "qkv")
        return torch.cat([self.part_of(q, 0), self._heads(k), self._heads(v)])

    def _heads(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the part of k or v of a rank; neighbours share a head if GPUs outnumber heads."""
        num_parts = min(self._tp_size, next(self._config.mixers_of(AttentionSpec)).num_kv_heads)
        return tensor.chunk(num_parts)[self._part * num_parts // self._tp_size]


def _padded(tensor: torch.Tensor, tp_size: int) -> torch.Tensor:
    missing = -tensor.shape[0] % tp_size
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])])
