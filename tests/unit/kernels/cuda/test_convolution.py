"""Causal convolutions by Triton's programs, interpreted, against torch and as the reference."""

from typing import Any

import pytest
import torch

from loraplex.kernels.activations import Activation
from loraplex.kernels.cuda import convolution, elementwise
from loraplex.kernels.reference import ReferenceKernels
from support.causal_convolutions import LENGTHS, Convolution


class Programs(ReferenceKernels):
    """The reference with the programs' convolution."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.causal_conv: Any = convolution.causal_conv


KERNELS = Programs()
DTYPES = [torch.float32, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_taps", "num_channels", "activation", "has_bias"),
    [
        (1, 1, None, False),
        (3, 37, None, True),
        (4, 300, Activation.SILU, False),
        (7, 1100, Activation.SILU, True),
    ],
)
def test_channels_are_convolved(
    dtype: torch.dtype,
    num_taps: int,
    num_channels: int,
    activation: Activation | None,
    *,
    has_bias: bool,
) -> None:
    torch.default_generator.manual_seed(0)
    conv = Convolution(
        dtype, num_taps, num_channels=num_channels, activation=activation, has_bias=has_bias
    )
    for sequence, output in enumerate(conv.run(KERNELS, [100])):
        torch.testing.assert_close(output, conv.expected(sequence).to(dtype))


@pytest.mark.parametrize("cuts", [(1,), (1, 5, 2)], ids=str)
def test_bits_do_not_depend_on_chunks(cuts: tuple[int, ...]) -> None:
    torch.default_generator.manual_seed(0)
    conv = Convolution(torch.float16, activation=Activation.SILU, has_bias=True)
    whole = [
        conv.step(KERNELS, conv.storage(), [(sequence, 0, length)])
        for sequence, length in enumerate(LENGTHS)
    ]
    for output, expected in zip(conv.run(KERNELS, cuts), whole, strict=True):
        assert torch.equal(output, expected)


def test_padding_and_rows_without_tokens() -> None:
    torch.default_generator.manual_seed(0)
    conv = Convolution()
    storage = conv.storage()
    spans = [(3, 0, 6), (1, 0, 2)]
    output = conv.step(KERNELS, storage, spans, num_padding=3, num_empty_rows=2)
    assert torch.equal(output, conv.step(KERNELS, conv.storage(), spans))
    stored = storage.tensors[1].view(-1, len(conv.weight))
    assert stored.isnan().all(1).sum() == len(stored) - 8


def test_a_row_may_read_what_its_step_stores() -> None:
    torch.default_generator.manual_seed(0)
    conv = Convolution()
    whole = conv.step(KERNELS, conv.storage(), [(2, 0, 9)])
    apart = conv.step(KERNELS, conv.storage(), [(2, first, 1) for first in reversed(range(9))])
    assert torch.equal(apart.flip(0), whole)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_multiply(dtype: torch.dtype) -> None:
    torch.default_generator.manual_seed(0)
    x, factor = torch.randn(2, 5, 1100).to(dtype)[:, :, 3:-2]
    assert torch.equal(elementwise.multiply(x, factor), x * factor)
