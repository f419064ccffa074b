"""Order of heads in the outputs of linear layers, where it is not that of what reads them."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from loraplex.kernels.ops import Kernels
from loraplex.models.batch import ForwardBatch


class HeadOrder(NamedTuple):
    """Kind of plan: rows that bring the heads of all tokens' outputs into an order."""

    heads: tuple[int, ...]
    """Where each head is among those that are computed."""

    def planner(
        self, _kernels: Kernels, device: torch.device
    ) -> Callable[[ForwardBatch], torch.Tensor]:
        return _HeadRows(torch.tensor(self.heads, device=device)).plan


class _HeadRows:
    """Rows that bring the heads of all tokens' outputs into an order."""

    def __init__(self, order: torch.Tensor) -> None:
        self._order = order
        self._tables: dict[int, torch.Tensor] = {}

    def plan(self, batch: ForwardBatch) -> torch.Tensor:
        """Return [T * heads] int64, rows of outputs [T * heads, size of a head].

        For one number of tokens it is always at the same address, as a recorded step needs it.
        """
        num_tokens, num_heads = len(batch.token_ids), len(self._order)
        size = 1 << (num_tokens - 1).bit_length()
        if size not in self._tables:
            tokens = torch.arange(size, device=self._order.device).unsqueeze(1)
            self._tables[size] = (tokens * num_heads + self._order).flatten()
        return self._tables[size][: num_tokens * num_heads]
