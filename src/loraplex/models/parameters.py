"""The weights of a decoder: their tensors, fused as the layers use them, and their file names."""

import dataclasses
from collections.abc import Mapping

import torch

from loraplex.models.config import DecoderConfig

_LAYER = "model.layers.{layer}."


@dataclasses.dataclass(slots=True, eq=False)
class LinearParameters:
    weight: torch.Tensor  # [out, in]
    bias: torch.Tensor | None  # [out]


@dataclasses.dataclass(slots=True, eq=False)
class LayerParameters:
    input_norm: torch.Tensor  # [hidden]
    post_attention_norm: torch.Tensor  # [hidden]
    qkv: LinearParameters  # out: q_size + 2 * kv_size
    o: LinearParameters
    gate_up: LinearParameters  # out: 2 * intermediate_size
    down: LinearParameters
    q_norm: torch.Tensor | None  # [head_dim]
    k_norm: torch.Tensor | None  # [head_dim]

    @property
    def num_bytes(self) -> int:
        norms = (self.input_norm, self.post_attention_norm, self.q_norm, self.k_norm)
        linears = (self.qkv, self.o, self.gate_up, self.down)
        tensors = [*norms, *(t for linear in linears for t in (linear.weight, linear.bias))]
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


@dataclasses.dataclass(slots=True, eq=False)
class DecoderParameters:
    embedding: torch.Tensor  # [vocab_size, hidden]
    layers: list[LayerParameters]
    final_norm: torch.Tensor  # [hidden]
    lm_head: torch.Tensor  # [vocab_size, hidden]; the embedding itself if they are tied

    @property
    def num_bytes(self) -> int:
        own_head = [] if self.lm_head is self.embedding else [self.lm_head]
        tensors = [self.embedding, self.final_norm, *own_head]
        return sum(t.nbytes for t in tensors) + sum(layer.num_bytes for layer in self.layers)


class _Allocator:
    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device

    def tensor(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def linear(self, in_features: int, out_features: int, has_bias: bool) -> LinearParameters:
        bias = self.tensor(out_features) if has_bias else None
        return LinearParameters(self.tensor(out_features, in_features), bias)


def allocate_parameters(
    config: DecoderConfig, dtype: torch.dtype, device: torch.device
) -> DecoderParameters:
    """Uninitialised tensors; `checkpoint_tensors` says what to fill them with."""
    allocator = _Allocator(dtype, device)
    embedding = allocator.tensor(config.vocab_size, config.hidden_size)
    return DecoderParameters(
        embedding=embedding,
        layers=[_allocate_layer(config, allocator) for _ in range(config.num_layers)],
        final_norm=allocator.tensor(config.hidden_size),
        lm_head=embedding if config.tie_word_embeddings else torch.empty_like(embedding),
    )


def _allocate_layer(config: DecoderConfig, allocator: _Allocator) -> LayerParameters:
    hidden, inner = config.hidden_size, config.intermediate_size
    return LayerParameters(
        input_norm=allocator.tensor(hidden),
        post_attention_norm=allocator.tensor(hidden),
        qkv=allocator.linear(hidden, config.q_size + 2 * config.kv_size, config.qkv_bias),
        o=allocator.linear(config.q_size, hidden, config.o_bias),
        gate_up=allocator.linear(hidden, 2 * inner, config.mlp_bias),
        down=allocator.linear(inner, hidden, config.mlp_bias),
        q_norm=allocator.tensor(config.head_dim) if config.qk_norm else None,
        k_norm=allocator.tensor(config.head_dim) if config.qk_norm else None,
    )


def checkpoint_tensors(
    parameters: DecoderParameters, config: DecoderConfig
) -> Mapping[str, torch.Tensor]:
    """Every tensor that a Hugging Face checkpoint must hold -> where it belongs.

    The values are views: copying into them fills the parameters. A tied lm_head has no entry.
    """
    tensors = {
        "model.embed_tokens.weight": parameters.embedding,
        "model.norm.weight": parameters.final_norm,
    }
    if not config.tie_word_embeddings:
        tensors["lm_head.weight"] = parameters.lm_head
    for index, layer in enumerate(parameters.layers):
        prefix = _LAYER.format(layer=index)
        tensors.update(
            {prefix + name: tensor for name, tensor in _layer_tensors(layer, config).items()}
        )
    return tensors


def _layer_tensors(layer: LayerParameters, config: DecoderConfig) -> dict[str, torch.Tensor]:
    q, kv, inner = config.q_size, config.kv_size, config.intermediate_size
    tensors = {
        "input_layernorm.weight": layer.input_norm,
        "post_attention_layernorm.weight": layer.post_attention_norm,
    }
    qkv_sizes = {"self_attn.q_proj": q, "self_attn.k_proj": kv, "self_attn.v_proj": kv}
    tensors |= _fused_tensors(layer.qkv, qkv_sizes)
    tensors |= _fused_tensors(layer.o, {"self_attn.o_proj": config.hidden_size})
    tensors |= _fused_tensors(layer.gate_up, {"mlp.gate_proj": inner, "mlp.up_proj": inner})
    tensors |= _fused_tensors(layer.down, {"mlp.down_proj": config.hidden_size})
    if layer.q_norm is not None and layer.k_norm is not None:
        tensors["self_attn.q_norm.weight"] = layer.q_norm
        tensors["self_attn.k_norm.weight"] = layer.k_norm
    return tensors


def _fused_tensors(linear: LinearParameters, sizes: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """Row ranges of a fused layer, by the names of its parts."""
    tensors, start = {}, 0
    for name, size in sizes.items():
        tensors[f"{name}.weight"] = linear.weight[start : start + size]
        if linear.bias is not None:
            tensors[f"{name}.bias"] = linear.bias[start : start + size]
        start += size
    return tensors
