"""Argmax, bitmasks, draws and log probabilities on a GPU. Nothing waits for the device.

What a row gets does not depend on the other rows: sums are integers, or are of splits of the
vocabulary that are the same for any number of rows.
"""

import torch
import triton

from loraplex.kernels.cuda.drawing import draw_tokens
from loraplex.kernels.cuda.logit_rows import BLOCK, MAX_SPLITS, Splits, device_rows
from loraplex.kernels.cuda.logprobs import top_logprobs
from loraplex.kernels.cuda.programs import logits as programs
from loraplex.kernels.sampling import IntArray

__all__ = ["apply_bitmask", "argmax", "draw_tokens", "top_logprobs"]


def argmax(logits: torch.Tensor, rows: IntArray) -> tuple[torch.Tensor, torch.Tensor]:
    """(token ids [n] int64, maxima [n] float32) of logits [any, vocab]; as Kernels.argmax."""
    device, num_rows = logits.device, len(rows)
    splits = Splits(logits.shape[1])
    indices = device_rows(rows, device)
    keys = torch.empty((num_rows, splits.number), dtype=torch.int32, device=device)
    split_ids = torch.empty_like(keys)
    programs.argmax_of_splits[num_rows, splits.number](
        *(keys, split_ids, logits, indices, logits.stride(0)),
        VOCAB=splits.vocab_size,
        SPLIT=splits.size,
        BLOCK=BLOCK,
    )
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=device)
    maxima = torch.empty(num_rows, dtype=torch.float32, device=device)
    programs.argmax_of_rows[(num_rows,)](
        *(maxima, token_ids, keys, split_ids),
        NUM_SPLITS=splits.number,
        BLOCK=MAX_SPLITS,
        num_warps=1,
    )
    return token_ids, maxima


def apply_bitmask(logits: torch.Tensor, rows: IntArray, bitmask: torch.Tensor) -> None:
    """logits [any, vocab] float32, in place; bitmask [n, words] int32; as Kernels.apply_bitmask."""
    num_rows, vocab_size = len(rows), logits.shape[1]
    programs.apply_bitmask[num_rows, triton.cdiv(vocab_size, BLOCK)](
        *(logits, device_rows(rows, logits.device), bitmask),
        *(logits.stride(0), bitmask.stride(0)),
        VOCAB=vocab_size,
        BLOCK=BLOCK,
    )
