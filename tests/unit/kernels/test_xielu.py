"""xIELU by the formula of its article, and with the same bits whatever else is computed."""

import pytest
import torch
from transformers.activations import XIELUActivation

from loraplex.kernels.reference import ReferenceKernels

KERNELS = ReferenceKernels(torch.device("cpu"))


def test_both_sides_of_zero() -> None:
    x = torch.tensor([[2.0, -1.0, 0.0, 1e-3, -1e-3, -50.0]])
    found = KERNELS.xielu(x, 0.25, 0.75)[0].tolist()
    # x^2 / 4 + x / 2 and 3 / 4 (e^x - 1 - x) + x / 2; near zero by the first terms of the series.
    wanted = [2.0, -0.5 + 0.75 * 0.36787944117, 0.0, 5.0025e-4, -4.99625e-4, 0.75 * 49 - 25]
    assert found == pytest.approx(wanted, rel=1e-5)


def test_as_transformers() -> None:
    layer = XIELUActivation(alpha_p_init=0.7, alpha_n_init=1.3, dtype=torch.float32)
    x = 3 * torch.randn(40, 50, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.allclose(KERNELS.xielu(x, 0.7, 1.3), layer(x), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_same_bits_alone(dtype: torch.dtype) -> None:
    x = 3 * torch.randn(9, 37, generator=torch.Generator().manual_seed(2)).to(dtype)
    whole = KERNELS.xielu(x, 0.7, 1.3)
    assert whole.dtype == dtype
    assert torch.equal(whole, torch.cat([KERNELS.xielu(row[None], 0.7, 1.3) for row in x]))
