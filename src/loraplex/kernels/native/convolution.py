"""Native causal convolution (native/include/loraplex/convolution.h)."""

import torch

from loraplex.kernels.activations import Activation
from loraplex.kernels.native.elementwise import ACTIVATIONS
from loraplex.kernels.native.library import (
    DTYPES,
    Int,
    NativeLibrary,
    Pointer,
    Size,
    ThreadPool,
    Value,
)
from loraplex.kernels.ops import Storage
from loraplex.kernels.states import StoredRows

_NO_ACTIVATION = -1
"""LORAPLEX_NO_ACTIVATION"""


class NativeConvolution:
    """The op `causal_conv` of `Kernels`, of at most 32 taps.

    It is fastest with weights of which those of one tap lie side by side.
    """

    def __init__(self, library: NativeLibrary, pool: ThreadPool) -> None:
        self._pool = pool
        self._output = library.output
        self._causal_conv = library.function(
            "loraplex_causal_conv",
            *(Pointer, Size, Size, Size, Size, Value, Value, Value, Value, Value),
            *(Int, Value, Size, Pointer, Size, Size, Size, Pointer, Int, Pointer, Value),
        )

    def apply(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: Activation | None,
        rows: StoredRows,
        storage: Storage,
        tensor: int = 0,
    ) -> torch.Tensor:
        output = self._output(x.shape, x.dtype)
        stored = storage.tensors[tensor]
        self._causal_conv(
            *(self._pool.address, len(rows.table_starts), *x.shape, stored.shape[1]),
            *(field.data_ptr() for field in rows),
            *(DTYPES[x.dtype], x.data_ptr(), x.stride(0)),
            *(weight.data_ptr(), weight.shape[1], *weight.stride()),
            None if bias is None else bias.data_ptr(),
            _NO_ACTIVATION if activation is None else ACTIVATIONS[activation],
            *(stored.data_ptr(), output.data_ptr()),
        )
        return output
