"""Native norms, rotation, gate, activations, and rows of tables.

Results are rounded once, to the dtype of the inputs.
"""

import torch

from loraplex.kernels.activations import Activation
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

_ACTIVATIONS = {Activation.GELU: 0, Activation.GELU_TANH: 1, Activation.RELU: 2}
"""loraplex_activation"""


class ElementwiseKernel:
    """Rows may be views with a longer stride; the last axis is contiguous."""

    def __init__(self, library: NativeLibrary, pool: ThreadPool) -> None:
        self._pool = pool
        self._rms_norm = library.function(
            "loraplex_rms_norm",
            *(Pointer, Size, Size, Size, Int, Value, Size, Size, Pointer, Real, Value),
        )
        self._add_rms_norm = library.function(
            "loraplex_add_rms_norm",
            *(Pointer, Size, Size, Int, Value, Size, Value, Size),
            *(Pointer, Real, Value, Value),
        )
        self._layer_norm = library.function(
            "loraplex_layer_norm",
            *(Pointer, Size, Size, Int, Value, Size, Pointer, Pointer, Real, Value),
        )
        self._add_layer_norm = library.function(
            "loraplex_add_layer_norm",
            *(Pointer, Size, Size, Int, Value, Size, Value, Size),
            *(Pointer, Pointer, Real, Value, Value),
        )
        self._rotary = library.function(
            "loraplex_rotary",
            *(Pointer, Size, Size, Size, Size, Value, Value),
            *(Int, Value, Size, Value, Size),
        )
        self._take_rows = library.function(
            "loraplex_take_rows", *(Pointer, Size, Size, Int, Pointer, Size, Value, Value)
        )
        self._silu_mul = library.function(
            "loraplex_silu_mul", *(Pointer, Size, Size, Int, Value, Size, Value)
        )
        self._activate = library.function(
            "loraplex_activate", *(Pointer, Size, Size, Int, Int, Value, Size, Value)
        )

    def take_rows(self, table: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """table [..., N], indices [T] int64, contiguous -> [T, N]."""
        num_rows, size = indices.shape[0], table.shape[1]
        output = torch.empty((num_rows, size), dtype=table.dtype)
        self._take_rows(
            self._pool.address,
            num_rows,
            size,
            DTYPES[table.dtype],
            table.data_ptr(),
            table.stride(0),
            indices.data_ptr(),
            output.data_ptr(),
        )
        return output

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x [T, N] or [T, H, N] -> a contiguous tensor of this shape."""
        output = torch.empty(x.shape, dtype=x.dtype)
        is_flat = x.dim() == 2
        self._rms_norm(
            self._pool.address,
            x.shape[0],
            1 if is_flat else x.shape[1],
            x.shape[-1],
            DTYPES[x.dtype],
            x.data_ptr(),
            x.stride(0),
            0 if is_flat else x.stride(1),
            weight.data_ptr(),
            eps,
            output.data_ptr(),
        )
        return output

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(rms_norm(x + residual), x + residual), each [T, N] and contiguous."""
        num_rows, size = x.shape
        output = torch.empty(x.shape, dtype=x.dtype)
        total = torch.empty(x.shape, dtype=x.dtype)
        self._add_rms_norm(
            self._pool.address,
            num_rows,
            size,
            DTYPES[x.dtype],
            x.data_ptr(),
            x.stride(0),
            residual.data_ptr(),
            residual.stride(0),
            weight.data_ptr(),
            eps,
            output.data_ptr(),
            total.data_ptr(),
        )
        return output, total

    def layer_norm(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """x [T, N] -> a contiguous tensor of this shape."""
        num_rows, size = x.shape
        output = torch.empty(x.shape, dtype=x.dtype)
        self._layer_norm(
            self._pool.address,
            num_rows,
            size,
            DTYPES[x.dtype],
            x.data_ptr(),
            x.stride(0),
            weight.data_ptr(),
            bias.data_ptr(),
            eps,
            output.data_ptr(),
        )
        return output

    def add_layer_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(layer_norm(x + residual), x + residual), each [T, N] and contiguous."""
        num_rows, size = x.shape
        output = torch.empty(x.shape, dtype=x.dtype)
        total = torch.empty(x.shape, dtype=x.dtype)
        self._add_layer_norm(
            self._pool.address,
            num_rows,
            size,
            DTYPES[x.dtype],
            x.data_ptr(),
            x.stride(0),
            residual.data_ptr(),
            residual.stride(0),
            weight.data_ptr(),
            bias.data_ptr(),
            eps,
            output.data_ptr(),
            total.data_ptr(),
        )
        return output, total

    def rotary(
        self, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> None:
        """Rotate in place query [T, H, D], key [T, K, D], heads contiguous; cos, sin [T, D / 2]."""
        num_tokens, num_heads, head_dim = query.shape
        self._rotary(
            self._pool.address,
            num_tokens,
            num_heads,
            key.shape[1],
            head_dim,
            cos.data_ptr(),
            sin.data_ptr(),
            DTYPES[query.dtype],
            query.data_ptr(),
            query.stride(0),
            key.data_ptr(),
            key.stride(0),
        )

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[T, 2 N] -> [T, N]"""
        num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        output = torch.empty((num_rows, size), dtype=gate_up.dtype)
        self._silu_mul(
            self._pool.address,
            num_rows,
            size,
            DTYPES[gate_up.dtype],
            gate_up.data_ptr(),
            gate_up.stride(0),
            output.data_ptr(),
        )
        return output

    def activate(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        """[T, N] -> [T, N]"""
        num_rows, size = x.shape
        output = torch.empty(x.shape, dtype=x.dtype)
        self._activate(
            self._pool.address,
            num_rows,
            size,
            DTYPES[x.dtype],
            _ACTIVATIONS[activation],
            x.data_ptr(),
            x.stride(0),
            output.data_ptr(),
        )
        return output
