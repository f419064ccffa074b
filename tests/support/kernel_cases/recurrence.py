"""Launches of Qwen3.5's and Nemotron-H's recurrences, and of what is around them."""

import functools

import torch

from loraplex.kernels.cuda import elementwise, recurrence
from loraplex.kernels.delta import DeltaGates, DeltaShape
from loraplex.kernels.ops import Storage
from loraplex.kernels.ssm import SsmGates, SsmShape
from loraplex.kernels.states import StatePlan
from support.kernel_cases import Cases
from support.kernel_cases.llamas import BLOCK_SIZE, DTYPES, empty

_EVERY = 64
_EPS = 1e-6


def cases() -> Cases:
    return {
        f"8b {kind} {count} tokens": functools.partial(_step, dtype, count)
        for kind, dtype in DTYPES.items()
        for count in (1, 2048)
    }


def _step(dtype: torch.dtype, num_tokens: int) -> None:
    plan = StatePlan(
        empty(33, dtype=torch.int64),
        empty(num_tokens, dtype=torch.int64),
        empty(32, dtype=torch.int64),
        empty(num_tokens, dtype=torch.int64),
        empty(num_tokens, dtype=torch.int64),
        empty(32, dtype=torch.int64),
        empty(32 * 64, dtype=torch.int32),
    )
    _delta(dtype, num_tokens, plan)
    for size, num_groups in ((64, 8), (64, 1)):
        _state_space(dtype, num_tokens, plan, SsmShape(128, size, 128, num_groups, _EVERY))


def _delta(dtype: torch.dtype, num_tokens: int, plan: StatePlan) -> None:
    shape = DeltaShape(16, 32, 128, 128, _EVERY)
    chunk, states = _storages(shape.part_sizes[0], shape.part_sizes[2], 32, (128, 128))
    gates = empty(num_tokens, 64, dtype=dtype)
    read = recurrence.delta_rule(
        empty(num_tokens, sum(shape.part_sizes), dtype=dtype),
        gates[:, :32],
        gates[:, 32:],
        DeltaGates(_numbers(32), _numbers(32)),
        shape,
        plan,
        chunk,
        states,
    )
    heads = read.view(num_tokens, 32, 128)
    z = empty(num_tokens, 12288, dtype=dtype)[:, 8192:].view(heads.shape)
    elementwise.gated_rms_norm(heads, z, empty(128, dtype=dtype), _EPS, is_gated_first=False)
    attended = empty(num_tokens, 16, 256, dtype=dtype)
    query = empty(num_tokens, 16, 512, dtype=dtype)
    elementwise.sigmoid_gate(attended, query[:, :, 256:])


def _state_space(dtype: torch.dtype, num_tokens: int, plan: StatePlan, shape: SsmShape) -> None:
    num_values, num_keys, _ = shape.part_sizes
    chunk, states = _storages(num_keys, num_values, shape.num_heads, (128, shape.head_size))
    rate, dt_bias, skip = (_numbers(shape.num_heads) for _ in range(3))
    gates = SsmGates(rate, dt_bias, skip, 0.001, float("inf"))
    projected = empty(num_tokens, 2 * num_values + 2 * num_keys + shape.num_heads, dtype=dtype)
    y = recurrence.ssd(
        empty(num_tokens, num_values + 2 * num_keys, dtype=dtype),
        projected[:, -128:],
        gates,
        shape,
        plan,
        chunk,
        states,
    )
    groups = (num_tokens, shape.num_groups, -1)
    weight = empty(num_values, dtype=dtype).view(shape.num_groups, -1)
    gate = projected[:, :num_values].view(groups)
    elementwise.gated_rms_norm(y.view(groups), gate, weight, _EPS, is_gated_first=True)


def _storages(
    num_keys: int, num_values: int, num_heads: int, head: tuple[int, int]
) -> tuple[Storage, Storage]:
    sizes = (1, num_keys, num_values, num_heads)
    chunk = (empty(64, BLOCK_SIZE, size, dtype=torch.float32) for size in sizes)
    return Storage(tuple(chunk)), Storage((empty(64, num_heads, *head, dtype=torch.float32),))


def _numbers(count: int) -> torch.Tensor:
    return empty(count, dtype=torch.float32)
