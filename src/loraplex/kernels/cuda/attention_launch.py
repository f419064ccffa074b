"""Launches the attention programs; attention_plan.py makes their inputs."""

import dataclasses
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from loraplex.kernels.accelerator import keeps_products_in_registers
from loraplex.kernels.cuda.attention_plan import CudaAttentionPlan, num_shares
from loraplex.kernels.cuda.attention_storage import StoredVectors
from loraplex.kernels.cuda.programs.attention_decode import (
    decode_grouped,
    decode_single,
    merge_shares,
)
from loraplex.kernels.cuda.programs.attention_invariant import attend_chunks, fold_chunks
from loraplex.kernels.cuda.programs.attention_prefill import prefill
from loraplex.kernels.cuda.programs.attention_tile import (
    AttentionConstants,
    HeadTerms,
    Partials,
    Rows,
    Stored,
)
from loraplex.kernels.ops import AttentionShape

_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}

_DEFAULT_PROCESSORS = 132
"""Where code is made for a card that is not there."""
_INTERPRETED_PROCESSORS = 2

_MAX_SHARES = 64
_MIN_SHARE = 128
"""Keys."""
_MERGED_AT_ONCE = 16
"""Shares."""

_MIN_CHUNK = 256
"""Keys; batch-invariant."""
_MAX_CHUNKS = 32
_UNBOUNDED = 1 << 30

_PREFILL_ROWS = 128
_INVARIANT_SUMS = 8192
"""Numbers, twice."""


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionLaunch:
    """One layer's call."""

    query: torch.Tensor  # [T, H, D], heads contiguous
    stored: StoredVectors
    plan: CudaAttentionPlan
    output: torch.Tensor  # [T, H, D]
    sink_logits: torch.Tensor | None = None  # [H] float32
    position_bias: torch.Tensor | None = None  # [H, 2 C + 1] float32, contiguous

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.plan.shape.num_heads // self.plan.shape.num_kv_heads

    @property
    def compute_dtype(self) -> torch.dtype:
        """Data type of products."""
        query, key = self.query.dtype, self.stored.key.dtype
        return query if key in (query, torch.int8) else torch.float32

    @property
    def storage(self) -> Stored:
        stored = self.stored
        return Stored(stored.key, stored.value, stored.key_scales, stored.value_scales)

    @property
    def rows(self) -> Rows:
        rows = self.plan.rows
        return Rows(rows.seq_lens, rows.table_rows, rows.block_tables)

    @property
    def terms(self) -> HeadTerms:
        return HeadTerms(self.plan.slopes, self.sink_logits, self.position_bias)

    @property
    def strides(self) -> tuple[int, int]:
        return self.query.stride(0), self.plan.rows.block_tables.stride(0)

    @property
    def constants(self) -> AttentionConstants:
        """The constants that a program is compiled for."""
        shape, rules = self.plan.shape, self.plan.rules
        has_window = rules.window is not None
        constants = (
            shape.num_kv_heads,
            self.group,
            shape.head_dim,
            block_d(shape.head_dim),
            shape.block_size,
            self.stored.block_stride,
            rules.scale,
            0.0 if rules.soft_cap is None else rules.soft_cap,
            bool(rules.alibi_slopes),
            0 if self.position_bias is None else self.position_bias.shape[1] // 2,
            rules.window if has_window else 0,
            rules.num_sink_tokens if has_window else 0,
            rules.is_causal,
        )
        return AttentionConstants(*map(tl.constexpr, constants))

    def partials(self, num_tokens: int, shares: int) -> Partials:
        """Uninitialised sums of every share."""
        _, num_heads, head_dim = self.query.shape
        places = (num_tokens, num_heads, shares)
        device = self.query.device
        values = torch.empty((*places, head_dim), dtype=torch.float32, device=device)
        return Partials(values, torch.empty((*places, 2), dtype=torch.float32, device=device))


def block_d(head_dim: int) -> int:
    """What products take: a power of two, at least 16."""
    return max(16, int(triton.next_power_of_2(head_dim)))


