"""Samples in two phases: launched, and finished when the host wants to know."""

import itertools
from collections.abc import Callable, Sequence
from typing import Protocol

from loraplex.core.errors import RowFailedError
from loraplex.core.plan import RowResult, RowStep, Slot, Wanted
from loraplex.execution.sampling.rows import SampledRow
from loraplex.execution.sampling.token_feed import SentTokens
from loraplex.kernels.accelerator import Event


class PendingSample(Protocol):
    """One step's."""

    @property
    def is_late(self) -> bool:
        """Whether its tokens are not even on the device before finish()."""
        ...

    def wait(self) -> None:
        """Wait until the device has computed what finish() needs."""
        ...

    def finish(self) -> list[RowResult]:
        """Finish as Sampler.sample. To be called again only if it raised: then nothing changed."""
        ...


class EndedSample:
    """Implements PendingSample."""

    is_late = False

    def __init__(self, results: list[RowResult]) -> None:
        self._results = results

    def wait(self) -> None:
        pass

    def finish(self) -> list[RowResult]:
        return self._results


class LateSample:
    """Implements PendingSample: needs the host, which takes part when the logits are there."""

    is_late = True

    def __init__(self, sample: Callable[[], list[RowResult]], has_logits: Event) -> None:
        self._sample = sample
        self._has_logits = has_logits

    def wait(self) -> None:
        self._has_logits.wait()

    def finish(self) -> list[RowResult]:
        return self._sample()


class SentSample:
    """Implements PendingSample: the tokens are on their way."""

    is_late = False

    def __init__(
        self,
        steps: Sequence[RowStep],
        rows: Sequence[SampledRow | None],
        sent: SentTokens,
        take: Callable[[RowStep, SampledRow, Sequence[int]], RowResult],
    ) -> None:
        """rows: of each step; None: its row is deferred. take: gives a row its tokens, of which
        there is one more than draft tokens."""
        self._steps = steps
        self._rows = rows
        self._sent = sent
        self._take = take
        for step, row in zip(steps, rows, strict=True):
            if row is not None and step.wanted is not Wanted.NONE:
                row.num_pending += 1

    def wait(self) -> None:
        self._sent.wait()

    def finish(self) -> list[RowResult]:
        tokens = iter(self._sent.take())
        results = []
        for step, row in zip(self._steps, self._rows, strict=True):
            if step.wanted is Wanted.NONE:
                results.append(RowResult(step.slot))
            elif row is None:
                results.append(RowResult(step.slot, is_deferred=True))
            else:
                row.num_pending -= 1
                drawn = list(itertools.islice(tokens, 1 + len(step.draft_token_ids)))
                results.append(self._take(step, row, drawn))
        return results


def not_finite(slot: Slot) -> RowResult:
    """Result of a row whose logits cannot be sampled."""
    reason = "the model gave logits that are NaN or inf"
    return RowResult(slot, error=RowFailedError(f"no token could be sampled: {reason}").to_info())
