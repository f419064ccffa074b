"""Self-attention of one decoder layer: fused projections, rotation if any, paged attention."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from loraplex.core.plan import CacheGroupId
from loraplex.kernels.lora import LoraBatch
from loraplex.kernels.ops import AttentionPlan, AttentionRules, AttentionShape, Kernels
from loraplex.models.batch import ForwardBatch
from loraplex.models.mixers.mixer import Angles, LayerPlace, MixerInputs, PlanKind
from loraplex.models.norm import Norm, make_norm
from loraplex.models.parameters import LayerParameters
from loraplex.models.specs.attention import (
    K_NORM,
    OUTPUT,
    Q_NORM,
    QKV,
    SINK_LOGITS,
    AttentionSpec,
)
from loraplex.models.specs.part import NormSpec


class AttentionKind(NamedTuple):
    """All that the plan of a step's attention depends on. Layers of one kind share the plan."""

    cache_group: CacheGroupId
    shape: AttentionShape
    rules: AttentionRules

    def planner(
        self, kernels: Kernels, _device: torch.device
    ) -> Callable[[ForwardBatch], AttentionPlan]:
        return lambda batch: kernels.plan_attention(
            batch.rows[self.cache_group], self.shape, self.rules
        )


def attention_kind(
    attention: AttentionSpec, cache_group: CacheGroupId, block_size: int
) -> AttentionKind:
    rules = AttentionRules(
        scale=attention.head_dim**-0.5 if attention.scale is None else attention.scale,
        window=attention.window,
        num_sink_tokens=attention.num_sink_tokens,
        soft_cap=attention.soft_cap,
        alibi_slopes=attention.alibi_slopes,
    )
    shape = AttentionShape(
        attention.num_heads, attention.num_kv_heads, attention.head_dim, block_size
    )
    return AttentionKind(cache_group, shape, rules)


class HeadOrder(NamedTuple):
    """Order of the heads in projections of q, k and v, where it is another."""

    heads: tuple[int, ...]
    """AttentionSpec.head_order"""

    def planner(
        self, _kernels: Kernels, device: torch.device
    ) -> Callable[[ForwardBatch], torch.Tensor]:
        return _HeadRows(torch.tensor(self.heads, device=device)).plan


class _HeadRows:
    """Rows that bring the heads of all tokens' projections into the order q, k, v."""

    def __init__(self, order: torch.Tensor) -> None:
        self._order = order
        self._tables: dict[int, torch.Tensor] = {}

    def plan(self, batch: ForwardBatch) -> torch.Tensor:
        """Return [T * heads] int64, rows of projections [T * heads, D].

        For one number of tokens it is always at the same address, as a recorded step needs it.
        """
        num_tokens, num_heads = len(batch.token_ids), len(self._order)
        size = 1 << (num_tokens - 1).bit_length()
        if size not in self._tables:
            tokens = torch.arange(size, device=self._order.device).unsqueeze(1)
            self._tables[size] = (tokens * num_heads + self._order).flatten()
        return self._tables[size][: num_tokens * num_heads]


class Attention:
    """Implements `Mixer`."""

    def __init__(
        self,
        spec: AttentionSpec,
        place: LayerPlace,
        parameters: LayerParameters,
        kernels: Kernels,
    ) -> None:
        (cache,) = spec.caches()
        self._spec = spec
        self._kernels = kernels
        self._layer = place.layer
        self._qkv = place.linear(QKV, parameters, kernels)
        self._output = place.linear(OUTPUT, parameters, kernels)
        self._q_norm = make_norm(spec.q_norm, parameters.norms.get(Q_NORM), kernels)
        self._k_norm = make_norm(spec.k_norm, parameters.norms.get(K_NORM), kernels)
        self._sink_logits = parameters.tensors.get(SINK_LOGITS)
        self._kind = attention_kind(spec, place.cache_groups[cache], place.block_size)
        self._order = HeadOrder(spec.head_order) if spec.head_order else None
        self.plan_kinds: tuple[PlanKind, ...] = (
            (self._kind,) if self._order is None else (self._kind, self._order)
        )

    def forward(self, x: torch.Tensor, lora: LoraBatch | None, inputs: MixerInputs) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden]; writes the tokens' keys and values to the storage."""
        spec = self._spec
        storage = inputs.storages[self._kind.cache_group][self._layer]
        assert storage is not None
        head_rows = None if self._order is None else inputs.plans[self._order]
        assert head_rows is None or isinstance(head_rows, torch.Tensor)
        query, key, value = self._project(x, lora, head_rows)
        if spec.rope is not None:
            turned = query
            if spec.query_rope is not None:
                self._rotate(query, key[:, :0], inputs.angles[spec.query_rope])
                turned = query[:, :0]
            self._rotate(turned, key, inputs.angles[spec.rope])
        slot_mapping = inputs.batch.slot_mappings[self._kind.cache_group]
        self._kernels.write_kv(storage, key, value, slot_mapping)
        plan = inputs.plans[self._kind]
        attended = self._kernels.paged_attention(query, storage, plan, self._sink_logits)
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