class AttentionTile(NamedTuple):
    """How a program is made: so that its values fit the registers of sm_80 and sm_90."""

    rows: int
    """Rows of its products: heads of a group times queries."""
    keys: int
    num_warps: int


def _num_keys(launch: AttentionLaunch) -> int:
    """Keys per tile: those that fit 16 KiB; fewer if they must be converted first.

    Of narrow types at least 32, as a product of matrices sums over 16 at a time.
    """
    num_numbers = block_d(launch.plan.shape.head_dim) * launch.compute_dtype.itemsize
    least = 16 if launch.compute_dtype == torch.float32 else 32
    keys = min(128, max(least, (16 << 10) // num_numbers))
    return keys if launch.stored.key.dtype == launch.compute_dtype else max(16, keys // 2)


def _at_least_group(rows: int, launch: AttentionLaunch) -> int:
    return max(rows, int(triton.next_power_of_2(launch.group)))


def decode_tile(launch: AttentionLaunch) -> AttentionTile:
    rows, keys = _at_least_group(16, launch), _num_keys(launch)
    if launch.compute_dtype == torch.float32:
        return AttentionTile(rows, max(16, keys // 2), 8)
    return AttentionTile(rows, keys, 4 if launch.plan.shape.head_dim <= 256 else 8)


def single_tile(launch: AttentionLaunch) -> AttentionTile:
    """Tile of a decoding program for one query head per KV head."""
    head_dim = launch.plan.shape.head_dim
    return AttentionTile(1, max(16, (4 << 10) // block_d(head_dim)), 4 if head_dim <= 256 else 8)


def prefill_tile(launch: AttentionLaunch) -> AttentionTile:
    """Its sums, rows times numbers of a head, lie in registers: fewer rows of larger heads.

    Two programs of heads of 256 would not fit a processor: one has as many rows as it can.
    """
    head_dim, keys = launch.plan.shape.head_dim, _num_keys(launch)
    if launch.position_bias is not None:
        # Each score has a load of its own, whose address and value take registers.
        keys = min(keys, 32)
    if launch.compute_dtype == torch.float32:
        rows, num_warps = (32, 16) if head_dim <= 128 else (16, 8)
        return AttentionTile(_at_least_group(rows, launch), keys, num_warps)
    rows = 64 if head_dim <= 256 else 32
    if head_dim <= 256 and not keeps_products_in_registers(launch.query.device):
        rows = 128
    return AttentionTile(_at_least_group(rows, launch), keys, 8)


def invariant_tile(launch: AttentionLaunch) -> AttentionTile:
    rows = _at_least_group(_invariant_rows(launch.plan.shape), launch)
    if launch.compute_dtype == torch.float32:
        return AttentionTile(rows, min(64, _num_keys(launch)), 16)
    head_dim = launch.plan.shape.head_dim
    if head_dim > 256:
        return AttentionTile(rows, 16, 4)
    # The masks of such heads take registers, too.
    is_narrow = head_dim < block_d(head_dim) and keeps_products_in_registers(launch.query.device)
    return AttentionTile(rows, min(32 if is_narrow else 64, _num_keys(launch)), 8)


def _invariant_rows(shape: AttentionShape) -> int:
    """Rows of a batch-invariant program. It has two sums of each, of a chunk and of all."""
    return max(16, min(64, _INVARIANT_SUMS // block_d(shape.head_dim)))


def tile_queries(shape: AttentionShape, *, batch_invariant: bool) -> int:
    """Queries of the tiles that a plan cuts. A prefill program may do a part of one."""
    rows = _invariant_rows(shape) if batch_invariant else _PREFILL_ROWS
    return max(1, rows // (shape.num_heads // shape.num_kv_heads))


def num_program_slots(device: torch.device, per_processor: int) -> int:
    """Programs of decoding that run at once: some fit a processor's shared memory."""
    processors = _DEFAULT_PROCESSORS
    if device.type == "cpu":
        processors = _INTERPRETED_PROCESSORS
    elif torch.cuda.is_available():
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    return processors * per_processor


def decode(launch: AttentionLaunch, row_list: torch.Tensor | None, slots: int) -> None:
    """Attend rows with one token each: those of the list, or one per token."""
    plan, shape = launch.plan, launch.plan.shape
    num_rows = len(launch.query) if row_list is None else len(row_list)
    shares = num_shares(
        num_rows * shape.num_kv_heads, slots, min(_MAX_SHARES, plan.max_seq_len // _MIN_SHARE)
    )
    partials = launch.partials(num_rows, shares) if shares > 1 else None
    arguments = (
        *(launch.output, partials, launch.query, launch.storage, launch.rows, row_list),
        *(launch.terms, *launch.strides, shares, launch.constants),
    )
    grid = (num_rows, shape.num_kv_heads, shares)
    tile = _decode_shares(launch, grid, arguments)
    if partials is None:
        return
    merge_shares[(num_rows, shape.num_heads)](
        *(launch.output, partials, plan.rows.seq_lens, row_list, shares, launch.constants),
        BLOCK_N=tile.keys,
        MAX_SHARES=_MAX_SHARES,
        BATCH=_MERGED_AT_ONCE,
        num_warps=4,
    )


def _decode_shares(
    launch: AttentionLaunch, grid: tuple[int, int, int], arguments: tuple[Any, ...]
) -> AttentionTile:
    if launch.group == 1:
        tile = single_tile(launch)
        decode_single[grid](
            *arguments,
            BLOCK_N=tile.keys,
            NUM_STAGES=3,
            num_warps=tile.num_warps,
        )
        return tile
    tile = decode_tile(launch)
    decode_grouped[grid](
        *arguments,
        BLOCK_G=tile.rows,
        BLOCK_N=tile.keys,
        COMPUTE=_TYPES[launch.compute_dtype],
        num_warps=tile.num_warps,
        num_stages=3,
    )
    return tile


def prefill_tiles(launch: AttentionLaunch, tiles: torch.Tensor) -> None:
    """Rows with several tokens."""
    shape, tile = launch.plan.shape, prefill_tile(launch)
    queries = tile_queries(shape, batch_invariant=False)
    parts = triton.cdiv(queries, tile.rows // launch.group)
    prefill[(len(tiles), shape.num_kv_heads, parts)](
        *(launch.output, launch.query, launch.storage, launch.rows, tiles),
        *(launch.terms, *launch.strides, launch.constants),
        BLOCK_M=tile.rows,
        BLOCK_N=tile.keys,
        COMPUTE=_TYPES[launch.compute_dtype],
        num_warps=tile.num_warps,
        num_stages=2,
    )


def chunk_keys(max_seq_len: int) -> int:
    """Keys of a chunk; longer in tables for long rows, so that the chunks' memory is bounded."""
    return max(_MIN_CHUNK, int(triton.next_power_of_2(-(-max_seq_len // _MAX_CHUNKS))))


def invariant_tiles(launch: AttentionLaunch, tiles: torch.Tensor, *, is_decode: bool) -> None:
    """Any rows, with bits that depend on positions alone. is_decode: tiles are of one query."""
    plan, shape, tile = launch.plan, launch.plan.shape, invariant_tile(launch)
    chunk = chunk_keys(plan.max_seq_len)
    shares = triton.cdiv(plan.max_seq_len, chunk) if is_decode else 1
    partials = launch.partials(len(tiles) if shares > 1 else 1, shares)
    attend_chunks[(len(tiles), shape.num_kv_heads, shares)](
        *(launch.output, partials, launch.query, launch.storage, launch.rows, tiles),
        *(launch.terms, *launch.strides, shares, 1 if shares > 1 else _UNBOUNDED, launch.constants),
        CHUNK=chunk,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.keys,
        COMPUTE=_TYPES[launch.compute_dtype],
        num_warps=tile.num_warps,
        num_stages=2,
        enable_fp_fusion=False,
    )
    if shares == 1:
        return
    fold_chunks[(len(tiles), shape.num_heads)](
        *(launch.output, partials, plan.rows.seq_lens, tiles, launch.terms),
        *(shares, launch.constants),
        CHUNK=chunk,
        num_warps=1,
        enable_fp_fusion=False,
    )
