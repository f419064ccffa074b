"""Self-attention of one layer: fused projections, rotation if any, paged attention."""

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from loraplex.core.errors import ConfigError
from loraplex.core.plan import CacheGroupId
from loraplex.kernels.lora import LoraBatch
from loraplex.kernels.ops import AttentionPlan, AttentionRules, AttentionShape, Kernels, RowLayout
from loraplex.models.batch import ForwardBatch
from loraplex.models.mixers.head_order import HeadOrder
from loraplex.models.mixers.mixer import LayerPlace, MixerInputs, PlanKind
from loraplex.models.norm import NoNorm, Norm, RmsNorm, make_norm
from loraplex.models.parameters import LayerParameters
from loraplex.models.specs.attention import (
    K_NORM,
    OUTPUT,
    POSITION_BIAS,
    Q_NORM,
    QKV,
    SINK_LOGITS,
    AttentionSpec,
)
from loraplex.models.specs.part import NormSpec, RopeConfig


class AttentionKind(NamedTuple):
    """All that the plan of a step's attention depends on. Layers of one kind share the plan."""

    cache_group: CacheGroupId
    shape: AttentionShape
    rules: AttentionRules
    chunk: int | None = None
    """AttentionSpec.chunk"""

    def planner(
        self, kernels: Kernels, _device: torch.device
    ) -> Callable[[ForwardBatch], AttentionPlan]:
        chunk, block_size = self.chunk, self.shape.block_size
        if chunk is not None and chunk % block_size:
            raise ConfigError(
                f"attention in chunks of {chunk} positions needs a block_size that divides them, "
                f"got {block_size}",
                param="block_size",
            )

        def plan(batch: ForwardBatch) -> AttentionPlan:
            rows = batch.rows[self.cache_group]
            if chunk is not None and max(rows.seq_lens, default=0) > chunk:
                rows = rows_in_chunks(rows, chunk, block_size)
            return kernels.plan_attention(rows, self.shape, self.rules)

        return plan


