"""Make products of Triton's interpreter independent of the BLAS that numpy uses."""

from collections.abc import Iterator

import numpy as np
import pytest
from triton import knobs
from triton import language as tl
from triton.runtime import interpreter


@pytest.fixture(autouse=True, scope="package")
def _products_in_float64() -> Iterator[None]:
    """Compute `tl.dot` in float64 and round once.

    A BLAS adds the terms of a row in another order for another number of rows, and does so
    differently on each CPU. These tests compare the bits of a row alone with the bits of the same
    row in a batch: they are about the kernels' own order, not the BLAS's.
    """
    builder = interpreter.InterpreterBuilder
    original = builder.create_dot

    def create_dot(self, a, b, accumulator, *options):
        if accumulator.data.dtype != np.float32:
            return original(self, a, b, accumulator, *options)
        wide = interpreter.TensorHandle(accumulator.data.astype(np.float64), tl.float64)
        product = original(self, a, b, wide, *options)
        return interpreter.TensorHandle(product.data.astype(np.float32), tl.float32)

    with pytest.MonkeyPatch.context() as patch:
        if knobs.runtime.interpret:
            patch.setattr(builder, "create_dot", create_dot)
        yield
