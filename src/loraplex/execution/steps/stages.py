"""Stages of a pipeline: hidden states go to the next stage, and sampled rows to all before.

So every stage has the same results, and its next step knows the newest token of each row.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from loraplex.core.plan import RowAdded, RowResult, RowStep, Slot
from loraplex.execution.sampling.pending_samples import PendingSample, TokenFeed
from loraplex.execution.sampling.sampler import Sampler
from loraplex.models.stages import PipelineStage


class StageLinks(Protocol):
    """Connection of a rank to the ranks with its place in the other stages.

    What is sent arrives in its order. Receiving waits, and raises DeviceLost after an abort.
    """

    @property
    def stage(self) -> PipelineStage:
        """Stage of this rank."""
        ...

    def send_hidden(self, hidden: torch.Tensor) -> None:
        """Send a hidden state [T, hidden] to the next stage."""
        ...

    def receive_hidden(self, num_tokens: int) -> torch.Tensor:
        """Receive, on the host, what the stage before sent. The tensor may be written to."""
        ...

    def send_rows(self, rows: Sequence[RowResult]) -> None:
        """Send the results of a step to all stages before the last."""
        ...

    def receive_rows(self) -> list[RowResult]:
        """Receive the results of the oldest step that were not received."""
        ...

    def close(self) -> None: ...


class StageSampler(Protocol):
    """What a step's rows and its last tensor are given to: Sampler, where there are no stages."""

    def add_row(self, row: RowAdded) -> None: ...

    def remove_row(self, slot: Slot) -> None: ...

    def last_token(self, slot: Slot) -> int | None: ...

    def begin(self, steps: Sequence[RowStep]) -> None: ...

    def launch(
        self, logits: torch.Tensor, steps: Sequence[RowStep], feed: TokenFeed | None
    ) -> PendingSample: ...

    def close(self) -> None: ...


def stage_sampler(sampler: Sampler, links: StageLinks | None) -> StageSampler:
    """Return what takes the place of the sampler in a stage."""
    if links is None:
        return sampler
    return sampler if links.stage.is_last else RemoteSampler(links)


class RemoteSampler:
    """Implements StageSampler in a stage that is not the last: the last one samples."""

    def __init__(self, links: StageLinks) -> None:
        self._links = links
        self._newest: dict[Slot, int] = {}

    def add_row(self, row: RowAdded) -> None:
        """Do nothing: plans name the tokens of a row that has sampled none."""

    def remove_row(self, slot: Slot) -> None:
        self._newest.pop(slot, None)

    def last_token(self, slot: Slot) -> int:
        return self._newest[slot]

    def begin(self, steps: Sequence[RowStep]) -> None:
        """Do nothing: grammars are the last stage's."""

    def launch(
        self,
        logits: torch.Tensor,
        steps: Sequence[RowStep],  # noqa: ARG002
        feed: TokenFeed | None,  # noqa: ARG002
    ) -> "_ReceivedSample":
        """logits: the hidden state of all tokens, for the next stage."""
        self._links.send_hidden(logits)
        return _ReceivedSample(self)

    def close(self) -> None: ...

    def receive(self) -> list[RowResult]:
        """Receive the results of the oldest step, and note their newest tokens."""
        rows = self._links.receive_rows()
        self._newest.update((row.slot, row.token_ids[-1]) for row in rows if row.token_ids)
        return rows


class _ReceivedSample:
    """Implements PendingSample."""

    is_late = False

    def __init__(self, sampler: RemoteSampler) -> None:
        self._sampler = sampler

    def wait(self) -> None: ...

    def finish(self) -> list[RowResult]:
        return self._sampler.receive()


class SentRows:
    """Implements PendingSample in the last stage: its results go to the other stages."""

    def __init__(self, sample: PendingSample, links: StageLinks) -> None:
        self._sample = sample
        self._links = links
        self.wait = sample.wait

    @property
    def is_late(self) -> bool:
        return self._sample.is_late

    def finish(self) -> list[RowResult]:
        rows = self._sample.finish()
        self._links.send_rows(rows)
        return rows


class TrialLinks:
    """Implements StageLinks for steps whose results have no meaning: no other stage is needed."""

    def __init__(self, stage: PipelineStage, hidden_size: int, dtype: torch.dtype) -> None:
        self.stage = stage
        self._hidden_size = hidden_size
        self._dtype = dtype

    def send_hidden(self, hidden: torch.Tensor) -> None: ...

    def receive_hidden(self, num_tokens: int) -> torch.Tensor:
        return torch.zeros((num_tokens, self._hidden_size), dtype=self._dtype)

    def send_rows(self, rows: Sequence[RowResult]) -> None: ...

    def receive_rows(self) -> list[RowResult]:
        return []

    def close(self) -> None: ...
