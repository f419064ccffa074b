"""The backend of a CPU: every op natively."""

from collections.abc import Sequence

import torch

from loraplex.kernels.lora import LoraBatch
from loraplex.kernels.native.attention import AttentionKernel, NativeAttentionPlan
from loraplex.kernels.native.elementwise import ElementwiseKernel
from loraplex.kernels.native.library import NativeLibrary, ThreadPool
from loraplex.kernels.native.linear import LinearKernel, PackedWeight
from loraplex.kernels.native.lora import LoraKernel
from loraplex.kernels.ops import (
    AttentionPlan,
    AttentionShape,
    KVStorage,
    PackedLinear,
    RowLayout,
)


class NativeKernels:
    """Implements `Kernels` for tensors on the host.

    A row's result has the same bits alone and in company, on any number of threads.
    """

    def __init__(self, library: NativeLibrary, num_threads: int) -> None:
        """num_threads: counting the one that calls."""
        self._pool = ThreadPool(library, num_threads)
        self._linear = LinearKernel(library, self._pool)
        self._attention = AttentionKernel(library, self._pool)
        self._lora = LoraKernel(library, self._pool)
        self._elementwise = ElementwiseKernel(library, self._pool)

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
        return self._linear.pack(weight, bias)

    def linear(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        assert isinstance(packed, PackedWeight)
        return self._linear.apply(x, packed)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self._elementwise.rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._elementwise.add_rms_norm(x, residual, weight, eps)

    def rotary(
        self, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> None:
        self._elementwise.rotary(query, key, cos, sin)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self._elementwise.silu_mul(gate_up)

    def add_lora(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        batch: LoraBatch,
        layer: int,
        modules: Sequence[str],
        out_offsets: Sequence[int],
    ) -> None:
        self._lora.add(y, x, batch, layer, modules, out_offsets)

    def allocate_kv(self, num_blocks: int, shape: AttentionShape, dtype: torch.dtype) -> KVStorage:
        return self._attention.allocate(num_blocks, shape, dtype)

    def write_kv(
        self, storage: KVStorage, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        self._attention.write(storage, key, value, slot_mapping)

    def plan_attention(
        self, rows: RowLayout, shape: AttentionShape, sliding_window: int | None
    ) -> AttentionPlan:
        return self._attention.plan(rows, shape, sliding_window)

    def paged_attention(
        self, query: torch.Tensor, storage: KVStorage, plan: AttentionPlan
    ) -> torch.Tensor:
        assert isinstance(plan, NativeAttentionPlan)
        return self._attention.attend(query, storage, plan)
