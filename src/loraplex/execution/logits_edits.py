"""Changes of single logits that are taken back: rows are sampled where they lie, not copied."""

from types import TracebackType

import numpy as np
import numpy.typing as npt
import torch

IntArray = npt.NDArray[np.int64]


class LogitsEdits:
    """On leaving the context the logits are as they were on entering it."""

    def __init__(self, logits: torch.Tensor) -> None:
        """logits [rows, vocab]"""
        self._logits = logits
        self._undo: list[tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]] = []

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
        device = self._logits.device
        where = torch.from_numpy(rows).to(device), torch.from_numpy(token_ids).to(device)
        before = self._logits[where]
        self._undo.append((where, before))
        return OpenLogits(self._logits, where, before)


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