def rows_in_chunks(rows: RowLayout, chunk: int, block_size: int) -> RowLayout:
    """Cut rows, on the host, where chunks begin: nothing precedes the chunk that a piece is in."""
    starts, seq_lens, sources, first_blocks = [0], [], [], []
    for row, (start, end) in enumerate(itertools.pairwise(rows.query_start_loc)):
        position, seq_len = rows.seq_lens[row] - (end - start), rows.seq_lens[row]
        while position < seq_len:
            first = position // chunk * chunk
            stop = min(first + chunk, seq_len)
            starts.append(starts[-1] + stop - position)
            seq_lens.append(stop - first)
            sources.append(row)
            first_blocks.append(first // block_size)
            position = stop
    # With numpy: a recorded step has no op of torch.
    tables = rows.block_tables.numpy()
    columns = np.array(first_blocks)[:, None] + np.arange(chunk // block_size)
    columns = np.minimum(columns, tables.shape[1] - 1)
    return RowLayout(
        starts, seq_lens, torch.from_numpy(tables[np.array(sources)[:, None], columns])
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
        is_causal=attention.is_causal,
    )
    shape = AttentionShape(
        attention.num_heads, attention.num_kv_heads, attention.head_dim, block_size
    )
    return AttentionKind(cache_group, shape, rules, attention.chunk)


def _by_distance(spec: AttentionSpec, table: torch.Tensor) -> torch.Tensor:
    """Return the bias [H, 2 C + 1] of Kernels.paged_attention, of a table [num_buckets, heads].

    Distances have buckets of their own up to half of them, then the buckets grow by a factor, up to
    max_distance (arXiv:1910.10683). Without a causal mask later keys have the second half.
    """
    bias = spec.position_bias
    assert bias is not None
    distances = torch.arange(-bias.max_distance, bias.max_distance + 1)
    num_buckets, first = bias.num_buckets, torch.zeros_like(distances)
    if spec.is_causal:
        sizes = (-distances).clamp(min=0)
    else:
        num_buckets //= 2
        first = num_buckets * (distances > 0)
        sizes = distances.abs()
    num_exact = num_buckets // 2
    # In float32, as the model was trained.
    growth = torch.log(sizes.clamp(min=1).float() / num_exact)
    scale = (num_buckets - num_exact) / math.log(bias.max_distance / num_exact)
    large = (num_exact + (growth * scale).long()).clamp(max=num_buckets - 1)
    buckets = first + torch.where(sizes < num_exact, sizes, large)
    own = table if spec.own_heads is None else table[:, slice(*spec.own_heads.span)]
    return own[buckets.to(table.device)].t().contiguous()


class Attention:
    """Implements `Mixer`."""

    def __init__(
        self,
        spec: AttentionSpec,
        place: LayerPlace,
        parameters: LayerParameters,
        kernels: Kernels,
    ) -> None:
        self._spec = spec
        self._kernels = kernels
        self._layer = place.layer - spec.kv_distance
        self._qkv = place.linear(QKV, parameters, kernels)
        self._output = place.linear(OUTPUT, parameters, kernels)
        self._q_norm = make_norm(spec.q_norm, parameters.norms.get(Q_NORM), kernels)
        self._k_norm = make_norm(spec.k_norm, parameters.norms.get(K_NORM), kernels)
        self._v_norm: Norm = NoNorm(kernels)
        if spec.normalizes_values:
            assert spec.k_norm is not None
            weight = parameters.norms[K_NORM].weight
            self._v_norm = RmsNorm(torch.ones_like(weight), spec.k_norm.eps, kernels)
        self._sink_logits = parameters.tensors.get(SINK_LOGITS)
        self._position_bias = None
        if spec.position_bias is not None:
            self._position_bias = _by_distance(spec, parameters.tensors[POSITION_BIAS])
        self._kind = attention_kind(spec, place.cache_groups[spec.cache], place.block_size)
        self._order = HeadOrder(spec.head_order) if spec.head_order else None
        self.plan_kinds: tuple[PlanKind, ...] = (
            (self._kind,) if self._order is None else (self._kind, self._order)
        )

    def forward(self, x: torch.Tensor, lora: LoraBatch | None, inputs: MixerInputs) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden]; writes the tokens' own keys and values to the storage."""
        spec = self._spec
        storage = inputs.storages[self._kind.cache_group][self._layer]
        assert storage is not None
        head_rows = None if self._order is None else inputs.plans[self._order]
        assert head_rows is None or isinstance(head_rows, torch.Tensor)
        query, key, value, gate = self._project(x, lora, head_rows)
        value = self._v_norm.apply(value)
        if not spec.normalizes_after_rotation:
            query, key = self._with_norms(query, key)
        turned = query
        if spec.query_rope is not None:
            self._rotate(query, key[:, :0], spec.query_rope, inputs)
            turned = query[:, :0]
        if spec.rope is not None:
            self._rotate(turned, key, spec.rope, inputs)
        if spec.normalizes_after_rotation:
            query, key = self._with_norms(query, key)
        if not spec.kv_distance:
            slot_mapping = inputs.batch.slot_mappings[self._kind.cache_group]
            self._kernels.write_kv(storage, key, value, slot_mapping)
        plan = inputs.plans[self._kind]
        attended = self._kernels.paged_attention(
            query, storage, plan, self._sink_logits, self._position_bias
        )
        if gate is not None:
            attended = self._kernels.sigmoid_gate(attended, gate)
        return self._output.forward(attended.flatten(1), lora)

    def _rotate(
        self, query: torch.Tensor, key: torch.Tensor, rope: RopeConfig, inputs: MixerInputs
    ) -> None:
        angles = inputs.angles[rope]
        self._kernels.rotary(query, key, *angles, is_interleaved=rope.is_interleaved)

    def _project(
        self, x: torch.Tensor, lora: LoraBatch | None, head_rows: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return query [T, H, D], key and value [T, K, D], before norms and the rotation.

        And the gate of the output [T, H, D], if there is one. A layer that reads those of another
        one has no key and value heads.
        """
        spec = self._spec
        qkv = self._qkv.forward(x, lora)
        if head_rows is not None:
            qkv = self._kernels.take_rows(qkv.view(-1, spec.head_dim), head_rows).view(qkv.shape)
        sizes = [spec.q_outputs, *[spec.kv_size] * spec.num_kv_projections]
        # Views, not copies: every op takes rows with a longer stride.
        query, *others = (
            part.view(len(x), -1, spec.head_dim) for part in torch.split(qkv, sizes, dim=1)
        )
        key, value = (others[0], others[-1]) if others else (query[:, :0], query[:, :0])
        gate = None
        if spec.output_gate:
            # Only norms take heads with a longer stride; their results are contiguous.
            assert spec.q_norm is not None
            query, gate = query[:, 0::2], query[:, 1::2]
        return query, key, value, gate

    def _with_norms(
        self, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return query [T, H, D] and key [T, K, D] after their norms, if there are any."""
        spec = self._spec
        if spec.q_norm is not None:
            query = self._normed(query, spec.q_norm, self._q_norm)
        if spec.k_norm is not None:
            key = self._normed(key, spec.k_norm, self._k_norm)
        return query, key

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
