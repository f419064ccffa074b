"""Products of host tiles: the bits of a row depend on the row and the matrix alone."""

import pytest
import torch

from loraplex.core.weight_precision import WeightPrecision
from loraplex.kernels.host_tensors import fixed_tiles, tiled_product
from loraplex.kernels.reference import ReferenceKernels


@pytest.mark.parametrize("num_inputs", [1, 5, 8, 9, 14, 16, 32, 64])
def test_bits_of_a_row_depend_on_no_other_and_on_no_place(num_inputs: int) -> None:
    """Try few columns in particular: those of a router's LoRA, one for each expert."""
    generator = torch.Generator().manual_seed(num_inputs)
    rows = torch.randn(37, num_inputs, generator=generator)
    for num_columns in (*range(1, 20), 60):
        matrix = torch.randn(num_inputs, num_columns, generator=generator)
        for product in (matrix, matrix.t().contiguous().t()):
            together = tiled_product(rows, product)
            assert together.shape == (37, num_columns)
            for row in range(37):
                alone = tiled_product(rows[row : row + 1], product)
                assert torch.equal(alone[0], together[row]), (num_columns, row)


def test_no_rows() -> None:
    assert [tile.shape for tile in fixed_tiles(torch.zeros(0, 3))] == [(16, 3)]
    assert tiled_product(torch.zeros(0, 3), torch.zeros(3, 5)).shape == (0, 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_linear_layer_of_no_rows(dtype: torch.dtype) -> None:
    """Compute what a step without logits needs of the output layer: nothing."""
    kernels = ReferenceKernels(torch.device("cpu"))
    weight, bias = torch.ones(7, 4, dtype=dtype), torch.ones(7, dtype=dtype)
    packed = kernels.pack_linear(weight, bias, WeightPrecision.NATIVE)
    assert kernels.linear(torch.ones(0, 4, dtype=dtype), packed).shape == (0, 7)
