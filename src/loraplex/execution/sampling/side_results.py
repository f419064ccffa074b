"""What rows want in addition to tokens: log probabilities, candidates of beams, logits in files.

Which beams go on, the scheduler decides. Logits that a request wants back are too large for a
message.
"""

import contextlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from loraplex.core.errors import RowFailedError
from loraplex.core.output import LogitsFile, TokenLogprob
from loraplex.core.plan import Wanted
from loraplex.execution.sampling.logits_processors import LogitsEdits, LogitsProcessors
from loraplex.execution.sampling.rows import Draw, StepRow
from loraplex.kernels.ops import Kernels


class WantedLogprob(NamedTuple):
    step_row: int
    """Which row of the step it is for."""
    logits_row: int
    token_id: int
    num_top: int


def wanted_of_tokens(
    rows: Sequence[StepRow],
    draws: Sequence[Sequence[Draw]],
    accepted: Sequence[Sequence[int]],
) -> list[WantedLogprob]:
    """Log probabilities of the new tokens, in the rows whose step needs them."""
    return [
        WantedLogprob(index, draw.logits_row, token_id, row.step.num_logprobs)
        for index, (row, of_row, ids) in enumerate(zip(rows, draws, accepted, strict=True))
        if row.step.num_logprobs is not None
        for draw, token_id in zip(of_row, ids, strict=False)
    ]


def wanted_of_prompts(rows: Sequence[StepRow]) -> list[WantedLogprob]:
    """Log probability of the known token after each position, in rows with Wanted.ALL."""
    wanted = []
    for index, row in enumerate(rows):
        num_top = row.row.sampling.prompt_logprobs
        if row.step.wanted is not Wanted.ALL or num_top is None:
            continue
        start = row.step.start
        following = row.row.token_ids[start + 1 : start + 1 + row.step.num_tokens]
        for offset, token_id in enumerate(following):
            wanted.append(WantedLogprob(index, row.first + offset, token_id, num_top))
    return wanted


def find_logprobs(
    kernels: Kernels, logits: torch.Tensor, wanted: Sequence[WantedLogprob], num_rows: int
) -> list[tuple[TokenLogprob, ...]]:
    """What is wanted, by the index of the step's row."""
    if not wanted:
        return [()] * num_rows
    found = kernels.top_logprobs(
        logits,
        np.array([w.logits_row for w in wanted]),
        np.array([w.token_id for w in wanted]),
        min(max(w.num_top for w in wanted), logits.shape[1]),
    )
    by_row: list[list[TokenLogprob]] = [[] for _ in range(num_rows)]
    for want, logprob, rank, ids, logprobs in zip(
        wanted,
        found.logprobs.tolist(),
        found.ranks.tolist(),
        found.top_ids.tolist(),
        found.top_logprobs.tolist(),
        strict=True,
    ):
        top = tuple(zip(ids[: want.num_top], logprobs[: want.num_top], strict=True))
        by_row[want.step_row].append(TokenLogprob(want.token_id, logprob, rank, top))
    return [tuple(of_row) for of_row in by_row]


Candidates = tuple[tuple[int, float], ...]


def find_candidates(
    kernels: Kernels, logits: torch.Tensor, rows: Sequence[StepRow], processors: LogitsProcessors
) -> list[Candidates]:
    """(token id, score) of each row's step.num_candidates best, of equals the lowest id first.

    The score is the log probability, to which the processors were applied as if it were a logit:
    so does transformers' beam search. Temperature, top-k, top-p and min-p do not matter. A token
    that may not come (-inf) is no candidate, so there may be fewer.
    """
    if not rows:
        return []
    where = torch.tensor([row.last for row in rows], device=logits.device)
    scores = torch.log_softmax(logits[where], dim=-1)
    with LogitsEdits(scores, kernels) as edits:
        processors.apply(edits, [Draw(index, row.row) for index, row in enumerate(rows)])
        numbers = np.arange(len(rows))
        num_top = min(max(row.step.num_candidates for row in rows), scores.shape[1])
        ids = kernels.top_logprobs(scores, numbers, np.zeros_like(numbers), num_top).top_ids
        best = scores.gather(1, ids)
    # Scores fall, so those of tokens that may not come are at the end.
    num_possible = (best > -math.inf).sum(1).tolist()
    return [
        tuple(zip(of_ids, of_scores, strict=True))[: min(num, row.step.num_candidates)]
        for row, of_ids, of_scores, num in zip(
            rows, ids.tolist(), best.tolist(), num_possible, strict=True
        )
    ]


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
