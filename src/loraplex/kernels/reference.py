"""The torch version of every op: correct first, on any device that torch has.

On a CPU it is also batch-invariant: a row's result has the same bits alone and in company. BLAS
picks its way of summing by the number of rows, so rows are padded to a number where all ways agree
(measured for MKL and oneDNN; tests check it), and torch computes the ends of a chunk of a tensor
with other code than its middle, so activations are rounded from float64.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import functional

from loraplex.kernels.lora import LoraBatch, add_lora
from loraplex.kernels.ops import (
    AttentionPlan,
    AttentionShape,
    KVStorage,
    PackedLinear,
    RowLayout,
)
from loraplex.kernels.reference_attention import TilePlan, attend, plan_tiles

_CPU_ROW_MULTIPLE = {torch.float32: 8, torch.bfloat16: 2, torch.float16: 2}


class _Linear(NamedTuple):
    weight: torch.Tensor
    bias: torch.Tensor | None


class ReferenceKernels:
    """Implements `Kernels`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pads_rows = device.type == "cpu"

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
        return _Linear(weight, bias)

    def linear(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        assert isinstance(packed, _Linear)
        num_rows = x.shape[0]
        multiple = _CPU_ROW_MULTIPLE[x.dtype] if self._pads_rows else 1
        padding = -num_rows % multiple
        if padding:
            x = functional.pad(x, (0, 0, 0, padding))
        return functional.linear(x, packed.weight, packed.bias)[:num_rows]

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return weight * wide.to(x.dtype)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        residual = residual + x
        return self.rms_norm(residual, weight, eps), residual

    def rotary(
        self, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> None:
        for heads in (query, key):
            _rotate(heads, cos.unsqueeze(1), sin.unsqueeze(1))

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        if self._pads_rows:
            return functional.silu(gate.double()).to(gate.dtype) * up
        return functional.silu(gate) * up

    def add_lora(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        batch: LoraBatch,
        layer: int,
        modules: Sequence[str],
        out_offsets: Sequence[int],
    ) -> None:
        add_lora(y, x, batch, layer, modules, out_offsets)

    def allocate_kv(self, num_blocks: int, shape: AttentionShape, dtype: torch.dtype) -> KVStorage:
        """Layout [num_blocks, K, block_size, D]."""
        sizes = (num_blocks, shape.num_kv_heads, shape.block_size, shape.head_dim)
        return KVStorage(
            torch.zeros(sizes, dtype=dtype, device=self._device),
            torch.zeros(sizes, dtype=dtype, device=self._device),
        )

    def write_kv(
        self, storage: KVStorage, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        block_size = storage.key.shape[2]
        blocks = torch.div(slot_mapping, block_size, rounding_mode="floor")
        offsets = slot_mapping % block_size
        storage.key[blocks, :, offsets] = key
        storage.value[blocks, :, offsets] = value

    def plan_attention(
        self, rows: RowLayout, shape: AttentionShape, sliding_window: int | None
    ) -> AttentionPlan:
        heads_per_kv = shape.num_heads // shape.num_kv_heads
        multiple = _CPU_ROW_MULTIPLE[torch.float32] if self._pads_rows else 1
        query_multiple = multiple // math.gcd(multiple, heads_per_kv)
        return plan_tiles(rows, shape.block_size, sliding_window, query_multiple)

    def paged_attention(
        self, query: torch.Tensor, storage: KVStorage, plan: AttentionPlan
    ) -> torch.Tensor:
        assert isinstance(plan, TilePlan)
        return attend(query, storage, plan)


def _rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    half = heads.shape[-1] // 2
    first, second = heads[..., :half].float(), heads[..., half:].float()
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    heads.copy_(rotated)
