"""The KV storage of a GPU, and how a step's keys and values get there.

Keys and values are [num_blocks, block_size, K, D] (NHD). As int8 they are [num_blocks, bytes of a
block]: the numbers [block_size, K, D], then their float32 scales [block_size, K].
Blocks are copied between tensors, and to and from pinned memory, by one launch for all of them.
"""

import dataclasses

import torch
import triton

from loraplex.core.errors import ConfigError
from loraplex.kernels.cuda.programs import kv_storage
from loraplex.kernels.cuda.programs.kv_storage import write_kv
from loraplex.kernels.ops import SCALE_BYTES, AttentionShape, Storage

_WRITTEN_AT_ONCE = 4096
"""Numbers of one program, of keys or values."""


@dataclasses.dataclass(frozen=True, slots=True)
class StoredVectors:
    """A Storage as the programs read it."""

    key: torch.Tensor
    value: torch.Tensor
    key_scales: torch.Tensor | None
    """The storage of int8 keys, as float32; None for others."""
    value_scales: torch.Tensor | None
    block_stride: int
    """Elements from one block to the next."""


def stored_vectors(storage: Storage) -> StoredVectors:
    key, value = storage.tensors
    is_scaled = key.dtype == torch.int8
    return StoredVectors(
        key,
        value,
        key.view(torch.float32) if is_scaled else None,
        value.view(torch.float32) if is_scaled else None,
        key.stride(0),
    )


def allocate(
    num_blocks: int, shape: AttentionShape, dtype: torch.dtype, device: torch.device
) -> Storage:
    """Storage of one layer, zero. Raises ConfigError if int8 scales would not be aligned."""
    num_vectors = shape.block_size * shape.num_kv_heads
    sizes: tuple[int, ...] = (shape.block_size, shape.num_kv_heads, shape.head_dim)
    if dtype == torch.int8:
        if num_vectors * shape.head_dim % SCALE_BYTES:
            raise ConfigError(
                f"an int8 KV cache needs blocks of a multiple of {SCALE_BYTES} bytes, not "
                f"{num_vectors} vectors of {shape.head_dim}: take a block size that is one"
            )
        sizes = (num_vectors * (shape.head_dim + SCALE_BYTES),)
    key = torch.zeros((num_blocks, *sizes), dtype=dtype, device=device)
    return Storage((key, torch.zeros_like(key)))


def write(
    storage: Storage, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """key, value [T, K, D], heads contiguous; slot_mapping [T], where -1 is written nowhere."""
    num_tokens, num_heads, head_dim = key.shape
    if num_tokens == 0:
        return
    assert key.stride()[1:] == value.stride()[1:] == (head_dim, 1), "heads lie side by side"
    stored = stored_vectors(storage)
    vector_size = head_dim + (SCALE_BYTES if stored.key_scales is not None else 0)
    block_d = triton.next_power_of_2(head_dim)
    heads = min(triton.next_power_of_2(num_heads), max(1, _WRITTEN_AT_ONCE // block_d))
    write_kv[(num_tokens, triton.cdiv(num_heads, heads))](
        stored.key,
        stored.value,
        stored.key_scales,
        stored.value_scales,
        key,
        value,
        slot_mapping,
        key.stride(0),
        value.stride(0),
        K=num_heads,
        D=head_dim,
        BLOCK_SIZE=stored.block_stride // (num_heads * vector_size),
        BLOCK_STRIDE=stored.block_stride,
        HEADS=heads,
        BLOCK_D=block_d,
        num_warps=4,
    )


WORD_BYTES = 4
_WIDEST_BYTES = 16
_WORDS_AT_ONCE = 2048


def copy_blocks(
    rows: torch.Tensor,
    source_columns: torch.Tensor,
    target_columns: torch.Tensor,
    block_bytes: int,
) -> None:
    """rows [2, n], columns [c] int64, on the device: of source and target.

    Block (i, j) of block_bytes is copied from the address rows[0, i] + source_columns[j] to
    rows[1, i] + target_columns[j], of the device or of pinned memory. No source may be a target.
    block_bytes is a multiple of WORD_BYTES; so are all addresses, and of 16 if block_bytes is one.
    """
    num_pairs, num_columns = rows.shape[1], source_columns.shape[0]
    alignment = _WIDEST_BYTES if block_bytes % _WIDEST_BYTES == 0 else WORD_BYTES
    kv_storage.copy_blocks[num_pairs, num_columns](
        rows,
        source_columns,
        target_columns,
        num_pairs,
        WORDS=block_bytes // WORD_BYTES,
        ALIGNMENT=alignment,
        BLOCK=_WORDS_AT_ONCE,
    )
