"""Causal convolutions of random sequences by a backend, and by torch."""

from collections.abc import Sequence

import torch
from torch.nn import functional

from loraplex.kernels.activations import Activation
from loraplex.kernels.ops import Kernels, Storage
from support.stored_positions import RowSpan, StoredPositions, spans_of

LENGTHS = (1, 2, 9, 21)


class Convolution:
    """Inputs of sequences and the weights of their convolution."""

    def __init__(
        self,
        dtype: torch.dtype = torch.float32,
        num_taps: int = 4,
        *,
        num_channels: int = 37,
        block_size: int = 4,
        activation: Activation | None = None,
        has_bias: bool = False,
    ) -> None:
        # A view of wider rows.
        self.inputs = [torch.randn(n, num_channels + 5).to(dtype)[:, 3:-2] for n in LENGTHS]
        self.weight = torch.randn(num_channels, num_taps)
        self.bias = torch.randn(num_channels) if has_bias else None
        self.activation = activation
        self.positions = StoredPositions(LENGTHS, block_size)

    def storage(self) -> Storage:
        """Return blocks that hold no number, after a tensor that is not the convolution's."""
        shape = (self.positions.num_blocks, self.positions.block_size, self.weight.shape[0])
        return Storage((torch.zeros(1, 1, 1), torch.full(shape, torch.nan)))

    def step(
        self,
        kernels: Kernels,
        storage: Storage,
        spans: Sequence[RowSpan],
        num_padding: int = 0,
        num_empty_rows: int = 0,
    ) -> torch.Tensor:
        x = torch.cat([self.inputs[row][first : first + count] for row, first, count in spans])
        x = functional.pad(x, (2, 1, 0, num_padding))[:, 2:-1]
        rows = self.positions.rows(spans, num_padding, num_empty_rows)
        output = kernels.causal_conv(
            x, self.weight, self.bias, self.activation, rows, storage, tensor=1
        )
        assert output.dtype == x.dtype
        assert torch.isfinite(output).all()
        return output[: len(x) - num_padding]

    def run(self, kernels: Kernels, cuts: Sequence[int]) -> list[torch.Tensor]:
        """Return the results of all sequences, which are cut into chunks of these sizes."""
        storage = self.storage()
        results: list[list[torch.Tensor]] = [[] for _ in LENGTHS]
        for spans in spans_of(LENGTHS, cuts):
            output = self.step(kernels, storage, spans)
            counts = [count for *_, count in spans]
            for (sequence, *_), part in zip(spans, torch.split(output, counts), strict=True):
                results[sequence].append(part)
        return list(map(torch.cat, results))

    def expected(self, sequence: int) -> torch.Tensor:
        """Return the results [n, C] in float64, by torch."""
        x, num_taps = self.inputs[sequence].double(), self.weight.shape[1]
        padded = functional.pad(x.t(), (num_taps - 1, 0)).unsqueeze(0)
        weight = self.weight.double().unsqueeze(1)
        bias = None if self.bias is None else self.bias.double()
        result = functional.conv1d(padded, weight, bias, groups=len(weight))[0].t()
        return functional.silu(result) if self.activation is Activation.SILU else result
