"""Native paged attention, and the storage that it reads.

Keys lie in columns: [num_blocks, K, D, block_size]; values in rows: [num_blocks, K, block_size, D].
As int8 both have SCALE_BYTES * block_size bytes more per block and head, after the numbers: the
scales of its vectors.
"""

import ctypes
import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from loraplex.kernels.host_tensors import zeroed
from loraplex.kernels.native.library import (
    DTYPES,
    Int,
    NativeLibrary,
    Pointer,
    Real,
    Size,
    ThreadPool,
    Value,
)
from loraplex.kernels.ops import (
    SCALE_BYTES,
    AttentionPlan,
    AttentionRules,
    AttentionShape,
    RowLayout,
    Storage,
)

_KV_DTYPES = {**DTYPES, torch.int8: 3}


class _AttentionStep(ctypes.Structure):
    """loraplex_attention_step"""

    _fields_ = (
        ("num_rows", Size),
        ("num_heads", Size),
        ("num_kv_heads", Size),
        ("head_dim", Size),
        ("block_size", Size),
        ("sliding_window", Size),
        ("num_sink_tokens", Size),
        ("scale", Real),
        ("soft_cap", Real),
        ("alibi_slopes", Pointer),
        ("query_start_loc", Pointer),
        ("seq_lens", Pointer),
        ("block_tables", Pointer),
        ("block_table_stride", Size),
        ("is_causal", Size),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class NativeAttentionPlan:
    """One step's layout in the form that the kernel reads."""

    address: int
    step: _AttentionStep
    rows: RowLayout
    """Those that it was made for; later ones may differ from them in their lengths."""
    seq_lens: npt.NDArray[np.int64]
    arrays: tuple[Any, ...]
    """Whatever else the step points into."""

    def fits(self, rows: RowLayout) -> bool:
        """Whether rows differ from its own in their lengths alone, as while they decode."""
        before = self.rows
        return (
            rows.block_tables is before.block_tables
            and rows.query_start_loc == before.query_start_loc
        )


class NativeAttention:
    def __init__(self, library: NativeLibrary, pool: ThreadPool) -> None:
        self._pool = pool
        self._plans: dict[tuple[AttentionShape, AttentionRules], NativeAttentionPlan] = {}
        """The last plan of each kind."""
        self._output = library.output
        self._attend = library.function(
            "loraplex_paged_attention",
            *(Pointer, Value, Int, Pointer, Pointer, Pointer, Pointer, Size),
            *(Int, Value, Size, Value, Size),
        )
        self._write = library.function(
            "loraplex_write_kv",
            *(Pointer, Size, Size, Size, Size, Value),
            *(Int, Value, Size, Value, Size, Int, Pointer, Pointer),
        )

    def allocate(self, num_blocks: int, shape: AttentionShape, dtype: torch.dtype) -> Storage:
        """Storage of one layer, zero."""
        blocks = (num_blocks, shape.num_kv_heads)
        if dtype == torch.int8:
            stored_size = shape.head_dim + SCALE_BYTES
            key = zeroed((*blocks, stored_size, shape.block_size), dtype)
            value = zeroed((*blocks, shape.block_size * stored_size), dtype)
        else:
            key = zeroed((*blocks, shape.head_dim, shape.block_size), dtype)
            value = zeroed((*blocks, shape.block_size, shape.head_dim), dtype)
        return Storage((key, value))

    def write(
        self, storage: Storage, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """key, value [T, K, D], heads contiguous; slot_mapping [T] int64."""
        num_tokens, num_kv_heads, head_dim = key.shape
        keys, values = storage.tensors
        self._write(
            *(self._pool.address, num_tokens, num_kv_heads, head_dim, keys.shape[3]),
            *(slot_mapping.data_ptr(), DTYPES[key.dtype]),
            *(key.data_ptr(), key.stride(0), value.data_ptr(), value.stride(0)),
            *(_KV_DTYPES[keys.dtype], keys.data_ptr(), values.data_ptr()),
        )

    def plan(
        self, rows: RowLayout, shape: AttentionShape, rules: AttentionRules
    ) -> NativeAttentionPlan:
        """Implement Kernels.plan_attention. A plan is valid until the next one of its kind."""
        kept = self._plans.get((shape, rules))
        if kept is not None and kept.fits(rows):
            kept.seq_lens[:] = rows.seq_lens
            return kept
        assert len(rules.alibi_slopes) in (0, shape.num_heads)
        query_start_loc = np.array(rows.query_start_loc, dtype=np.int64)
        seq_lens = np.array(rows.seq_lens, dtype=np.int64)
        block_tables = rows.block_tables.contiguous()
        assert block_tables.dtype == torch.int64
        slopes = np.array(rules.alibi_slopes, dtype=np.float32)
        step = _AttentionStep(
            *(len(seq_lens), shape.num_heads, shape.num_kv_heads, shape.head_dim),
            *(shape.block_size, rules.window or 0, rules.num_sink_tokens),
            *(rules.scale, rules.soft_cap or 0.0),
            slopes.ctypes.data if rules.alibi_slopes else None,
            *(query_start_loc.ctypes.data, seq_lens.ctypes.data),
            *(block_tables.data_ptr(), block_tables.shape[1], int(rules.is_causal)),
        )
        arrays = (query_start_loc, block_tables, slopes)
        plan = NativeAttentionPlan(ctypes.addressof(step), step, rows, seq_lens, arrays)
        self._plans[shape, rules] = plan
        return plan

    def attend(
        self,
        query: torch.Tensor,
        storage: Storage,
        plan: AttentionPlan,
        sink_logits: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """query [T, H, D], heads contiguous -> [T, H, D]; sink_logits [H] float32, contiguous."""
        assert isinstance(plan, NativeAttentionPlan)
        _, num_heads, head_dim = query.shape
        assert sink_logits is None or sink_logits.dtype == torch.float32
        max_distance = 0
        if position_bias is not None:
            assert position_bias.dtype == torch.float32
            assert position_bias.is_contiguous()
            max_distance = position_bias.shape[1] // 2
        output = self._output(query.shape, query.dtype)
        keys, values = storage.tensors
        self._attend(
            *(self._pool.address, plan.address),
            *(_KV_DTYPES[keys.dtype], keys.data_ptr(), values.data_ptr()),
            None if sink_logits is None else sink_logits.data_ptr(),
            *(None if position_bias is None else position_bias.data_ptr(), max_distance),
            *(DTYPES[query.dtype], query.data_ptr(), query.stride(0)),
            *(output.data_ptr(), num_heads * head_dim),
        )
        return output
