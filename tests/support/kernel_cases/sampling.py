"""Launches of the sampler."""

import functools

import numpy as np
import torch

from loraplex.kernels.cuda import sampling
from loraplex.kernels.sampling import DrawOptions
from support.kernel_cases import Cases
from support.kernel_cases.llamas import DTYPES, LLAMA_3_1_8B, empty


def cases() -> Cases:
    vocab = LLAMA_3_1_8B.vocab
    made: Cases = {
        f"8b {kind} argmax": functools.partial(_argmax, vocab, dtype)
        for kind, dtype in DTYPES.items()
    }
    made["8b draw"] = functools.partial(_draw, vocab)
    return made


def _argmax(vocab: int, dtype: torch.dtype) -> None:
    logits = empty(32, vocab, dtype=dtype)
    sampling.argmax(logits, np.arange(32))
    sampling.argmax(logits, np.arange(0, 32, 2))


def _draw(vocab: int) -> None:
    logits, rows = empty(32, vocab, dtype=torch.float32), np.arange(32)
    options = DrawOptions(
        np.full(32, 0.7, np.float32),
        np.full(32, 50),
        np.full(32, 0.9),
        np.full(32, 0.05),
        np.full(32, 0.5),
    )
    sampling.apply_bitmask(logits, rows, empty(32, -(-vocab // 32), dtype=torch.int32))
    sampling.draw_tokens(logits, rows, options)
    sampling.top_logprobs(logits, rows, np.zeros(32, np.int64), 5)
