"""Attention by FlashInfer (>= 0.6), an optional extra: the same storage, other kernels.

It plans on the host: which pages each row has, and how they are shared out. A recorded step has a
wrapper of its own, whose buffers stay where they are; planning writes into them before a replay.
There is one plan per step, so all wrappers share their workspace.
"""

import dataclasses
import importlib
import logging
from typing import Any

import numpy as np
import torch

from loraplex.core.errors import ConfigError
from loraplex.kernels.accelerator import Accelerator, DeviceEvent
from loraplex.kernels.ops import AttentionRules, AttentionShape, DeviceRows, RowLayout, Storage

logger = logging.getLogger(__name__)

_FLOAT_WORKSPACE = 128 << 20
_INT_WORKSPACE = 8 << 20
"""Bytes, both as FlashInfer recommends them."""
_MAX_RECORDED_ROWS = 256
"""A wrapper for each number of rows is kept up to here."""
_HEAD_DIMS = (64, 128, 256)
_DTYPES = (torch.float16, torch.bfloat16)
_MIN_TENSOR_CORE_GROUP = 3
"""Query heads of a KV head; with fewer, products of matrices are mostly padding."""


@dataclasses.dataclass(frozen=True, slots=True)
class FlashInferPlan:
    """Plan of one step. `wrapper` is one of FlashInfer's, planned."""

    wrapper: Any
    dtype: torch.dtype
    num_tokens: int

    def attend(self, query: torch.Tensor, storage: Storage, output: torch.Tensor) -> None:
        num = self.num_tokens
        self.wrapper.run(query[:num], storage.tensors, out=output[:num])


