"""Vectors of prompts, made from the hidden states of a step. Owns what the rows of pools want."""

from collections.abc import Sequence

import torch

from loraplex.core.errors import RowFailedError
from loraplex.core.plan import RowResult, RowStep, Slot
from loraplex.core.task import Pool, PoolActivation
from loraplex.execution.sampling.pending_samples import PendingSample
from loraplex.kernels.accelerator import Accelerator, DeviceEvent


def vector(x: torch.Tensor, pool: Pool) -> torch.Tensor:
    """Return the vector of a hidden state x [hidden], float32.

    A vector of fewer dimensions has the length 1 again if it is normalized, as OpenAI's have.
    """
    x = x[: pool.dimensions]
    if pool.activation is PoolActivation.SIGMOID:
        x = torch.sigmoid(x)
    elif pool.activation is PoolActivation.SOFTMAX:
        x = torch.softmax(x, -1)
    return x / torch.linalg.vector_norm(x).clamp_min(1e-12) if pool.normalize else x


class Pooler:
    """Pools by slot. Used by one thread."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._pools: dict[Slot, Pool] = {}

    def add_row(self, slot: Slot, pool: Pool) -> None:
        self._pools[slot] = pool

    def remove_row(self, slot: Slot) -> None:
        self._pools.pop(slot, None)

    def __contains__(self, slot: Slot) -> bool:
        return slot in self._pools

    def launch(self, x: torch.Tensor, steps: Sequence[RowStep]) -> "PendingVectors":
        """Send x [P, hidden], the last positions of P rows that want a vector, to the host."""
        states = self._accelerator.pinned(tuple(x.shape), torch.float32)
        self._accelerator.copy(x.float(), states)
        pools = [(step.slot, self._pools[step.slot]) for step in steps]
        return PendingVectors(states, pools, self._accelerator.event())


class PendingVectors:
    """Hidden states on their way to the host."""

    def __init__(
        self, states: torch.Tensor, pools: Sequence[tuple[Slot, Pool]], event: DeviceEvent
    ) -> None:
        self._states = states
        self._pools = pools
        self.wait = event.wait

    def finish(self) -> list[RowResult]:
        """Wait for them; return the results of their rows."""
        self.wait()
        return [
            _result(slot, vector(x, pool))
            for x, (slot, pool) in zip(self._states, self._pools, strict=True)
        ]


def _result(slot: Slot, x: torch.Tensor) -> RowResult:
    if not torch.isfinite(x).all():
        problem = RowFailedError("the model gave a hidden state that has NaN or inf")
        return RowResult(slot, error=problem.to_info())
    return RowResult(slot, pooled=x.numpy().astype("<f4").tobytes())


class MixedSample:
    """Implements PendingSample: results of a step in which some rows are pooled."""

    def __init__(
        self, steps: Sequence[RowStep], sample: PendingSample, vectors: PendingVectors | None
    ) -> None:
        """sample: of the rows that generate. vectors: None if no pooled row ends in this step."""
        self._steps = steps
        self._sample = sample
        self._vectors = vectors

    @property
    def is_late(self) -> bool:
        return self._sample.is_late

    def wait(self) -> None:
        self._sample.wait()
        if self._vectors is not None:
            self._vectors.wait()

    def finish(self) -> list[RowResult]:
        vectors = [] if self._vectors is None else self._vectors.finish()
        results = {result.slot: result for result in (*self._sample.finish(), *vectors)}
        return [results.get(step.slot) or RowResult(step.slot) for step in self._steps]
