"""Copies blocks between tensors, and to and from pinned memory, by one launch for all of them."""

import torch

from loraplex.kernels.cuda.programs import blocks

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
    blocks.copy_blocks[num_pairs, num_columns](
        rows,
        source_columns,
        target_columns,
        num_pairs,
        WORDS=block_bytes // WORD_BYTES,
        ALIGNMENT=alignment,
        BLOCK=_WORDS_AT_ONCE,
    )
