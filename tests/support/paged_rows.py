"""Rows with known keys and values in the blocks of a KV storage, for tests of attention."""

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import torch

from loraplex.kernels.cuda.attention import CudaAttention
from loraplex.kernels.ops import (
    SCALE_BYTES,
    AttentionRules,
    AttentionShape,
    DeviceRows,
    RowLayout,
    to_stored,
)
from support.dense_attention import dense_attention


class PagedRows:
    """Blocks are shuffled; what no row wrote is NaN."""

    def __init__(
        self,
        kernel: CudaAttention,
        shape: AttentionShape,
        seq_lens: Sequence[int],
        *,
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        table_width: int = 0,
    ) -> None:
        """table_width: blocks of the tables, at least; the unneeded entries are any blocks."""
        self.kernel, self.shape, self.dtype, self.device = kernel, shape, dtype, device
        self.seq_lens = list(seq_lens)
        counts = [-(-length // shape.block_size) for length in seq_lens]
        num_blocks = sum(counts) + 3
        self.storage = kernel.allocate(num_blocks, shape, kv_dtype or dtype)
        for tensor in self.storage.tensors:
            # As float32, -1 in all bits is a NaN, too.
            tensor.fill_(-1 if tensor.dtype == torch.int8 else torch.nan)
        order = torch.randperm(num_blocks)
        width = max(table_width, *counts)
        self.block_tables = order[torch.randint(num_blocks, (len(counts), width))]
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        for row, (length, count) in enumerate(zip(seq_lens, counts, strict=True)):
            first = sum(counts[:row])
            self.block_tables[row, :count] = order[first : first + count]
            self._write(row, length)
        self.block_tables = self.block_tables.to(device)

    def queries(self, counts: Sequence[int]) -> list[torch.Tensor]:
        """Return random queries of each row, [count, H, D], on the host."""
        heads, size = self.shape.num_heads, self.shape.head_dim
        return [torch.randn(count, heads, size).to(self.dtype) for count in counts]

    def batch(self, queries: Sequence[torch.Tensor], num_padding: int = 0) -> torch.Tensor:
        """Return [T, H, D] on the device: a slice of a wider tensor, with padding tokens last."""
        sizes = (num_padding, self.shape.num_heads, self.shape.head_dim)
        padding = torch.zeros(sizes, dtype=self.dtype)
        query = torch.cat([*queries, padding])
        num_tokens, num_heads, head_dim = query.shape
        wide = torch.full((num_tokens, 2 * num_heads, head_dim), torch.nan, dtype=self.dtype)
        wide[:, :num_heads] = query
        return wide.to(self.device)[:, :num_heads]

    def layout(self, queries: Sequence[torch.Tensor]) -> RowLayout:
        """The queries are the last of the rows' positions."""
        starts = [0, *itertools.accumulate(map(len, queries))]
        return RowLayout(starts, self.seq_lens, self.block_tables)

    @property
    def rules(self) -> AttentionRules:
        """The rules of plain attention."""
        return AttentionRules(scale=self.shape.head_dim**-0.5)

    def attended(
        self,
        queries: Sequence[torch.Tensor],
        rules: AttentionRules | None = None,
        sink_logits: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[T, H, D] on the host, by the kernel."""
        plan = self.kernel.plan(self.layout(queries), self.shape, rules or self.rules)
        terms = [
            None if each is None else each.to(self.device) for each in (sink_logits, position_bias)
        ]
        return self.kernel.attend(self.batch(queries), self.storage, plan, *terms).cpu()

    def expected(
        self,
        queries: Sequence[torch.Tensor],
        rules: AttentionRules | None = None,
        sink_logits: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[T, H, D] float64 on the host."""
        rules = rules or self.rules
        dense = functools.partial(
            dense_attention,
            window=rules.window,
            sinks=rules.num_sink_tokens,
            scale=rules.scale,
            soft_cap=rules.soft_cap,
            alibi_slopes=rules.alibi_slopes,
            sink_logits=sink_logits,
            position_bias=position_bias,
            is_causal=rules.is_causal,
        )
        vectors = zip(queries, self.keys, self.values, strict=True)
        return torch.cat([dense(*each) for each in vectors])

    def _write(self, row: int, length: int) -> None:
        shape = self.shape
        key, value = torch.randn(2, length, shape.num_kv_heads, shape.head_dim).to(self.dtype)
        positions = torch.arange(length)
        blocks = self.block_tables[row, positions // shape.block_size]
        slots = blocks * shape.block_size + positions % shape.block_size
        store(self.storage.tensors[0], key, slots, shape)
        store(self.storage.tensors[1], value, slots, shape)
        self.keys.append(key)
        self.values.append(value)


def store(
    storage: torch.Tensor, vectors: torch.Tensor, slots: torch.Tensor, shape: AttentionShape
) -> None:
    """Write vectors [n, K, D] at slots [n] like a GPU's `write`, in torch."""
    stored = to_stored(vectors, storage.dtype).to(storage.device)
    blocks, offsets = (slots // shape.block_size).tolist(), (slots % shape.block_size).tolist()
    if storage.dtype != torch.int8:
        storage[blocks, offsets] = stored
        return
    numbers, scales = stored_parts(storage, shape)
    numbers[blocks, offsets] = stored[..., :-SCALE_BYTES]
    scales[blocks, offsets] = stored[..., -SCALE_BYTES:]


def stored_parts(storage: torch.Tensor, shape: AttentionShape) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 storage: numbers [num_blocks, block_size, K, D], bytes of scales [..., 4]."""
    sizes = (len(storage), shape.block_size, shape.num_kv_heads)
    end = shape.block_size * shape.num_kv_heads * shape.head_dim
    numbers = storage[:, :end].view(*sizes, shape.head_dim)
    return numbers, storage[:, end:].view(*sizes, SCALE_BYTES)


def score_terms(kind: str, shape: AttentionShape) -> tuple[AttentionRules, torch.Tensor | None]:
    """Return rules with one kind of terms of scores, or all, and sink logits on the host."""
    slopes = tuple(2.0 ** (-8 * head / shape.num_heads) for head in range(1, shape.num_heads + 1))
    sink_logits = torch.linspace(-1, 2, shape.num_heads)
    plain = AttentionRules(scale=0.3 if shape.head_dim < 64 else 0.1)
    match kind:
        case "cap":
            return dataclasses.replace(plain, soft_cap=1.5), None
        case "slopes":
            return dataclasses.replace(plain, alibi_slopes=slopes), None
        case "sinks":
            return plain, sink_logits
    assert kind == "all, in a window", f"no terms of the kind {kind!r}"
    windowed = dataclasses.replace(plain, window=150, num_sink_tokens=3)
    return dataclasses.replace(windowed, soft_cap=1.5, alibi_slopes=slopes), sink_logits


def padded_rows(layout: RowLayout, num_padding: int) -> DeviceRows:
    """Return a layout as an accelerator reads it, with trailing rows that have no tokens."""

    def numbers(values: Sequence[int], padding: int) -> torch.Tensor:
        return torch.tensor([*values, *[padding] * num_padding], dtype=torch.int32)

    num_rows, tables = len(layout.seq_lens), layout.block_tables.to(torch.int32)
    device = tables.device
    return DeviceRows(
        numbers(layout.query_start_loc, layout.query_start_loc[-1]).to(device),
        numbers(layout.seq_lens, 0).to(device),
        numbers(range(num_rows), num_rows).to(device),
        torch.cat((tables, torch.zeros_like(tables[:1]))),
    )
