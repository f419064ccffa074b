"""A causal convolution against torch's, and the same bits however a prompt is cut."""

from collections.abc import Sequence

import pytest
import torch

from loraplex.kernels.activations import Activation
from loraplex.kernels.dispatch import select_kernels
from loraplex.kernels.ops import Kernels
from loraplex.kernels.reference import ReferenceKernels
from support.causal_convolutions import LENGTHS, Convolution

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=["reference", "fastest"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    torch.default_generator.manual_seed(0)
    return ReferenceKernels(CPU) if request.param == "reference" else select_kernels(CPU)


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_taps", [1, 3, 4, 7])
@pytest.mark.parametrize("num_channels", [1, 16, 37, 300])
@pytest.mark.parametrize("activation", [None, Activation.SILU])
@pytest.mark.parametrize("has_bias", [False, True])
def test_channels_are_convolved(
    kernels: Kernels,
    dtype: torch.dtype,
    num_taps: int,
    num_channels: int,
    activation: Activation | None,
    *,
    has_bias: bool,
) -> None:
    conv = Convolution(
        dtype, num_taps, num_channels=num_channels, activation=activation, has_bias=has_bias
    )
    for sequence, output in enumerate(conv.run(kernels, [100])):
        expected = conv.expected(sequence).to(dtype)
        torch.testing.assert_close(output, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cuts", [(1,), (2,), (3,), (1, 5, 2), (8, 1)], ids=str)
def test_bits_do_not_depend_on_chunks(
    kernels: Kernels, dtype: torch.dtype, cuts: Sequence[int]
) -> None:
    """Rows read what other steps stored, also across blocks, and in any company."""
    conv = Convolution(dtype, activation=Activation.SILU, has_bias=True)
    whole = [
        conv.step(kernels, conv.storage(), [(sequence, 0, length)])
        for sequence, length in enumerate(LENGTHS)
    ]
    for output, expected in zip(conv.run(kernels, cuts), whole, strict=True):
        assert torch.equal(output, expected)


def test_inputs_are_stored_and_padding_is_not(kernels: Kernels) -> None:
    conv = Convolution(torch.bfloat16)
    storage = conv.storage()
    conv.step(kernels, storage, [(3, 0, 6), (1, 0, 2)], num_padding=3, num_empty_rows=2)
    stored = storage.tensors[1].view(-1, len(conv.weight))
    places = [conv.positions.place(3, i) for i in range(6)]
    places += [conv.positions.place(1, i) for i in range(2)]
    assert torch.equal(stored[places], torch.cat([conv.inputs[3][:6], conv.inputs[1][:2]]).float())
    assert stored.isnan().all(1).sum() == len(stored) - 8


def test_a_row_may_read_what_its_step_stores(kernels: Kernels) -> None:
    """Draft tokens are rows of their own on an accelerator, and beams share blocks."""
    conv = Convolution()
    storage = conv.storage()
    whole = conv.step(kernels, storage, [(2, 0, 9)])
    apart = conv.step(kernels, conv.storage(), [(2, first, 1) for first in reversed(range(9))])
    assert torch.equal(apart.flip(0), whole)


def test_a_step_of_padding_alone(kernels: Kernels) -> None:
    conv = Convolution()
    none = conv.positions.rows([], num_padding=4, num_empty_rows=4)
    tables = torch.zeros(8, dtype=torch.int64)
    output = kernels.causal_conv(
        torch.zeros(4, 37), conv.weight, None, None, none._replace(tables=tables), conv.storage(), 1
    )
    assert output.shape == (4, 37)
    assert torch.isfinite(output).all()
