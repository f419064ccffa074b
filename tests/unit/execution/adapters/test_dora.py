"""DoRA's factors, from a base that is only ever computed with."""

import dataclasses

import pytest
import torch

from loraplex.core.adapter import LoraTarget, TargetPart
from loraplex.core.errors import AdapterMismatchError, InvalidAdapterError
from loraplex.core.weight_precision import WeightPrecision
from loraplex.execution.adapters.dora import dora_factors, with_factors
from loraplex.execution.adapters.host_adapters import HostAdapter, HostPart, HostWeight
from loraplex.kernels.dispatch import select_kernels
from loraplex.kernels.quantization import quantize
from loraplex.kernels.reference import ReferenceKernels
from loraplex.models.base_linears import BaseLinears
from support.naming import naming

CPU = torch.device("cpu")
SIZES = {"q_proj": 12, "k_proj": 6}
NUM_IN, RANK, SCALE = 300, 3, 0.7


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def base(kernels, weight: torch.Tensor) -> BaseLinears:
    linears = BaseLinears(kernels, torch.float32, CPU)
    linears.add(0, kernels.pack_linear(weight, random(18, seed=5)), SIZES)
    return linears


def adapter(b: torch.Tensor) -> HostAdapter:
    target = LoraTarget(0, "k_proj", RANK, NUM_IN, 6)
    vector = LoraTarget(0, "k_proj", 2, 0, 6, TargetPart.FACTOR)
    a = random(RANK, NUM_IN, seed=1)
    magnitude = HostPart(vector, random(6, seed=3))
    return HostAdapter("d", (HostWeight(target, a, b, SCALE),), (magnitude,))


@pytest.mark.parametrize(
    "kernels", [ReferenceKernels(CPU), select_kernels(CPU)], ids=["ref", "best"]
)
def test_the_factor_is_the_magnitude_by_the_norm(kernels):
    weight, b = random(18, NUM_IN, seed=0), random(6, RANK, seed=2)
    factors = dora_factors(adapter(b), base(kernels, weight), CPU)
    whole = weight[12:].double() + SCALE * b.double() @ random(RANK, NUM_IN, seed=1).double()
    expected = random(6, seed=3).double() / whole.norm(dim=1)
    torch.testing.assert_close(factors[0, "k_proj"], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("precision", [WeightPrecision.INT8, WeightPrecision.NATIVE], ids=str)
def test_of_what_the_base_really_computes(precision):
    """A quantised weight has other norms than the one that it was made from."""
    kernels, weight = select_kernels(CPU), random(18, NUM_IN, seed=0)
    linears = BaseLinears(kernels, torch.float32, CPU)
    linears.add(0, kernels.pack_linear(weight, random(18, seed=5), precision), SIZES)
    rounded = weight
    if precision is WeightPrecision.INT8:
        rounded = quantize(weight, precision).dequantized()
    b = random(6, RANK, seed=2)
    whole = rounded[12:].double() + SCALE * b.double() @ random(RANK, NUM_IN, seed=1).double()
    found = dora_factors(adapter(b), linears, CPU)[0, "k_proj"]
    expected = random(6, seed=3).double() / whole.norm(dim=1)
    # The product with A rounds it, as it does all inputs of an int8 layer.
    rtol = 1e-3 if precision is WeightPrecision.INT8 else 2e-5
    torch.testing.assert_close(found, expected, rtol=rtol, atol=1e-6)
    torch.testing.assert_close(linears.bias(0, "k_proj"), random(18, seed=5)[12:].double())


def test_a_quotient_is_the_factor():
    host = adapter(random(6, RANK, seed=2))
    (part,) = host.parts
    given = dataclasses.replace(host, parts=(dataclasses.replace(part, is_quotient=True),))
    weight = torch.zeros(18, NUM_IN)  # its norms are not needed
    factors = dora_factors(given, base(ReferenceKernels(CPU), weight), CPU)
    assert torch.equal(factors[0, "k_proj"], random(6, seed=3).double())


def test_what_is_too_large_for_the_pool_is_refused():
    linears = base(ReferenceKernels(CPU), random(18, NUM_IN, seed=0))
    host = adapter(random(6, RANK, seed=2))
    assert (0, "k_proj") in with_factors(host, linears, CPU, torch.float16).factors
    (part,) = host.parts
    huge = dataclasses.replace(host, parts=(dataclasses.replace(part, values=part.values * 1e7),))
    with pytest.raises(InvalidAdapterError, match=naming("k_proj", 0, "torch.float16")):
        with_factors(huge, linears, CPU, torch.float16)
    with_factors(huge, linears, CPU, torch.bfloat16)


def test_a_row_of_zeros_has_no_direction():
    nothing = adapter(torch.zeros(6, RANK))
    with pytest.raises(AdapterMismatchError, match=naming("k_proj", 0)):
        dora_factors(nothing, base(ReferenceKernels(CPU), torch.zeros(18, NUM_IN)), CPU)
