"""Rows of a table."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])
def take_rows(
    output,
    table,
    indices,
    num_rows,
    table_stride,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """output [num_rows, SIZE] = table[indices]. Grid: (groups of ROWS rows, parts of a row)."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_row = rows < num_rows
    inside = is_row[:, None] & (columns < SIZE)[None, :]
    starts = tl.load(indices + rows, mask=is_row, other=0) * table_stride
    values = tl.load(table + starts[:, None] + columns[None, :], mask=inside)
    tl.store(output + (rows * SIZE)[:, None] + columns[None, :], values, mask=inside)
