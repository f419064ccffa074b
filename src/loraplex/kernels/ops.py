"""The operations that a decoder is made of, with their shapes. Backends implement `Kernels`.

T tokens of a step lie behind one another, row after row; R is the number of rows (sequences).
H query heads share K key and value heads; D is the head size.
"""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import torch

from loraplex.kernels.lora import LoraBatch

PackedLinear = object
"""A linear layer in the form that one backend likes. Opaque: only that backend can use it."""

AttentionPlan = object
"""What one backend worked out for a step before its layers run. Opaque, like PackedLinear."""


@dataclasses.dataclass(frozen=True, slots=True)
class KVStorage:
    """Keys and values of one layer. The first axis is the block; the others are the backend's."""

    key: torch.Tensor  # [num_blocks, ...]
    value: torch.Tensor  # [num_blocks, ...]

    @property
    def num_bytes(self) -> int:
        return self.key.nbytes + self.value.nbytes


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionShape:
    """Of one attention layer and its KV storage."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int


@dataclasses.dataclass(frozen=True, slots=True)
class RowLayout:
    """Where the rows' queries and keys are.

    Row r computes the tokens query_start_loc[r] .. query_start_loc[r + 1] - 1, which are the last
    of its seq_lens[r] positions. Position p lies in block block_tables[r, p // block_size].
    """

    query_start_loc: Sequence[int]  # R + 1, on the host
    seq_lens: Sequence[int]  # R, on the host
    block_tables: torch.Tensor  # [R, max blocks] int64, on the device; unused entries are any block


class Kernels(Protocol):
    """One backend. Its methods are pure but for the arguments that they are said to change."""

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
        """weight [out, in], bias [out] or None; done once, at load."""
        ...

    def linear(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        """x [T, in] -> [T, out], x weight^T + bias."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x [..., N], weight [N]: x / sqrt(mean(x^2) + eps) in float32, then times the weight."""
        ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(rms_norm(x + residual), x + residual), each [T, N]."""
        ...

    def rotary(
        self, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> None:
        """Rotate, in place, the pairs (i, i + D/2) of query [T, H, D] and key [T, K, D].

        cos, sin [T, D / 2] float32. Both may be views with a longer row stride.
        """
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[T, 2 N] -> [T, N]: silu(first half) * second half."""
        ...

    def add_lora(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        batch: LoraBatch,
        layer: int,
        modules: Sequence[str],
        out_offsets: Sequence[int],
    ) -> None:
        """y [T, out] += the adapters' share for x [T, in], in place; see kernels.lora.add_lora."""
        ...

    def allocate_kv(self, num_blocks: int, shape: AttentionShape, dtype: torch.dtype) -> KVStorage:
        """Storage for one layer. A block's bytes are 2 * block_size * K * D elements."""
        ...

    def write_kv(
        self, storage: KVStorage, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Store key, value [T, K, D]; slot_mapping [T] int64: block * block_size + offset."""
        ...

    def plan_attention(
        self, rows: RowLayout, shape: AttentionShape, sliding_window: int | None
    ) -> AttentionPlan:
        """Once per step and kind of layer."""
        ...

    def paged_attention(
        self, query: torch.Tensor, storage: KVStorage, plan: AttentionPlan
    ) -> torch.Tensor:
        """Causal attention [T, H, D] of query [T, H, D] over each row's own stored keys.

        Scores are scaled by D ** -0.5. With a sliding window of W a token at position p sees
        p - W + 1 .. p. The step's own keys must have been written before.
        """
        ...
