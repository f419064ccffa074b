"""Samples in two phases: launched, and finished when the host wants to know."""

from collections.abc import Callable, Sequence
from typing import Protocol

from loraplex.core.errors import RowFailedError
from loraplex.core.plan import LogitsNeeded, RowResult, RowStep, Slot
from loraplex.execution.sampling.rows import SampledRow
from loraplex.execution.sampling.token_feed import NO_TOKEN, SentTokens
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
        self, steps: Sequence[RowStep], rows: Sequence[SampledRow], sent: SentTokens
    ) -> None:
        """rows: of the steps that draw a token, one each."""
        self._steps = steps
        self._rows = rows
        self._sent = sent
        for row in rows:
            row.num_pending += 1

    def wait(self) -> None:
        self._sent.wait()

    def finish(self) -> list[RowResult]:
        drawn = iter(zip(self._rows, self._sent.take(), strict=True))
        return [
            RowResult(step.slot)
            if step.logits is LogitsNeeded.NONE
            else _taken(step.slot, *next(drawn))
            for step in self._steps
        ]


def _taken(slot: Slot, row: SampledRow, token_id: int) -> RowResult:
    row.num_pending -= 1
    if token_id == NO_TOKEN:
        return not_finite(slot)
    row.append((token_id,))
    return RowResult(slot, (token_id,))


def not_finite(slot: Slot) -> RowResult:
    """Result of a row whose logits cannot be sampled."""
    reason = "the model gave logits that are NaN or inf"
    return RowResult(slot, error=RowFailedError(f"no token could be sampled: {reason}").to_info())
