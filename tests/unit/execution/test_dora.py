"""DoRA's factors, from a base that is only ever computed with."""

import pytest
import torch

from loraplex.core.adapter import LoraTarget, TargetPart
from loraplex.core.errors import AdapterMismatchError
from loraplex.execution.dora import dora_factors
from loraplex.execution.host_adapters import HostAdapter, HostPart, HostWeight
from loraplex.kernels.dispatch import select_kernels
from loraplex.kernels.reference import ReferenceKernels
from loraplex.models.base_linears import BaseLinears

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


def test_a_row_of_zeros_has_no_direction():
    nothing = adapter(torch.zeros(6, RANK))
    with pytest.raises(AdapterMismatchError, match="k_proj, layer 0: row 0"):
        dora_factors(nothing, base(ReferenceKernels(CPU), torch.zeros(18, NUM_IN)), CPU)
