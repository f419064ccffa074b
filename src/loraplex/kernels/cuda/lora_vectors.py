"""Launches of the programs for adapters' output vectors, such as DoRA's factors.

In a step of one wave and few tokens the second program of LoRA applies them (cuda.lora). Other
steps have a launch of their own, ahead of LoRA's: each adapter's share is of the base's outputs.
"""

import torch
import triton

from loraplex.kernels.cuda.lora_work import LoraWork
from loraplex.kernels.cuda.programs.lora_vectors import Users, add_vectors, spread_users

_BLOCK = 512
"""Maximum outputs of a program."""


def add_table_vectors(y: torch.Tensor, work: LoraWork) -> None:
    """Apply to y [T, any] what the table has besides LoRA of the modules of a linear layer."""
    linear = work.linear
    block = min(_BLOCK, triton.next_power_of_2(max(linear.out_features)))
    num_tokens, num_tiles = len(y), work.num_tiles(block)
    users = users_of(work, num_tokens)
    add_vectors[(num_tokens * num_tiles,)](
        *(y, work.pool, work.table.vectors, users, y.stride(0)),
        *(work.cells_of_entry, linear.first_cell, len(users.entries), num_tokens),
        COLUMNS=linear.columns,
        OUT_FEATURES=linear.out_features,
        OUT_OFFSETS=linear.out_offsets,
        NUM_TILES=num_tiles,
        UNIT=work.unit,
        BLOCK_N=block,
        num_warps=2,  # 16 bytes for each thread
    )


def users_of(work: LoraWork, num_tokens: int) -> Users:
    """Return the adapter of each token in each wave, [waves, num_tokens]."""
    segments = work.segments
    num_waves, num_pieces = segments.entries.shape
    shape, device = (num_waves, num_tokens), work.pool.device
    users = Users(
        torch.full(shape, -1, dtype=torch.int32, device=device),
        torch.empty(shape, dtype=torch.float32, device=device),
    )
    spread_users[(num_waves * num_pieces,)](
        *(users, work.pieces, num_tokens, num_pieces),
        BLOCK_T=triton.next_power_of_2(segments.longest),
    )
    return users