class FlashInferAttention:
    """FlashInfer's attention for one kind of storage."""

    def __init__(
        self, library: Any, accelerator: Accelerator, shape: AttentionShape, dtype: torch.dtype
    ) -> None:
        """Raises whatever FlashInfer does where its kernels cannot be built."""
        self._library = library
        self._accelerator = accelerator
        self._shape, self._dtype = shape, dtype
        self._floats = self._bytes(_FLOAT_WORKSPACE)
        self._ints = self._bytes(_INT_WORKSPACE)
        self._decode: dict[tuple[int, int], Any] = {}
        self._prefill = self._shared(
            library.BatchPrefillWithPagedKVCacheWrapper(self._floats, "NHD")
        )
        self._planned: DeviceEvent | None = None
        self._rules: AttentionRules | None = None
        """Those that it serves: the first that it could plan."""
        with accelerator.compute():
            self._build(AttentionRules(scale=1.0))

    def plan(
        self, rows: RowLayout, on_device: DeviceRows, rules: AttentionRules
    ) -> FlashInferPlan | None:
        """Plan a step; one that only decodes may have rows after those of the layout.

        None for layers that it does not serve: with a window, as it may read freed blocks before
        the window; with ALiBi, whose slopes it makes itself; those that are not causal; and with
        other rules than the layers that it serves, as there is one plan per step.
        """
        if rules.window is not None or rules.alibi_slopes or not rules.is_causal:
            return None
        if self._rules is None:
            if rules.soft_cap is not None:
                self._build_capped(rules)
            self._rules = rules
        return self._plan(rows, on_device, rules) if rules == self._rules else None

    def _plan(
        self, rows: RowLayout, on_device: DeviceRows, rules: AttentionRules
    ) -> FlashInferPlan:
        if self._planned is not None:
            # Its host buffer is written again, so it must have been sent.
            self._planned.wait()
        num_tokens = rows.query_start_loc[-1]
        only_decodes = num_tokens == len(rows.seq_lens)
        num_rows = len(on_device.seq_lens) if only_decodes else len(rows.seq_lens)
        seq_lens = np.zeros(num_rows, dtype=np.int32)
        seq_lens[: len(rows.seq_lens)] = rows.seq_lens
        num_pages = np.maximum(1, -(-seq_lens // self._shape.block_size))
        page_starts = np.concatenate(([0], num_pages.cumsum())).astype(np.int32)
        last_lens = seq_lens - (num_pages - 1) * self._shape.block_size
        pages = (
            torch.from_numpy(page_starts),
            _page_ids(on_device, torch.from_numpy(num_pages), int(page_starts[-1])),
            torch.from_numpy(np.maximum(1, last_lens).astype(np.int32)),
        )
        if only_decodes:
            wrapper = self._decode_wrapper(num_rows, on_device.block_tables.shape[1])
            wrapper.plan(*pages, *self._sizes, **self._options(rules))
        else:
            wrapper = self._prefill
            starts = torch.tensor(rows.query_start_loc, dtype=torch.int32)
            wrapper.plan(starts, *pages, *self._sizes, causal=True, **self._options(rules))
        self._planned = self._accelerator.event()
        return FlashInferPlan(wrapper, self._dtype, num_rows if only_decodes else num_tokens)

    @property
    def _sizes(self) -> tuple[int, int, int, int]:
        shape = self._shape
        return shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.block_size

    def _options(self, rules: AttentionRules) -> dict[str, Any]:
        return {
            "sm_scale": rules.scale,
            "logits_soft_cap": rules.soft_cap,
            "q_data_type": self._dtype,
            "kv_data_type": self._dtype,
        }

    def _decode_wrapper(self, num_rows: int, table_width: int) -> Any:
        key = num_rows, table_width
        wrapper = self._decode.get(key)
        if wrapper is None:
            wrapper = self._made_decode_wrapper(num_rows, table_width)
            if num_rows <= _MAX_RECORDED_ROWS:
                self._decode[key] = wrapper
        return wrapper

    def _made_decode_wrapper(self, num_rows: int, table_width: int) -> Any:
        group = self._shape.num_heads // self._shape.num_kv_heads
        is_fixed = num_rows <= _MAX_RECORDED_ROWS
        buffers: dict[str, torch.Tensor] = {}
        if is_fixed:
            buffers = {
                "paged_kv_indptr_buffer": self._numbers(num_rows + 1),
                "paged_kv_indices_buffer": self._numbers(num_rows * table_width),
                "paged_kv_last_page_len_buffer": self._numbers(num_rows),
            }
        return self._shared(
            self._library.BatchDecodeWithPagedKVCacheWrapper(
                self._floats,
                "NHD",
                use_cuda_graph=is_fixed,
                use_tensor_cores=group >= _MIN_TENSOR_CORE_GROUP,
                **buffers,
            )
        )

    def _shared(self, wrapper: Any) -> Any:
        wrapper.reset_workspace_buffer(self._floats, self._ints)
        return wrapper

    def _bytes(self, size: int) -> torch.Tensor:
        # Zeros, as FlashInfer requires: there are counters in it.
        return torch.zeros(size, dtype=torch.uint8, device=self._accelerator.device)

    def _numbers(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int32, device=self._accelerator.device)

    def _build_capped(self, rules: AttentionRules) -> None:
        try:
            self._build(rules)
        except Exception as error:
            # Of any kind, as in `load_flashinfer`.
            raise refusal(
                f"flashinfer has no soft cap of scores here ({error}): take triton"
            ) from error

    def _build(self, rules: AttentionRules) -> None:
        """Build the kernels now: no step must wait for a compiler, or find that none is here.

        Those that cap scores are other kernels.
        """
        shape, device = self._shape, self._accelerator.device
        sizes = (2, shape.block_size, shape.num_kv_heads, shape.head_dim)
        blocks = torch.zeros(sizes, dtype=self._dtype, device=device)
        tables = torch.zeros((1, 2), dtype=torch.int32, device=device)
        for count in (1, 2):
            rows = RowLayout([0, count], [count], tables)
            numbers = torch.tensor([0, count, count, 0], dtype=torch.int32).to(device)
            on_device = DeviceRows(numbers[:2], numbers[2:3], numbers[3:], tables)
            query = torch.zeros((count, shape.num_heads, shape.head_dim), dtype=self._dtype)
            query = query.to(device)
            plan = self._plan(rows, on_device, rules)
            plan.attend(query, Storage((blocks, blocks)), torch.empty_like(query))
        self._accelerator.synchronize()


def _page_ids(on_device: DeviceRows, num_pages: torch.Tensor, total: int) -> torch.Tensor:
    """[total] int32 on the device: each row's pages, one row after another."""
    tables = on_device.block_tables
    counts = num_pages.to(tables.device, non_blocking=True)
    rows = torch.arange(len(counts), device=tables.device)
    row = torch.repeat_interleave(rows, counts, output_size=total)
    first = (counts.cumsum(0) - counts)[row]
    page = torch.arange(total, device=tables.device) - first
    return tables[on_device.table_rows[: len(counts)][row], page]


def unserved(shape: AttentionShape, dtype: torch.dtype, *, batch_invariant: bool) -> str | None:
    """Why FlashInfer is not for such a model, or None."""
    if batch_invariant:
        return "it is not batch-invariant here"
    if dtype not in _DTYPES:
        return f"its KV cache is of float16 or bfloat16, not {dtype}"
    if shape.head_dim not in _HEAD_DIMS:
        return f"its heads have a size of {', '.join(map(str, _HEAD_DIMS))}, not {shape.head_dim}"
    return None


def load_flashinfer(
    accelerator: Accelerator, shape: AttentionShape, dtype: torch.dtype, *, is_required: bool
) -> FlashInferAttention | None:
    """None if it does not work here. Raises ConfigError instead if it is required."""
    try:
        library = importlib.import_module("flashinfer")
    except ImportError as error:
        if is_required:
            raise refusal(f"flashinfer is not installed ({error})") from error
        return None
    try:
        return FlashInferAttention(library, accelerator, shape, dtype)
    except Exception as error:
        # Of any kind: it compiles CUDA code, loads libraries, and starts kernels.
        if is_required:
            raise refusal(f"flashinfer does not work here: {error}") from error
        logger.warning("flashinfer does not work here, so triton attends: %s", error)
        return None


def refusal(reason: str) -> ConfigError:
    return ConfigError(f"attention_backend=flashinfer: {reason}", param="attention_backend")
