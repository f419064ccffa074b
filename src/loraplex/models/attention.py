"""Self-attention of one decoder layer: fused projections, rotation if any, paged attention."""

from typing import NamedTuple

import torch

from loraplex.core.plan import KVGroupId
from loraplex.kernels.ops import AttentionPlan, AttentionShape, Kernels, KVStorage
from loraplex.models.batch import ForwardBatch
from loraplex.models.linear import Linear
from loraplex.models.norm import RmsNorm
from loraplex.models.parameters import LayerParameters, NormParameters
from loraplex.models.spec import OUTPUT, QKV, AttentionSpec, LayerSpec, ModelSpec, NormSpec

Angles = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines [T, head_dim / 2]."""


class AttentionKind(NamedTuple):
    """All that the plan of a step's attention depends on. Layers of one kind share the plan."""

    kv_group: KVGroupId
    shape: AttentionShape
    window: int | None
    num_sink_tokens: int


def attention_kind(attention: AttentionSpec, kv_group: KVGroupId, block_size: int) -> AttentionKind:
    return AttentionKind(
        kv_group,
        attention_shape(attention, block_size),
        attention.window,
        attention.num_sink_tokens,
    )


def attention_shape(attention: AttentionSpec, block_size: int) -> AttentionShape:
    return AttentionShape(
        attention.num_heads, attention.num_kv_heads, attention.head_dim, block_size
    )


def attention_shapes(spec: ModelSpec, block_size: int) -> tuple[AttentionShape, ...]:
    """Return the shape of each layer's attention and KV storage."""
    return tuple(attention_shape(layer.attention, block_size) for layer in spec.layers)


class Attention:
    def __init__(
        self, spec: LayerSpec, layer: int, parameters: LayerParameters, kernels: Kernels
    ) -> None:
        self._spec = spec.attention
        self._kernels = kernels
        groups, packed = spec.linears, parameters.linears
        self._qkv = Linear(packed[QKV], groups[QKV], layer, kernels)
        self._output = Linear(packed[OUTPUT], groups[OUTPUT], layer, kernels)
        self._q_norm = _head_norm(spec.attention.q_norm, parameters.q_norm, kernels)
        self._k_norm = _head_norm(spec.attention.k_norm, parameters.k_norm, kernels)

    def forward(
        self,
        x: torch.Tensor,
        batch: ForwardBatch,
        angles: Angles | None,
        storage: KVStorage,
        slot_mapping: torch.Tensor,
        plan: AttentionPlan,
    ) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden]; writes the tokens' keys and values to the storage.

        slot_mapping, plan: those of the layer's KV group.
        """
        query, key, value = self._project(x, batch)
        if angles is not None:
            self._kernels.rotary(query, key, *angles)
        self._kernels.write_kv(storage, key, value, slot_mapping)
        attended = self._kernels.paged_attention(query, storage, plan).flatten(1)
        return self._output.forward(attended, batch.lora)

    def _project(
        self, x: torch.Tensor, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return query [T, H, D], key and value [T, K, D], before the rotation."""
        spec = self._spec
        qkv = self._qkv.forward(x, batch.lora)
        sizes = [spec.q_size, spec.kv_size, spec.kv_size]
        # Views, not copies: every op takes rows with a longer stride.
        query, key, value = (
            part.view(len(x), -1, spec.head_dim) for part in torch.split(qkv, sizes, dim=1)
        )
        if self._q_norm is not None:
            query = self._q_norm.apply(query)
        if self._k_norm is not None:
            key = self._k_norm.apply(key)
        return query, key, value


def _head_norm(
    norm: NormSpec | None, parameters: NormParameters | None, kernels: Kernels
) -> RmsNorm | None:
    if norm is None or parameters is None:
        return None
    return RmsNorm(parameters.weight, norm.eps, kernels)
