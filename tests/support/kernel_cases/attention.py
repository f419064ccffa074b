"""Launches of attention, and of writing keys and values."""

import dataclasses
import functools

import torch

from loraplex.kernels.cuda.attention import CudaAttention
from loraplex.kernels.ops import AttentionRules, RowLayout
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
_WINDOW = AttentionRules(scale=0.1, window=512, num_sink_tokens=4)
_BF16 = (torch.bfloat16, torch.bfloat16)
_CAPPED = AttentionRules(scale=0.1, soft_cap=50.0)
_FLAN_T5 = Llama(768, 2048, 12, 12, 32128, head_dim=64)
_PLAIN_HEAD_DIMS = (64, 96)
_HEAD_DIMS = (80, 256, 512)
"""Heads that need a mask, and heads that have tiles of their own."""


def cases() -> Cases:
    made: Cases = {}
    for name, llama in LLAMAS.items():
        for kind in ("bf16", "fp32") if llama is LLAMA_3_1_8B else ("bf16",):
            made |= _steps(f"{name} {kind}", llama, DTYPES[kind], DTYPES[kind])
        made |= _steps(f"{name} bf16 with all terms", llama, *_BF16, _all_terms(llama))
    made |= _steps("8b bf16 capped", LLAMA_3_1_8B, *_BF16, _CAPPED)
    made |= _steps("8b bf16 window", LLAMA_3_1_8B, *_BF16, _WINDOW)
    for rules in (AttentionRules(scale=0.1), _WINDOW):
        both = dataclasses.replace(rules, is_causal=False)
        name = f"8b bf16 both directions, window {rules.window}"
        made |= _steps(name, LLAMA_3_1_8B, *_BF16, both)
    made |= _int8_steps("8b", LLAMA_3_1_8B)
    grouped = dataclasses.replace(LLAMA_3_1_8B, head_dim=64)
    for name, llama, is_causal in (("8b", grouped, True), ("t5", _FLAN_T5, False)):
        rules = AttentionRules(scale=1.0, is_causal=is_causal)
        name = f"{name} bf16 heads of 64, biases by distance"
        made |= _steps(name, llama, *_BF16, rules, max_distance=128)
    for head_dim in _PLAIN_HEAD_DIMS:
        model = dataclasses.replace(LLAMA_3_1_8B, head_dim=head_dim)
        made |= _steps(f"8b bf16 heads of {head_dim}", model, *_BF16)
    for head_dim in _HEAD_DIMS:
        for name, llama in LLAMAS.items():
            model = dataclasses.replace(llama, head_dim=head_dim)
            made |= _steps(f"{name} bf16 heads of {head_dim}", model, *_BF16)
        model = dataclasses.replace(LLAMA_3_1_8B, head_dim=head_dim)
        made |= _steps(f"8b fp32 heads of {head_dim}", model, torch.float32, torch.float32)
        made |= _int8_steps(f"8b heads of {head_dim}", model)
    return made


def _all_terms(llama: Llama) -> AttentionRules:
    slopes = (0.5,) * llama.num_heads
    return dataclasses.replace(_WINDOW, soft_cap=50.0, alibi_slopes=slopes)


def _int8_steps(name: str, llama: Llama) -> Cases:
    made: Cases = {}
    for dtype in ("fp16", "bf16"):
        made |= _steps(f"{name} {dtype}, int8 kv", llama, DTYPES[dtype], torch.int8)
    return made


def _steps(
    name: str,
    llama: Llama,
    dtype: torch.dtype,
    stored: torch.dtype,
    rules: AttentionRules | None = None,
    *,
    max_distance: int = 0,
) -> Cases:
    """max_distance: with a bias of its own; 0: scores have none by distance."""
    rules = rules or AttentionRules(scale=llama.head_dim**-0.5)
    step = functools.partial(_step, llama, dtype, stored, rules, max_distance=max_distance)
    return {
        f"{name} decode 1": lambda: step(decode_rows(1)),
        f"{name} decode 64": lambda: step(decode_rows(64)),
        f"{name} mixed": lambda: step(mixed_rows([1, 1, 300, 1])),
        f"{name} invariant": lambda: step(mixed_rows([300, 1]), invariant=True),
    }


def _step(
    llama: Llama,
    dtype: torch.dtype,
    stored: torch.dtype,
    rules: AttentionRules,
    rows: RowLayout,
    *,
    max_distance: int,
    invariant: bool = False,
) -> None:
    kernel = CudaAttention(GPU, batch_invariant=invariant)
    num_tokens = rows.query_start_loc[-1]
    size = llama.q_size + 2 * llama.kv_size
    qkv = empty(num_tokens, size, dtype=dtype).view(num_tokens, -1, llama.head_dim)
    query, rest = qkv[:, : llama.num_heads], qkv[:, llama.num_heads :]
    key, value = rest[:, : llama.num_kv_heads], rest[:, llama.num_kv_heads :]
    storage = kernel.allocate(_NUM_BLOCKS, llama.attention, stored)
    kernel.write(storage, key, value, empty(num_tokens, dtype=torch.int64))
    sink_logits = None
    if rules.window is not None:
        sink_logits = empty(llama.num_heads, dtype=torch.float32)
    position_bias = None
    if max_distance:
        position_bias = empty(llama.num_heads, 2 * max_distance + 1, dtype=torch.float32)
    plan = kernel.plan(rows, llama.attention, rules)
    kernel.attend(query, storage, plan, sink_logits, position_bias)
