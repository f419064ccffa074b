"""Vectors of prompts, made from the hidden states of a step. Owns what the rows of pools want."""

from collections.abc import Sequence
from typing import Protocol

import torch

from loraplex.core.errors import RowFailedError
from loraplex.core.plan import RowResult, RowStep, Slot
from loraplex.core.task import Pool, PoolActivation, PoolKind
from loraplex.execution.sampling.pending_samples import PendingSample
from loraplex.execution.vector_layers import VectorLayer
from loraplex.kernels.accelerator import Accelerator, DeviceEvent


def vector(x: torch.Tensor, pool: Pool) -> torch.Tensor:
    """Return the vector of a hidden state x [hidden], or of scores [labels or tokens], float32.

    A vector of fewer dimensions has the length 1 again if it is normalized, as OpenAI's have.
    """
    x = x[: pool.dimensions]
    if pool.activation is PoolActivation.SIGMOID:
        x = torch.sigmoid(x)
    elif pool.activation is PoolActivation.SOFTMAX:
        x = torch.softmax(x, -1) if len(x) > 1 else torch.sigmoid(x)
    return x / torch.linalg.vector_norm(x).clamp_min(1e-12) if pool.normalize else x


class StepStates(Protocol):
    """Hidden states of the tokens of a step, and what heads give for some of them."""

    def rows(self, tokens: range) -> torch.Tensor:
        """Return the hidden states of these tokens [tokens, hidden]."""
        ...

    def scores(self, tokens: Sequence[int]) -> Sequence[torch.Tensor]:
        """Return what a classification head gives for each token: float32 [labels].

        tokens: in ascending order. Without a head there are no labels.
        """
        ...

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """Return the logits of these tokens [tokens, vocab_size]. tokens: in ascending order."""
        ...


def pooled_state(states: StepStates, first: int, end: int, pool: Pool) -> torch.Tensor:
    """Return one hidden state [hidden], float32, of the tokens first to end - 1 of a step.

    They are the whole prompt, but for LAST. Sums are in float32 and in the order of the tokens of
    this prompt alone, so that other rows of the step change no bit. Weights count all tokens, also
    those that are left out, as in sentence-transformers.
    """
    if pool.kind is PoolKind.LAST:
        return states.rows(range(end - 1, end))[0].float()
    kept = first + pool.num_left_out
    if pool.kind is PoolKind.CLS:
        return states.rows(range(kept, kept + 1))[0].float()
    x = states.rows(range(kept, end)).float()
    if pool.kind is PoolKind.MEAN:
        return x.mean(0)
    numbers = (kept - first + 1, end - first + 1)
    weights = torch.arange(*numbers, dtype=torch.float32, device=x.device)
    return (x * weights[:, None]).sum(0) / weights.sum()


def token_scores(logits: torch.Tensor, pool: Pool) -> torch.Tensor:
    """Return the scores of the tokens of a pool [tokens], from all logits [vocab_size]."""
    scores = logits[list(pool.token_ids)]
    return scores - torch.logsumexp(logits, 0) if pool.is_logprobs else scores


class Pooler:
    """Pools by slot. Used by one thread."""

    def __init__(self, accelerator: Accelerator, layers: Sequence[VectorLayer] = ()) -> None:
        """layers: they follow the pooling, in their order."""
        self._accelerator = accelerator
        self._layers = layers
        self._pools: dict[Slot, Pool] = {}

    def add_row(self, slot: Slot, pool: Pool) -> None:
        self._pools[slot] = pool

    def remove_row(self, slot: Slot) -> None:
        self._pools.pop(slot, None)

    def __contains__(self, slot: Slot) -> bool:
        return slot in self._pools

    def _after_layers(self, x: torch.Tensor) -> torch.Tensor:
        """x [hidden] -> [length of vectors]"""
        for layer in self._layers:
            x = layer.forward(x.unsqueeze(0)).squeeze(0)
        return x

    def launch(
        self, states: StepStates, rows: Sequence[tuple[RowStep, int, int]]
    ) -> "PendingVectors":
        """Send the values of rows that want a vector to the host.

        rows: each with its first token in the step, and the one after its last.
        """
        pools = [self._pools[step.slot] for step, _, _ in rows]
        ends = {
            kind: [
                end - 1 for (_, _, end), pool in zip(rows, pools, strict=True) if pool.kind is kind
            ]
            for kind in (PoolKind.SCORE, PoolKind.LOGITS)
        }
        # A head reads the rows of all prompts at once; each row keeps its own values.
        scores = iter(states.scores(ends[PoolKind.SCORE]) if ends[PoolKind.SCORE] else ())
        logits = iter(states.logits(ends[PoolKind.LOGITS]) if ends[PoolKind.LOGITS] else ())
        values = []
        for (_, first, end), pool in zip(rows, pools, strict=True):
            if pool.kind is PoolKind.SCORE:
                values.append(next(scores))
            elif pool.kind is PoolKind.LOGITS:
                values.append(token_scores(next(logits).float(), pool))
            else:
                values.append(self._after_layers(pooled_state(states, first, end, pool)))
        x = torch.cat(values)
        sent = self._accelerator.pinned(tuple(x.shape), torch.float32)
        self._accelerator.copy(x, sent)
        slots = [(step.slot, pool) for (step, _, _), pool in zip(rows, pools, strict=True)]
        return PendingVectors(
            torch.split(sent, [*map(len, values)]), slots, self._accelerator.event()
        )


class PendingVectors:
    """Hidden states or scores on their way to the host."""

    def __init__(
        self,
        values: Sequence[torch.Tensor],
        pools: Sequence[tuple[Slot, Pool]],
        event: DeviceEvent,
    ) -> None:
        self._values = values
        self._pools = pools
        self.wait = event.wait

    def finish(self) -> list[RowResult]:
        """Wait for them; return the results of their rows."""
        self.wait()
        return [
            _result(slot, vector(x, pool))
            for x, (slot, pool) in zip(self._values, self._pools, strict=True)
        ]


def _result(slot: Slot, x: torch.Tensor) -> RowResult:
    problem = None
    if not torch.isfinite(x).all():
        problem = RowFailedError("the model gave a hidden state or score that is NaN or inf")
    elif not len(x):
        problem = RowFailedError("neither the model nor its adapter has a classification head")
    if problem is not None:
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
