"""The KV storage of a GPU, and how a step's keys and values get there.

Keys and values are [num_blocks, block_size, K, D] (NHD). As int8 they are [num_blocks, bytes of a
block]: the numbers [block_size, K, D], then their float32 scales [block_size, K].
"""

import dataclasses

import torch
import triton

from loraplex.core.errors import ConfigError
from loraplex.kernels.cuda.programs.kv_write import write_kv
from loraplex.kernels.kv_vectors import SCALE_BYTES
from loraplex.kernels.ops import AttentionShape, Storage

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
