"""Norms, sums, rotation, gates, activations and rows of tables on a GPU, one launch each.

Rows may be views with a longer stride; their last axis is contiguous. Results are rounded where
the reference rounds them. A row's bits do not depend on the other rows: what a program computes is
chosen by the size of a row alone.
"""

import torch
import triton

from loraplex.kernels.activations import Activation
from loraplex.kernels.cuda.programs import elementwise as programs

_TILE = 1024
"""Elements per program: 16 bytes of a narrow type for each of 128 threads."""
_WARPS = 4
_ELEMENTS_PER_WARP = 512
_MAX_WARPS = 16


def take_rows(table: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """table [V, N], indices [T] int64, contiguous -> [T, N]."""
    num_rows, size = indices.shape[0], table.shape[1]
    output = torch.empty((num_rows, size), dtype=table.dtype, device=table.device)
    block = min(triton.next_power_of_2(size), _TILE)
    group = _TILE // block
    programs.take_rows[triton.cdiv(num_rows, group), triton.cdiv(size, block)](
        *(output, table, indices, num_rows, table.stride(0)),
        SIZE=size,
        ROWS=group,
        BLOCK=block,
        num_warps=_WARPS,
    )
    return output


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [T, N] or [T, H, N] -> a contiguous tensor of this shape, x / rms(x) * weight [N].

    weight: of x's dtype, or float32.
    """
    return layer_norm(x, weight, None, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, factor: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(total), total), each [T, N] and contiguous; total = residual + factor * x."""
    return add_layer_norm(x, residual, weight, None, eps, factor)


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """x [T, N] or [T, H, N] -> a contiguous tensor of this shape; without a bias the RMS norm.

    weight, bias: [N] or [H, N], contiguous, each of x's dtype or float32.
    """
    num_heads, head_stride = (1, 0) if x.dim() == 2 else (x.shape[1], x.stride(1))
    num_rows = x.shape[0] * num_heads
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grid, options = _whole_rows(num_rows, x.shape[-1])
    programs.norm[grid](
        *(output, x, weight, bias, num_rows, x.stride(0), head_stride, eps),
        HEADS=num_heads,
        HAS_BIAS=bias is not None,
        IS_PER_HEAD=weight.dim() == 2,
        **options,
    )
    return output


def add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    factor: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(layer_norm(total), total), each [T, N] and contiguous; total = residual + factor * x."""
    num_rows, size = x.shape
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grid, options = _whole_rows(num_rows, size)
    programs.add_norm[grid](
        *(output, total, x, residual, weight, bias),
        *(num_rows, x.stride(0), residual.stride(0), factor, eps),
        HAS_BIAS=bias is not None,
        **options,
    )
    return output, total


def add(x: torch.Tensor, residual: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    """residual + factor * x, [T, N] and contiguous."""
    num_rows, size = x.shape
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grid, options = parts_of_rows(num_rows, size)
    programs.add[grid](
        *(output, x, residual, x.stride(0), residual.stride(0), factor),
        **options,
    )
    return output


def multiply(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """x * factor, [T, N] and contiguous."""
    num_rows, size = x.shape
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grid, options = parts_of_rows(num_rows, size)
    programs.multiply[grid](output, x, factor, x.stride(0), factor.stride(0), **options)
    return output


def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    is_gated_first: bool,
) -> torch.Tensor:
    """Kernels.gated_rms_norm of x [T, groups, N]; contiguous."""
    num_tokens, num_groups, size = x.shape
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grid, options = _whole_rows(num_tokens * num_groups, size)
    programs.gated_norm[grid](
        *(output, x, gate, weight, num_tokens * num_groups),
        *(*x.stride()[:2], *gate.stride()[:2], eps),
        IS_GATED_FIRST=is_gated_first,
        GROUPS=num_groups,
        IS_PER_GROUP=weight.dim() == 2,
        **options,
    )
    return output


def sigmoid_gate(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Kernels.sigmoid_gate of x [T, H, D]; contiguous."""
    num_tokens, num_heads, size = x.shape
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grid, options = _whole_rows(num_tokens * num_heads, size)
    programs.sigmoid_gate[grid](
        *(output, x, gate, num_tokens * num_heads, *x.stride()[:2], *gate.stride()),
        HEADS=num_heads,
        **options,
    )
    return output


def scale(x: torch.Tensor, factor: float, soft_cap: float | None = None) -> None:
    """x [T, N] *= factor, in place, then soft_cap * tanh(x / soft_cap)."""
    num_rows, size = x.shape
    grid, options = parts_of_rows(num_rows, size)
    programs.scale[grid](
        *(x, x.stride(0), factor, 1.0 if soft_cap is None else soft_cap),
        HAS_SOFT_CAP=soft_cap is not None,
        **options,
    )


def rotary(
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    is_interleaved: bool = False,
) -> None:
    """Rotate the first R of each head of query [T, H, D] and key [T, K, D], in place.

    cos, sin [T, R / 2] float32. Either may have no heads.
    """
    num_tokens, num_heads, _ = query.shape
    num_key_heads, half = key.shape[1], cos.shape[1]
    block = triton.next_power_of_2(half)
    most_heads = max(1, num_heads, num_key_heads)
    group = max(1, min(_TILE // block, triton.next_power_of_2(most_heads)))
    num_groups = triton.cdiv(num_heads, group) + triton.cdiv(num_key_heads, group)
    programs.rotary[num_tokens, num_groups](
        *(query, key, cos, sin, query.stride(0), query.stride(1), key.stride(0), key.stride(1)),
        cos.stride(0),
        NUM_QUERY_HEADS=num_heads,
        NUM_KEY_HEADS=num_key_heads,
        HALF=half,
        IS_INTERLEAVED=is_interleaved,
        HEADS=group,
        BLOCK=block,
        num_warps=_WARPS,
    )


def gate(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """[T, 2 N] -> [T, N]: activation(first half) * second half."""
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    output = torch.empty((num_rows, size), dtype=gate_up.dtype, device=gate_up.device)
    grid, options = parts_of_rows(num_rows, size)
    programs.gate[grid](
        *(output, gate_up, gate_up.stride(0)),
        ACTIVATION=activation.value,
        **options,
    )
    return output


def activate(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """[T, N] -> [T, N]"""
    num_rows, size = x.shape
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grid, options = parts_of_rows(num_rows, size)
    programs.activate[grid](
        *(output, x, x.stride(0)),
        ACTIVATION=activation.value,
        **options,
    )
    return output


def _whole_rows(num_rows: int, size: int) -> tuple[tuple[int], dict[str, int]]:
    """Return the grid and options of programs that keep whole rows, some each."""
    block = triton.next_power_of_2(size)
    group = max(1, _TILE // block)
    num_warps = min(max(_WARPS, group * block // _ELEMENTS_PER_WARP), _MAX_WARPS)
    options = {"SIZE": size, "ROWS": group, "BLOCK": block, "num_warps": num_warps}
    return (triton.cdiv(num_rows, group),), options


def parts_of_rows(num_rows: int, size: int) -> tuple[tuple[int, int], dict[str, int]]:
    """Return the grid and options of programs that have a part of a row each."""
    block = min(triton.next_power_of_2(size), _TILE)
    options = {"SIZE": size, "BLOCK": block, "num_warps": _WARPS}
    return (num_rows, triton.cdiv(size, block)), options
