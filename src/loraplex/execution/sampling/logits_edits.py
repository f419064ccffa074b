"""Changes of logits that are taken back: rows are sampled where they lie, not copied."""

from types import TracebackType

import numpy as np
import numpy.typing as npt
import torch

from loraplex.kernels.ops import Kernels

IntArray = npt.NDArray[np.int64]
Where = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class LogitsEdits:
    """Edits of logits; leaving the context restores the logits."""

    def __init__(self, logits: torch.Tensor, kernels: Kernels) -> None:
        """logits [rows, vocab] float32"""
        self._logits = logits
        self._kernels = kernels
        self._undo: list[tuple[Where, torch.Tensor]] = []

    def __enter__(self) -> "LogitsEdits":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for where, before in reversed(self._undo):
            self._logits[where] = before

    def open(self, rows: IntArray, token_ids: IntArray) -> "OpenLogits":
        """The logits at (rows[i], token_ids[i]), to be read and then set."""
        where = self.tensor(rows), self.tensor(token_ids)
        before = self._logits[where]
        self._undo.append((where, before))
        return OpenLogits(self._logits, where, before)

    def mask(self, rows: IntArray, bitmask: npt.NDArray[np.int32]) -> None:
        """-inf in these rows where the bit is 0; bitmask [len(rows), ceil(vocab / 32)]."""
        where = self.tensor(rows)
        self._undo.append((where, self._logits.index_select(0, where)))
        self._kernels.apply_bitmask(self._logits, rows, self.tensor(bitmask))

    def tensor(self, values: npt.NDArray[np.generic]) -> torch.Tensor:
        """Tensor of the values on the device of the logits."""
        return torch.from_numpy(values).to(self._logits.device)


class OpenLogits:
    """Some logits: their values, and where they lie."""

    def __init__(
        self, logits: torch.Tensor, where: tuple[torch.Tensor, torch.Tensor], values: torch.Tensor
    ) -> None:
        self._logits = logits
        self._where = where
        self.values = values

    def set(self, values: torch.Tensor | float) -> None:
        if isinstance(values, float):
            values = torch.full_like(self.values, values)
        self._logits[self._where] = values
