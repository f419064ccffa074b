"""Recurrences with states on a GPU: one launch for all rows, heads and parts of their values.

What a program computes of a position is the same in every step: the launch depends on the layer's
sizes alone, and on no number of rows or tokens.
"""

import torch
import triton

from loraplex.kernels.cuda.programs import recurrence as programs
from loraplex.kernels.delta import LENGTH_FLOOR, DeltaGates, DeltaShape
from loraplex.kernels.ops import Storage
from loraplex.kernels.ssm import SsmGates, SsmShape
from loraplex.kernels.states import StatePlan

_VALUES = 32
"""Columns of values of a program: with 128 keys, what it keeps fits into its registers."""
_WARPS = 8


def delta_rule(
    qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    gates: DeltaGates,
    shape: DeltaShape,
    plan: StatePlan,
    chunk: Storage,
    states: Storage,
) -> torch.Tensor:
    """Same as Kernels.delta_rule."""
    num_keys, _, num_values = shape.part_sizes
    # Zeros, as padding has no row.
    output = torch.zeros((len(qkv), num_values), dtype=qkv.dtype, device=qkv.device)
    grid, options = _parts(plan, shape.num_value_heads, shape.key_size, shape.value_size)
    programs.recurrence[grid](
        *(output, qkv, a, b, gates.a_log, gates.dt_bias, None),
        *(*plan, *chunk.tensors[1:], states.tensors[0]),
        *(qkv.stride(0), a.stride(0), b.stride(0), None, None, shape.key_size**-0.5),
        LENGTH_FLOOR=LENGTH_FLOOR,
        QUERY=0,
        KEY=num_keys,
        VALUE=2 * num_keys,
        KEY_HEADS=shape.num_key_heads,
        EVERY=shape.every,
        TAIL=triton.next_power_of_2(shape.every),
        BLOCK_SIZE=chunk.tensors[1].shape[1],
        **options,
    )
    return output


def ssd(
    xbc: torch.Tensor,
    dt: torch.Tensor,
    gates: SsmGates,
    shape: SsmShape,
    plan: StatePlan,
    chunk: Storage,
    states: Storage,
) -> torch.Tensor:
    """Same as Kernels.ssd."""
    num_values, num_keys, _ = shape.part_sizes
    output = torch.zeros((len(xbc), num_values), dtype=xbc.dtype, device=xbc.device)
    grid, options = _parts(plan, shape.num_heads, shape.state_size, shape.head_size)
    programs.recurrence[grid](
        *(output, xbc, dt, None, gates.rate, gates.dt_bias, gates.skip),
        *(*plan, *chunk.tensors[1:], states.tensors[0]),
        *(xbc.stride(0), dt.stride(0), None, gates.smallest_dt, gates.largest_dt, None),
        LENGTH_FLOOR=None,
        QUERY=num_values + num_keys,
        KEY=num_values,
        VALUE=0,
        KEY_HEADS=shape.num_groups,
        EVERY=shape.every,
        TAIL=triton.next_power_of_2(shape.every),
        BLOCK_SIZE=chunk.tensors[1].shape[1],
        **options,
    )
    return output


def _parts(
    plan: StatePlan, num_heads: int, key_size: int, value_size: int
) -> tuple[tuple[int, int], dict[str, int]]:
    """Return the grid of programs, and the sizes of what they have."""
    values = min(_VALUES, triton.next_power_of_2(value_size))
    options = {
        "VALUE_HEADS": num_heads,
        "KEY_SIZE": key_size,
        "VALUE_SIZE": value_size,
        "KEYS": triton.next_power_of_2(key_size),
        "VALUES": values,
        "num_warps": _WARPS,
    }
    return (len(plan.reads), num_heads * triton.cdiv(value_size, values)), options
