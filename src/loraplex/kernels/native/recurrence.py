"""Native recurrences with states, norms with a gate, and the gate of attention's output."""

import torch

from loraplex.kernels.delta import DeltaGates, DeltaShape
from loraplex.kernels.native.library import (
    DTYPES,
    Int,
    NativeLibrary,
    Pointer,
    Real,
    Size,
    ThreadPool,
    Value,
)
from loraplex.kernels.ops import Storage
from loraplex.kernels.ssm import SsmGates, SsmShape
from loraplex.kernels.states import StatePlan

_ROWS = (Value,) * 7
"""Fields of a StatePlan."""
_STRIDED = (Value, Size, Size)


class NativeRecurrence:
    """Ops of these names in `Kernels`. Results are contiguous."""

    def __init__(self, library: NativeLibrary, pool: ThreadPool) -> None:
        self._pool = pool
        self._output = library.output
        self._delta_rule = library.function(
            "loraplex_delta_rule",
            *(Pointer, *(Size,) * 8, Int, *(Value, Size) * 3, Pointer, Pointer),
            *(*_ROWS, *(Pointer,) * 4, Value),
        )
        self._ssd = library.function(
            "loraplex_ssd",
            *(Pointer, *(Size,) * 8, Int, *(Value, Size) * 2, *(Pointer,) * 3, Real, Real),
            *(*_ROWS, *(Pointer,) * 4, Value),
        )
        self._gated_rms_norm = library.function(
            "loraplex_gated_rms_norm",
            *(Pointer, Size, Size, Size, Int, *_STRIDED, *_STRIDED, Pointer, Size, Real, Int),
            Value,
        )
        self._sigmoid_gate = library.function(
            "loraplex_sigmoid_gate",
            *(Pointer, Size, Size, Size, Int, *_STRIDED, *_STRIDED, Value),
        )

    def delta_rule(
        self,
        qkv: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        gates: DeltaGates,
        shape: DeltaShape,
        plan: StatePlan,
        chunk: Storage,
        states: Storage,
    ) -> torch.Tensor:
        num_tokens = len(qkv)
        _, keys, values, sums = chunk.tensors
        output = self._output((num_tokens, shape.num_value_heads * shape.value_size), qkv.dtype)
        self._delta_rule(
            *(self._pool.address, num_tokens, len(plan.reads), *shape, keys.shape[1]),
            *(DTYPES[qkv.dtype], qkv.data_ptr(), qkv.stride(0)),
            *(b.data_ptr(), b.stride(0), a.data_ptr(), a.stride(0)),
            *(gates.a_log.data_ptr(), gates.dt_bias.data_ptr(), *_addresses(plan)),
            *(keys.data_ptr(), values.data_ptr(), sums.data_ptr()),
            *(states.tensors[0].data_ptr(), output.data_ptr()),
        )
        return output

    def ssd(
        self,
        xbc: torch.Tensor,
        dt: torch.Tensor,
        gates: SsmGates,
        shape: SsmShape,
        plan: StatePlan,
        chunk: Storage,
        states: Storage,
    ) -> torch.Tensor:
        num_tokens = len(xbc)
        _, keys, values, sums = chunk.tensors
        output = self._output((num_tokens, shape.num_heads * shape.head_size), xbc.dtype)
        rate, dt_bias, skip, *limits = gates
        self._ssd(
            *(self._pool.address, num_tokens, len(plan.reads), *shape, keys.shape[1]),
            *(DTYPES[xbc.dtype], xbc.data_ptr(), xbc.stride(0), dt.data_ptr(), dt.stride(0)),
            *(rate.data_ptr(), dt_bias.data_ptr(), skip.data_ptr(), *limits, *_addresses(plan)),
            *(keys.data_ptr(), values.data_ptr(), sums.data_ptr()),
            *(states.tensors[0].data_ptr(), output.data_ptr()),
        )
        return output

    def gated_rms_norm(
        self,
        x: torch.Tensor,
        gate: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        *,
        is_gated_first: bool,
    ) -> torch.Tensor:
        assert weight.dtype == x.dtype
        output = self._output(x.shape, x.dtype)
        self._gated_rms_norm(
            *(self._pool.address, *x.shape, DTYPES[x.dtype], *_strided(x), *_strided(gate)),
            *(weight.data_ptr(), x.shape[-1] if weight.dim() == 2 else 0, eps, is_gated_first),
            output.data_ptr(),
        )
        return output

    def sigmoid_gate(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        output = self._output(x.shape, x.dtype)
        self._sigmoid_gate(
            *(self._pool.address, *x.shape, DTYPES[x.dtype], *_strided(x), *_strided(gate)),
            output.data_ptr(),
        )
        return output


def _addresses(plan: StatePlan) -> tuple[int, ...]:
    """Return the addresses of a plan's tensors, in the order of the C functions."""
    assert all(tensor.is_contiguous() for tensor in plan)
    return tuple(tensor.data_ptr() for tensor in plan)


def _strided(x: torch.Tensor) -> tuple[int, int, int]:
    """Return the arguments that describe x [T, H, N] besides its shape."""
    assert x.stride(2) == 1 or x.shape[2] == 1
    return x.data_ptr(), x.stride(0), x.stride(1)
