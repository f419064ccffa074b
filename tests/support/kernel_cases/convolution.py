"""Launches of convolutions: of LFM2's layers, and in front of Qwen3.5's recurrences."""

import functools

import torch

from loraplex.kernels.activations import Activation
from loraplex.kernels.cuda import convolution, elementwise
from loraplex.kernels.ops import Storage
from loraplex.kernels.states import StoredRows
from support.kernel_cases import Cases
from support.kernel_cases.llamas import BLOCK_SIZE, DTYPES, empty


def cases() -> Cases:
    return {
        f"8b {kind} {count} tokens": functools.partial(_step, dtype, count)
        for kind, dtype in DTYPES.items()
        for count in (1, 2048)
    }


def _step(dtype: torch.dtype, num_tokens: int) -> None:
    rows = StoredRows(
        empty(33, dtype=torch.int64),
        empty(num_tokens, dtype=torch.int64),
        empty(num_tokens, dtype=torch.int64),
        empty(32, dtype=torch.int64),
        empty(32 * 64, dtype=torch.int32),
    )
    x = empty(num_tokens, 3 * 2048, dtype=dtype)
    given = elementwise.multiply(x[:, :2048], x[:, 2048:4096])
    convolution.causal_conv(given, _taps(2048, 3), None, None, rows, _storage(2048))
    qkv, bias = empty(num_tokens, 8192, dtype=dtype), empty(8192, dtype=torch.float32)
    for own in (None, bias):
        convolution.causal_conv(qkv, _taps(8192, 4), own, Activation.SILU, rows, _storage(8192))


def _taps(num_channels: int, num_taps: int) -> torch.Tensor:
    return empty(num_taps, num_channels, dtype=torch.float32).t()


def _storage(num_channels: int) -> Storage:
    return Storage((empty(64, BLOCK_SIZE, num_channels, dtype=torch.float32),))
