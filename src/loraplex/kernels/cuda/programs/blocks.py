"""Copies blocks of memory by their addresses: many small ones by one launch."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_pairs"])
def copy_blocks(
    rows,
    source_columns,
    target_columns,
    num_pairs,
    WORDS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """rows [2, num_pairs], columns [num_columns] int64: a block lies at the sum of both, in bytes.

    One program per pair and column. WORDS: int32 of a block. ALIGNMENT: bytes that divide them all.
    """
    pair, column = tl.program_id(0), tl.program_id(1)
    source = tl.load(rows + pair) + tl.load(source_columns + column)
    target = tl.load(rows + num_pairs + pair) + tl.load(target_columns + column)
    sources = source.to(tl.pointer_type(tl.int32))
    targets = target.to(tl.pointer_type(tl.int32))
    for first in range(0, WORDS, BLOCK):
        words = first + tl.arange(0, BLOCK)
        read = tl.multiple_of(sources + words, ALIGNMENT)
        written = tl.multiple_of(targets + words, ALIGNMENT)
        tl.store(written, tl.load(read, mask=words < WORDS), mask=words < WORDS)
