"""Causal convolution on a GPU: one launch stores the inputs of all rows, one reads them.

What a program computes of a token is the same whatever else the step has.
"""

import torch

from loraplex.kernels.activations import Activation
from loraplex.kernels.cuda.elementwise import parts_of_rows
from loraplex.kernels.cuda.programs import convolution as programs
from loraplex.kernels.ops import Storage
from loraplex.kernels.states import StoredRows

_ROWS_AT_ONCE = 128


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: Activation | None,
    rows: StoredRows,
    storage: Storage,
    tensor: int = 0,
) -> torch.Tensor:
    """Same as Kernels.causal_conv. bias: contiguous."""
    stored = storage.tensors[tensor]
    num_tokens, size = x.shape
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grid, options = parts_of_rows(num_tokens, size)
    programs.store_inputs[grid](stored, x, rows.places, x.stride(0), **options)
    programs.causal_conv[grid](
        *(output, x, stored, weight, bias),
        *(rows.query_start_loc, rows.positions, rows.table_starts, rows.tables),
        *(len(rows.table_starts), x.stride(0), *weight.stride()),
        HAS_BIAS=bias is not None,
        ACTIVATION=None if activation is None else activation.value,
        TAPS=weight.shape[1],
        BLOCK_SIZE=stored.shape[1],
        ROWS=_ROWS_AT_ONCE,
        **options,
    )
    return output
