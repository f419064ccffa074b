"""Launches of attention, and of writing keys and values."""

import functools

import torch

from loraplex.kernels.cuda.attention import AttentionKernel
from loraplex.kernels.ops import RowLayout
from support.kernel_cases import Cases
from support.kernel_cases.llamas import (
    DTYPES,
    GPU,
    LLAMA_3_1_8B,
    LLAMAS,
    Llama,
    decode_rows,
    empty,
    mixed_rows,
)

_NUM_BLOCKS = 64


def cases() -> Cases:
    made: Cases = {}
    for name, llama in LLAMAS.items():
        for kind in ("bf16", "fp32") if llama is LLAMA_3_1_8B else ("bf16",):
            made |= _steps(f"{name} {kind}", llama, DTYPES[kind], DTYPES[kind])
    made |= _steps("8b fp16, int8 kv", LLAMA_3_1_8B, torch.float16, torch.int8)
    made |= _steps("8b bf16, int8 kv", LLAMA_3_1_8B, torch.bfloat16, torch.int8)
    windowed = functools.partial(_step, LLAMA_3_1_8B, torch.bfloat16, torch.bfloat16, window=512)
    made["8b bf16 window prefill"] = lambda: windowed(mixed_rows([300, 1]))
    made["8b bf16 window decode"] = lambda: windowed(decode_rows(32))
    fixed = functools.partial(_step, LLAMA_3_1_8B, torch.bfloat16, torch.bfloat16, invariant=True)
    made["8b bf16 invariant"] = lambda: fixed(mixed_rows([300, 1]))
    return made


def _steps(name: str, llama: Llama, dtype: torch.dtype, stored: torch.dtype) -> Cases:
    step = functools.partial(_step, llama, dtype, stored)
    return {
        f"{name} decode 1": lambda: step(decode_rows(1)),
        f"{name} decode 64": lambda: step(decode_rows(64)),
        f"{name} mixed": lambda: step(mixed_rows([1, 1, 300, 1])),
    }


def _step(
    llama: Llama,
    dtype: torch.dtype,
    stored: torch.dtype,
    rows: RowLayout,
    *,
    window: int | None = None,
    invariant: bool = False,
) -> None:
    kernel = AttentionKernel(GPU, batch_invariant=invariant)
    num_tokens = rows.query_start_loc[-1]
    size = llama.q_size + 2 * llama.kv_size
    qkv = empty(num_tokens, size, dtype=dtype).view(num_tokens, -1, llama.head_dim)
    query, rest = qkv[:, : llama.num_heads], qkv[:, llama.num_heads :]
    key, value = rest[:, : llama.num_kv_heads], rest[:, llama.num_kv_heads :]
    storage = kernel.allocate(_NUM_BLOCKS, llama.attention, stored)
    kernel.write(storage, key, value, empty(num_tokens, dtype=torch.int64))
    sinks = 0 if window is None else 4
    kernel.attend(query, storage, kernel.plan(rows, llama.attention, window, sinks))
