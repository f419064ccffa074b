"""Sampling in two phases: launched, and finished when the host wants to know.

Tokens sampled on the device stay there for the next step, and are copied to the host. So a step can
be launched before the host knows what the step before it gave.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from loraplex.core.errors import RowFailedError
from loraplex.core.plan import RowResult, RowStep, Slot, Wanted
from loraplex.execution.mirror import Mirror
from loraplex.execution.sampling.rows import SampledRow
from loraplex.kernels.accelerator import Accelerator, DeviceEvent

NO_TOKEN = -1
"""Token of a row whose logits are not finite."""
NOTHING_LEFT = -2
"""Token of a row whose grammar allows none."""


class TokenFeed:
    """The newest token of every slot whose row was sampled there. Within accelerator.compute()."""

    def __init__(self, accelerator: Accelerator, max_num_seqs: int) -> None:
        self._accelerator = accelerator
        self._max_num_seqs = max_num_seqs
        self.newest = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=accelerator.device)
        """Newest token by slot, negative if there is none; the last element stands for no slot and
        is 0."""
        self._slots = _Indices(accelerator, max_num_seqs)
        self._rows = _Indices(accelerator, max_num_seqs)
        self._bitmasks = Mirror(accelerator, 0)
        self._free: list[torch.Tensor] = []

    def event(self) -> DeviceEvent:
        """Return an event after all work that is enqueued by now."""
        return self._accelerator.event()

    def rows(self, rows: list[int]) -> torch.Tensor:
        """[n] int64 on the device, until the next call."""
        return self._rows.tensor(rows)

    def bitmasks(self, bitmasks: npt.NDArray[np.int32]) -> torch.Tensor:
        """Return [n, words] int32 on the device, until the next call."""
        (sent,) = self._bitmasks.send([bitmasks.reshape(-1)])
        return sent.view(bitmasks.shape)

    def put(
        self, slots: list[Slot], tokens: torch.Tensor, places: list[int] | None = None
    ) -> "SentTokens":
        """Send tokens [n] int64 to the host, and keep the newest ones of these slots.

        places: where the token of each slot is; None: there are as many tokens as slots. The other
        tokens are of rows with draft tokens, whose newest token only the host finds.
        """
        if slots:
            newest = tokens if places is None else tokens.index_select(0, self.rows(places))
            self.newest.index_copy_(0, self._slots.tensor(slots), newest)
        num_tokens = len(tokens)
        is_usual = num_tokens <= self._max_num_seqs
        buffer = self._free.pop() if self._free and is_usual else self._pinned(num_tokens)
        returned = buffer[:num_tokens]
        if num_tokens:
            self._accelerator.copy(tokens, returned)
        return SentTokens(self._free, buffer, returned, self._accelerator.event())

    def _pinned(self, num_tokens: int) -> torch.Tensor:
        return self._accelerator.pinned((max(num_tokens, self._max_num_seqs),), torch.int64)


class SentTokens:
    """Tokens on their way to the host."""

    def __init__(
        self,
        free: list[torch.Tensor],
        buffer: torch.Tensor,
        tokens: torch.Tensor,
        event: DeviceEvent,
    ) -> None:
        """buffer: what `tokens` is a view of; it is `free` once they have been taken."""
        self._free = free
        self._buffer = buffer
        self._tokens = tokens
        self._event = event

    def wait(self) -> None:
        """Wait until they are on the host and the step that sampled them has ended."""
        self._event.wait()

    def take(self) -> list[int]:
        """Call it once."""
        self._event.wait()
        tokens: list[int] = self._tokens.tolist()
        self._free.append(self._buffer)
        return tokens


class _Indices:
    """Sent only if they are not those of the call before: most steps have the rows of the last."""

    def __init__(self, accelerator: Accelerator, capacity: int) -> None:
        self._mirror = Mirror(accelerator, capacity * np.dtype(np.int64).itemsize)
        self._sent: list[int] = []
        self._tensor: torch.Tensor | None = None

    def tensor(self, indices: list[int]) -> torch.Tensor:
        if self._tensor is None or self._sent != indices:
            self._sent = indices
            (self._tensor,) = self._mirror.send([np.array(self._sent, np.int64)])
        return self._tensor


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

    def __init__(self, sample: Callable[[], list[RowResult]], has_logits: DeviceEvent) -> None:
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
