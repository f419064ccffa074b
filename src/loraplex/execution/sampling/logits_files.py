"""Logits that a request wants back are too large for a message: they are left in files."""

import contextlib
from pathlib import Path

import torch

from loraplex.core.errors import RowFailedError
from loraplex.core.output import LogitsFile
from loraplex.core.plan import Wanted
from loraplex.execution.sampling.rows import StepRow


class LogitsFiles:
    """Files named by sequence and position: what is computed again replaces its own file.

    The receiver of a file deletes it; the others go with the folder.
    """

    def __init__(self, folder: Path | None) -> None:
        """folder: of this engine alone, not readable by others. None: no row gets any."""
        self._folder = folder

    def of_output(
        self, logits: torch.Tensor, row: StepRow, num_new_tokens: int
    ) -> LogitsFile | None:
        """What the row's new tokens were chosen from, if it wants that. Raises RowFailedError."""
        if not row.row.sampling.return_logits or not num_new_tokens:
            return None
        first = row.last - len(row.step.draft_token_ids)
        name = f"{row.row.added.sequence_id}-output-{row.row.num_outputs}"
        return self._write(name, logits[first : first + num_new_tokens])

    def of_prompt(self, logits: torch.Tensor, row: StepRow) -> LogitsFile | None:
        """Logits of the computed prompt positions, if requested. Raises RowFailedError."""
        wants = row.row.sampling.return_prompt_logits and row.step.wanted is Wanted.ALL
        num_rows = min(row.step.num_tokens, row.row.added.num_prompt_tokens - row.step.start)
        if not wants or num_rows <= 0:
            return None
        name = f"{row.row.added.sequence_id}-prompt-{row.step.start}"
        return self._write(name, logits[row.first : row.first + num_rows])

    def _write(self, name: str, logits: torch.Tensor) -> LogitsFile:
        if self._folder is None:
            raise RowFailedError("logits cannot be returned: this engine has no folder for them")
        path = self._folder / f"{name}.f32"
        try:
            logits.float().cpu().contiguous().numpy().tofile(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                path.unlink()
            raise RowFailedError(f"the logits could not be written: {error}") from error
        return LogitsFile(str(path), len(logits))
