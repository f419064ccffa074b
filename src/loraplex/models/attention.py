"""Self-attention of one decoder layer: fused projections, rotation if any, paged attention."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from loraplex.core.plan import KVGroupId
from loraplex.kernels.lora import LoraBatch
from loraplex.kernels.ops import (
    AttentionPlan,
    AttentionRules,
    AttentionShape,
    Kernels,
    KVStorage,
)
from loraplex.models.linear import Linear
from loraplex.models.norm import Norm, make_norm
from loraplex.models.parameters import LayerParameters
from loraplex.models.spec import OUTPUT, QKV, AttentionSpec, LayerSpec, ModelSpec, NormSpec

Angles = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines [T, rotary_dim / 2]."""


class AttentionKind(NamedTuple):
    """All that the plan of a step's attention depends on. Layers of one kind share the plan."""

    kv_group: KVGroupId
    shape: AttentionShape
    rules: AttentionRules


def attention_kind(attention: AttentionSpec, kv_group: KVGroupId, block_size: int) -> AttentionKind:
    rules = AttentionRules(
        scale=attention.head_dim**-0.5 if attention.scale is None else attention.scale,
        window=attention.window,
        num_sink_tokens=attention.num_sink_tokens,
        soft_cap=attention.soft_cap,
        alibi_slopes=attention.alibi_slopes,
    )
    return AttentionKind(kv_group, attention_shape(attention, block_size), rules)


def attention_shape(attention: AttentionSpec, block_size: int) -> AttentionShape:
    return AttentionShape(
        attention.num_heads, attention.num_kv_heads, attention.head_dim, block_size
    )


def attention_shapes(spec: ModelSpec, block_size: int) -> tuple[AttentionShape, ...]:
    """Return the shape of each layer's attention and KV storage."""
    return tuple(attention_shape(layer.attention, block_size) for layer in spec.layers)


class AttentionInputs(NamedTuple):
    """What the attention of a step reads, in layers of one kind."""

    angles: Angles | None
    query_angles: Angles | None  # AttentionSpec.query_rope's; None: the keys' are the queries' too
    slot_mapping: torch.Tensor  # [T] int64: of the layer's KV group
    plan: AttentionPlan
    head_rows: torch.Tensor | None  # HeadOrder.rows; None: the heads are in order


class HeadOrder:
    """Rows that bring the heads of all tokens' projections into the order q, k, v."""

    def __init__(self, order: Sequence[int], device: torch.device) -> None:
        """order: AttentionSpec.head_order."""
        self._order = torch.tensor(order, device=device)
        self._tables: dict[int, torch.Tensor] = {}

    def rows(self, num_tokens: int) -> torch.Tensor:
        """Return [num_tokens * heads] int64, rows of projections [num_tokens * heads, D].

        For one number of tokens it is always at the same address, as a recorded step needs it.
        """
        num_heads = len(self._order)
        size = 1 << (num_tokens - 1).bit_length()
        if size not in self._tables:
            tokens = torch.arange(size, device=self._order.device).unsqueeze(1)
            self._tables[size] = (tokens * num_heads + self._order).flatten()
        return self._tables[size][: num_tokens * num_heads]


class Attention:
    def __init__(
        self, spec: LayerSpec, layer: int, parameters: LayerParameters, kernels: Kernels
    ) -> None:
        self._spec = spec.attention
        self._kernels = kernels
        groups, packed = spec.linears, parameters.linears
        self._qkv = Linear(packed[QKV], groups[QKV], layer, kernels)
        self._output = Linear(packed[OUTPUT], groups[OUTPUT], layer, kernels)
        self._q_norm = make_norm(spec.attention.q_norm, parameters.q_norm, kernels)
        self._k_norm = make_norm(spec.attention.k_norm, parameters.k_norm, kernels)
        self._sink_logits = parameters.sink_logits

    def forward(
        self,
        x: torch.Tensor,
        lora: LoraBatch | None,
        inputs: AttentionInputs,
        storage: KVStorage,
    ) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden]; writes the tokens' keys and values to the storage."""
        query, key, value = self._project(x, lora, inputs.head_rows)
        if self._spec.rope is not None and inputs.angles is not None:
            turned = query
            if inputs.query_angles is not None:
                self._rotate(query, key[:, :0], inputs.query_angles)
                turned = query[:, :0]
            self._rotate(turned, key, inputs.angles)
        self._kernels.write_kv(storage, key, value, inputs.slot_mapping)
        attended = self._kernels.paged_attention(query, storage, inputs.plan, self._sink_logits)
        return self._output.forward(attended.flatten(1), lora)

    def _rotate(self, query: torch.Tensor, key: torch.Tensor, angles: Angles) -> None:
        assert self._spec.rope is not None
        is_interleaved = self._spec.rope.is_interleaved
        self._kernels.rotary(query, key, *angles, is_interleaved=is_interleaved)

    def _project(
        self, x: torch.Tensor, lora: LoraBatch | None, head_rows: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return query [T, H, D], key and value [T, K, D], before the rotation."""
        spec = self._spec
        qkv = self._qkv.forward(x, lora)
        if head_rows is not None:
            qkv = self._kernels.take_rows(qkv.view(-1, spec.head_dim), head_rows).view(qkv.shape)
        sizes = [spec.q_size, spec.kv_size, spec.kv_size]
        # Views, not copies: every op takes rows with a longer stride.
        query, key, value = (
            part.view(len(x), -1, spec.head_dim) for part in torch.split(qkv, sizes, dim=1)
        )
        if spec.q_norm is not None:
            query = self._normed(query, spec.q_norm, self._q_norm)
        if spec.k_norm is not None:
            key = self._normed(key, spec.k_norm, self._k_norm)
        return query, key, value

    def _normed(self, heads: torch.Tensor, spec: NormSpec, norm: Norm) -> torch.Tensor:
        """heads [T, H, D] -> the same shape; the norm is of each head or of all together."""
        num_tokens, head_dim = len(heads), heads.shape[-1]
        if head_dim == spec.size:
            return norm.apply(heads)
        own = spec.own_heads
        if own is None:
            return norm.apply(heads.view(num_tokens, -1, spec.size)).view(heads.shape)
        whole = self._kernels.gather_columns(heads.flatten(1), spec.size)
        normed = norm.apply(whole)[:, own.span.first * head_dim : own.span.end * head_dim]
        return normed.view(heads.shape)
