"""Native norms, sums, rotation, gates, activations, and rows of tables.

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
    Source,
    ThreadPool,
    Value,
)

ACTIVATIONS = {
    Activation.GELU: 0,
    Activation.GELU_TANH: 1,
    Activation.RELU: 2,
    Activation.SQUARED_RELU: 3,
    Activation.SILU: 4,
    Activation.CLAMPED_SWIGLU: 5,
}
"""loraplex_activation"""


class NativeElementwise:
    """Ops of these names in `Kernels`. Results are contiguous.

    Rows, and heads, may be views with a longer stride; the last axis is contiguous.
    """

    def __init__(self, library: NativeLibrary, pool: ThreadPool) -> None:
        self._pool = pool
        self._output = library.output
        self._rms_norm = library.function(
            "loraplex_rms_norm",
            *(Pointer, Size, Size, Size, Int, Value, Size, Size, Int, Pointer, Real, Value),
        )
        self._add_rms_norm = library.function(
            "loraplex_add_rms_norm",
            *(Pointer, Size, Size, Int, Value, Size, Value, Size, Real),
            *(Int, Pointer, Real, Value, Value),
        )
        self._layer_norm = library.function(
            "loraplex_layer_norm",
            *(Pointer, Size, Size, Size, Int, Value, Size, Size),
            *(Int, Pointer, Pointer, Size, Real, Value),
        )
        self._add_layer_norm = library.function(
            "loraplex_add_layer_norm",
            *(Pointer, Size, Size, Int, Value, Size, Value, Size, Real),
            *(Int, Pointer, Pointer, Real, Value, Value),
        )
        self._add = library.function(
            "loraplex_add", *(Pointer, Size, Size, Int, Value, Size, Value, Size, Real, Value)
        )
        self._multiply = library.function(
            "loraplex_multiply", *(Pointer, Size, Size, Int, Value, Size, Value, Size, Value)
        )
        self._scale = library.function(
            "loraplex_scale", *(Pointer, Size, Size, Int, Real, Real, Value, Size)
        )
        self._rotary = library.function(
            "loraplex_rotary",
            *(Pointer, Size, Size, Size, Size, Size, Int, Value, Value),
            *(Int, Value, Size, Value, Size),
        )
        self._take_rows = library.function(
            "loraplex_take_rows", *(Pointer, Size, Size, Int, Source, Size, Value, Value)
        )
        self._gate = library.function(
            "loraplex_gate", *(Pointer, Size, Size, Int, Int, Value, Size, Value)
        )
        self._activate = library.function(
            "loraplex_activate", *(Pointer, Size, Size, Int, Int, Value, Size, Value)
        )
        self._xielu = library.function(
            "loraplex_xielu", *(Pointer, Size, Size, Int, Real, Real, Value, Size, Value)
        )

    def take_rows(self, table: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        num_rows, size = indices.shape[0], table.shape[1]
        output = self._output((num_rows, size), table.dtype)
        self._take_rows(
            *(self._pool.address, num_rows, size, DTYPES[table.dtype]),
            *(table.data_ptr(), table.stride(0), indices.data_ptr(), output.data_ptr()),
        )
        return output

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        output = self._output(x.shape, x.dtype)
        self._rms_norm(
            *(self._pool.address, *_heads(x), DTYPES[weight.dtype], weight.data_ptr()),
            *(eps, output.data_ptr()),
        )
        return output

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        factor: float = 1.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        output, total = self._output(x.shape, x.dtype), self._output(x.shape, x.dtype)
        self._add_rms_norm(
            *(self._pool.address, *_pair(x, residual), factor),
            *(DTYPES[weight.dtype], weight.data_ptr(), eps),
            *(output.data_ptr(), total.data_ptr()),
        )
        return output, total

    def layer_norm(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
    ) -> torch.Tensor:
        assert (bias.shape, bias.dtype) == (weight.shape, weight.dtype)
        output = self._output(x.shape, x.dtype)
        self._layer_norm(
            *(self._pool.address, *_heads(x), DTYPES[weight.dtype]),
            *(weight.data_ptr(), bias.data_ptr(), x.shape[-1] if weight.dim() == 2 else 0),
            *(eps, output.data_ptr()),
        )
        return output

    def add_layer_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        eps: float,
        factor: float = 1.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert bias.dtype == weight.dtype
        output, total = self._output(x.shape, x.dtype), self._output(x.shape, x.dtype)
        self._add_layer_norm(
            *(self._pool.address, *_pair(x, residual), factor),
            *(DTYPES[weight.dtype], weight.data_ptr(), bias.data_ptr(), eps),
            *(output.data_ptr(), total.data_ptr()),
        )
        return output, total

    def add(self, x: torch.Tensor, residual: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        total = self._output(x.shape, x.dtype)
        self._add(self._pool.address, *_pair(x, residual), factor, total.data_ptr())
        return total

    def multiply(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        product = self._output(x.shape, x.dtype)
        self._multiply(self._pool.address, *_pair(x, factor), product.data_ptr())
        return product

    def scale(self, x: torch.Tensor, factor: float, soft_cap: float | None = None) -> None:
        self._scale(
            *(self._pool.address, *x.shape, DTYPES[x.dtype], factor, soft_cap or 0.0),
            *(x.data_ptr(), x.stride(0)),
        )

    def rotary(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        *,
        is_interleaved: bool = False,
    ) -> None:
        num_tokens, num_heads, _ = query.shape
        head_stride = query.stride(1)
        assert key.shape[1] <= 1 or key.stride(1) == head_stride
        self._rotary(
            *(self._pool.address, num_tokens, num_heads, key.shape[1], head_stride),
            *(2 * cos.shape[1], is_interleaved, cos.data_ptr(), sin.data_ptr()),
            *(DTYPES[query.dtype], query.data_ptr(), query.stride(0)),
            *(key.data_ptr(), key.stride(0)),
        )

    def gate(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        output = self._output((num_rows, size), gate_up.dtype)
        self._gate(
            *(self._pool.address, num_rows, size, DTYPES[gate_up.dtype], ACTIVATIONS[activation]),
            *(gate_up.data_ptr(), gate_up.stride(0), output.data_ptr()),
        )
        return output

    def activate(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        output = self._output(x.shape, x.dtype)
        self._activate(
            *(self._pool.address, *x.shape, DTYPES[x.dtype], ACTIVATIONS[activation]),
            *(x.data_ptr(), x.stride(0), output.data_ptr()),
        )
        return output

    def xielu(self, x: torch.Tensor, positive: float, negative: float) -> torch.Tensor:
        output = self._output(x.shape, x.dtype)
        self._xielu(
            *(self._pool.address, *x.shape, DTYPES[x.dtype], positive, negative),
            *(x.data_ptr(), x.stride(0), output.data_ptr()),
        )
        return output


def _heads(x: torch.Tensor) -> tuple[int, ...]:
    """Return the arguments that describe x [T, N] or [T, H, N]."""
    num_heads, head_stride = (1, 0) if x.dim() == 2 else (x.shape[1], x.stride(1))
    return (
        *(x.shape[0], num_heads, x.shape[-1], DTYPES[x.dtype]),
        *(x.data_ptr(), x.stride(0), head_stride),
    )


def _pair(x: torch.Tensor, other: torch.Tensor) -> tuple[int, ...]:
    """Return the arguments that describe x and another [T, N]."""
    return (
        *(*x.shape, DTYPES[x.dtype], x.data_ptr(), x.stride(0)),
        *(other.data_ptr(), other.stride(0)),
    )
