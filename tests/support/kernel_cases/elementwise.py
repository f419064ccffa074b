"""Launches of what lies between the products."""

import functools

import torch

from loraplex.kernels.activations import Activation
from loraplex.kernels.cuda import elementwise
from support.kernel_cases import Cases
from support.kernel_cases.llamas import DTYPES, LLAMA_3_1_8B, Llama, empty

_EPS = 1e-5


def cases() -> Cases:
    return {
        f"8b {kind} {count} tokens": functools.partial(_step, LLAMA_3_1_8B, dtype, count)
        for kind, dtype in DTYPES.items()
        for count in (1, 2048)
    }


def _step(llama: Llama, dtype: torch.dtype, num_tokens: int) -> None:
    hidden, half = llama.hidden, llama.head_dim // 2
    ids = empty(num_tokens, dtype=torch.int64)
    angles = empty(4096, half, dtype=torch.float32)
    cos, sin = (elementwise.take_rows(angles, ids) for _ in range(2))
    x = elementwise.take_rows(empty(llama.vocab, hidden, dtype=dtype), ids)
    weight = empty(hidden, dtype=dtype)
    x, residual = elementwise.add_rms_norm(elementwise.rms_norm(x, weight, _EPS), x, weight, _EPS)
    assert x.shape == residual.shape
    qkv = empty(num_tokens, llama.q_size + 2 * llama.kv_size, dtype=dtype)
    heads = qkv.view(num_tokens, -1, llama.head_dim)
    query, key = heads[:, : llama.num_heads], heads[:, llama.num_heads : -llama.num_kv_heads]
    elementwise.rms_norm(key, empty(llama.head_dim, dtype=dtype), _EPS)
    elementwise.rotary(query, key, cos, sin)
    x, residual = elementwise.add_layer_norm(x, residual, weight, weight, _EPS)
    elementwise.layer_norm(x, weight, weight, _EPS)
    for activation in Activation:
        if activation is not Activation.CLAMPED_SWIGLU:
            elementwise.activate(x, activation)
        elementwise.gate(empty(num_tokens, 2 * llama.inner, dtype=dtype), activation)
    _step_of_other_families(llama, dtype, num_tokens)


def _step_of_other_families(llama: Llama, dtype: torch.dtype, num_tokens: int) -> None:
    """Norms with float32 weights, norms of heads, partial rotation, factors and soft caps."""
    x = empty(num_tokens, llama.hidden, dtype=dtype)
    wide = empty(llama.hidden, dtype=torch.float32)
    elementwise.rms_norm(x, wide, _EPS)
    elementwise.add_rms_norm(x, x, wide, _EPS, 0.5)
    elementwise.layer_norm(x, wide, wide, _EPS)
    heads = empty(num_tokens, llama.num_heads, llama.head_dim, dtype=dtype)
    weights = empty(llama.num_heads, llama.head_dim, dtype=dtype)
    elementwise.layer_norm(heads, weights, weights, _EPS)
    elementwise.add(x, x, 0.5)
    elementwise.scale(x, 0.5)
    elementwise.scale(empty(num_tokens, llama.vocab, dtype=torch.float32), 1.0, 30.0)
    for size in (32, 64, llama.head_dim):
        angles = empty(num_tokens, size // 2, dtype=torch.float32)
        for is_interleaved in (False, True):
            elementwise.rotary(heads, heads[:, :0], angles, angles, is_interleaved=is_interleaved)
