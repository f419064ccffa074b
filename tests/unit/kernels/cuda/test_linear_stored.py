"""Weights that were quantised elsewhere, on a GPU's linear layers, interpreted."""

import dataclasses

import pytest
import torch

from loraplex.core.weight_precision import WeightPrecision
from loraplex.kernels.cuda.grouped_linear import GroupedLinear
from loraplex.kernels.cuda.linear import CudaLinear
from loraplex.kernels.cuda.linear_packing import dequantized_rows
from loraplex.kernels.quantization import GROUP_SIZES, QuantizedWeight
from loraplex.kernels.routing import sort_routes
from support.stored_weights import FORMS, stored_weight

CPU = torch.device("cpu")
NATIVE = WeightPrecision.NATIVE
TOLERANCE = {torch.float32: 1e-6, torch.float16: 4e-4}


def gaussian(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes))).to(dtype)


def stored(form: str, group_size: int, in_features: int, out_features: int) -> QuantizedWeight:
    """Weight whose products fit in float16: offsets are 10 steps, tables have up to 127."""
    generator = torch.Generator().manual_seed(group_size)
    weight = stored_weight(form, group_size, in_features, out_features, generator)
    offsets = None if weight.offsets is None else weight.offsets / 1000
    table = None
    if weight.table is not None:
        table = tuple(int(entry / max(weight.table) * 127) for entry in weight.table)
    return dataclasses.replace(weight, scales=weight.scales / 100, offsets=offsets, table=table)


def error_of(y: torch.Tensor, expected: torch.Tensor) -> float:
    return float((y.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("form", FORMS)
def test_nothing_is_lost_in_packing(form, group_size):
    weight = stored(form, group_size, 1024 + (7 if form.startswith("int8") else 0), 20)
    kernel = CudaLinear(CPU, batch_invariant=False)
    packed = kernel.pack(weight, gaussian(20), NATIVE)
    assert torch.equal(dequantized_rows(packed, slice(3, 20)), weight.dequantized()[3:])
    assert kernel.join(kernel.parts(packed)) == packed


@pytest.mark.covering(2)
@pytest.mark.some(12)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("batch_invariant", [False, True], ids=["free", "fixed"])
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("form", FORMS)
def test_it_is_the_product(form, group_size, batch_invariant, dtype):
    """Inputs fill no block, and rows fill no tile."""
    in_features = group_size + (7 if form.startswith("int8") else group_size)
    weight = stored(form, group_size, in_features, 33)
    bias = 10 * gaussian(33, dtype=dtype)
    kernel = CudaLinear(CPU, batch_invariant=batch_invariant)
    packed = kernel.pack(weight, bias, NATIVE)
    x = gaussian(17, in_features, dtype=dtype) + 1
    expected = x.double() @ weight.dequantized().double().t() + bias.double()
    y = kernel.apply(x, packed)
    assert y.dtype == dtype
    assert error_of(y, expected) < TOLERANCE[dtype]
    if batch_invariant:
        for row in (0, 16):
            assert torch.equal(kernel.apply(x[row : row + 1], packed)[0], y[row])


@pytest.mark.parametrize("form", FORMS)
def test_a_long_sum_is_split_and_added(form):
    weight = stored(form, 32, 1920, 20)
    x = gaussian(3, 1920, dtype=torch.float16)
    kernel = CudaLinear(CPU, batch_invariant=False)
    y = kernel.apply(x, kernel.pack(weight, None, NATIVE))
    assert error_of(y, x.double() @ weight.dequantized().double().t()) < 4e-4


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("group_size", [16, 64])
def test_experts_have_their_own_scales_and_offsets(form, group_size):
    flat = stored(form, group_size, 128, 3 * 40)
    weight = dataclasses.replace(
        flat,
        values=flat.values.view(3, 40, -1),
        scales=flat.scales.view(3, 40, -1),
        offsets=None if flat.offsets is None else flat.offsets.view(3, 40, -1),
    )
    chosen = gaussian(9, 3).argsort(1)[:, :2].int()
    routes = sort_routes(chosen, torch.full((9, 2), 0.5), 3)
    x = gaussian(9, 128)
    packed = CudaLinear(CPU, batch_invariant=False).pack(weight, None, NATIVE)
    y = GroupedLinear(CPU, batch_invariant=False).apply(x, packed, routes)
    numbers = weight.dequantized().double()
    for pair, expert in enumerate(routes.experts.flatten().tolist()):
        expected = x[pair // 2].double() @ numbers[expert].t()
        assert error_of(y[pair], expected) < 1e-5
