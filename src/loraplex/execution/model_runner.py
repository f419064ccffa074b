"""Computes step plans with one base model on one device: the engine's `Runner`.

Owns the decoder, the KV storage, the adapter pool and the sampler. What a plan may name, and what
it means for requests, only the scheduler knows.
"""

import dataclasses
import logging
import time
from collections.abc import Sequence

import msgspec
import torch

from loraplex.core.adapter import AdapterHandle
from loraplex.core.errors import (
    AdapterLoadError,
    ErrorInfo,
    LoraplexError,
    RowFailedError,
    StepFailedError,
)
from loraplex.core.plan import (
    AdapterCopy,
    Capacity,
    RowResult,
    RowStep,
    Slot,
    StepPlan,
    StepResult,
    StepTiming,
)
from loraplex.execution.adapter_bank import AdapterBank
from loraplex.execution.host_adapters import HostAdapter, HostAdapters
from loraplex.execution.input_batch import InputBatch, StepInputs
from loraplex.execution.kv_cache import KVCache
from loraplex.execution.sampling.sampler import Sampler
from loraplex.models.decoder import Decoder

_LOGGER = logging.getLogger(__name__)

CopyFailures = tuple[tuple[AdapterHandle, ErrorInfo], ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunnerParts:
    """What a runner is put together from; execution.loading does so for a model folder."""

    decoder: Decoder
    kv_cache: KVCache
    adapter_bank: AdapterBank
    host_adapters: HostAdapters
    sampler: Sampler
    capacity: Capacity
    device: torch.device


class CompletedStep:
    """A step that ran within `launch`."""

    def __init__(self, outcome: StepResult | StepFailedError) -> None:
        self._outcome = outcome

    def wait(self) -> StepResult:
        if isinstance(self._outcome, StepFailedError):
            raise self._outcome
        return self._outcome


@dataclasses.dataclass(frozen=True, slots=True)
class PreparedStep:
    """For ModelRunner.run."""

    plan: StepPlan
    inputs: StepInputs | Exception | None
    """None: it has no rows. An exception: why it cannot run."""
    prepare_ns: int


class ModelRunner:
    """Used by one thread, but for `prepare_adapter`; or by two: one prepares, one runs.

    With `launch`, a step runs within it.
    """

    def __init__(self, parts: RunnerParts) -> None:
        self._decoder = parts.decoder
        self._kv_cache = parts.kv_cache
        self._adapter_bank = parts.adapter_bank
        self._host_adapters = parts.host_adapters
        self._sampler = parts.sampler
        self._capacity = parts.capacity
        self._batch = InputBatch(
            parts.capacity.max_num_seqs,
            parts.capacity.max_model_len,
            parts.capacity.block_size,
            parts.device,
        )

    def capacity(self) -> Capacity:
        return self._capacity

    def prepare_adapter(self, adapter: HostAdapter) -> HostAdapter:
        """AdapterBank.prepare, for the loader's thread."""
        return self._adapter_bank.prepare(adapter)

    def launch(self, plan: StepPlan) -> CompletedStep:
        """Never raises: what goes wrong is raised by wait()."""
        return self.run(self.prepare(plan))

    def prepare(self, plan: StepPlan) -> PreparedStep:
        """What can be done before the steps before it have run, also while they do.

        Plans are prepared in their order, by one thread. Never raises.
        """
        start_ns = time.monotonic_ns()
        try:
            with torch.inference_mode():
                inputs = self._prepare(plan)
        except Exception as error:
            return PreparedStep(plan, error, time.monotonic_ns() - start_ns)
        return PreparedStep(plan, inputs, time.monotonic_ns() - start_ns)

    def run(self, step: PreparedStep) -> CompletedStep:
        """Steps run in their order, by one thread; one that was prepared need not run."""
        plan = step.plan
        try:
            if isinstance(step.inputs, Exception):
                raise step.inputs
            with torch.inference_mode():
                return CompletedStep(self._execute(plan, step.inputs, step.prepare_ns))
        except Exception as error:
            _LOGGER.exception("step %d failed", plan.step_id)
            return CompletedStep(StepFailedError(f"step {plan.step_id} failed: {error}"))

    def close(self) -> None:
        self._sampler.close()

    def _prepare(self, plan: StepPlan) -> StepInputs | None:
        for slot in plan.removed:
            self._batch.remove_row(slot)
        for row in plan.added:
            self._batch.add_row(row)
        return self._batch.prepare(plan.rows) if plan.rows else None

    def _execute(self, plan: StepPlan, inputs: StepInputs | None, prepare_ns: int) -> StepResult:
        start_ns = time.monotonic_ns() - prepare_ns
        for slot in plan.removed:
            self._sampler.remove_row(slot)
        for row in plan.added:
            known = tuple(self._in_vocabulary(token_id) for token_id in row.token_ids)
            self._sampler.add_row(msgspec.structs.replace(row, token_ids=known))
        self._kv_cache.offload_blocks(plan.block_offloads)
        self._kv_cache.load_blocks(plan.block_loads)
        self._kv_cache.copy_blocks(plan.block_copies)
        copies_start_ns = time.monotonic_ns()
        copies_done, copies_failed = self._copy_adapters(plan.adapter_copies)
        copy_ns = time.monotonic_ns() - copies_start_ns
        rows, timing = self._run_rows(plan.rows, inputs, start_ns) if inputs else ((), StepTiming())
        if copies_done:
            timing = msgspec.structs.replace(timing, copy_ns=copy_ns)
        return StepResult(plan.step_id, rows, copies_done, copies_failed, timing)

    def _copy_adapters(
        self, copies: Sequence[AdapterCopy]
    ) -> tuple[tuple[AdapterHandle, ...], CopyFailures]:
        done, failed = [], []
        for copy in copies:
            try:
                self._copy_adapter(copy)
                done.append(copy.handle)
            except LoraplexError as error:
                failed.append((copy.handle, error.to_info()))
            except Exception as error:
                # A step that failed is planned again with its copies: it would fail for ever.
                _LOGGER.exception("copying adapter %s failed", copy.handle)
                reason = AdapterLoadError(f"copying adapter {copy.handle} failed: {error}")
                failed.append((copy.handle, reason.to_info()))
        return tuple(done), tuple(failed)

    def _copy_adapter(self, copy: AdapterCopy) -> None:
        host = self._host_adapters.get(copy.handle)
        if host is None:
            raise AdapterLoadError(f"adapter {copy.handle} is not in host memory")
        self._adapter_bank.copy(copy.handle, host, copy.page_ids)

    def _run_rows(
        self, steps: Sequence[RowStep], inputs: StepInputs, start_ns: int
    ) -> tuple[tuple[RowResult, ...], StepTiming]:
        faults = self._faults(steps, inputs)
        # A row that fails anyhow is computed by the base model.
        lora = self._adapter_bank.lora_batch(
            tuple(
                (step.num_tokens, () if step.slot in faults else adapters)
                for step, adapters in zip(steps, inputs.adapters, strict=True)
            )
        )
        token_ids = [
            [self._in_vocabulary(token_id) for token_id in self._token_ids(step)] for step in steps
        ]
        batch = inputs.with_tokens(token_ids, lora)
        self._sampler.begin(steps)
        prepared_ns = time.monotonic_ns()
        logits = self._decoder.forward(batch, self._kv_cache.storages)
        computed_ns = time.monotonic_ns()
        results = tuple(
            RowResult(result.slot, error=faults[result.slot]) if result.slot in faults else result
            for result in self._sampler.sample(logits, steps)
        )
        timing = StepTiming(
            prepare_ns=prepared_ns - start_ns,
            forward_ns=computed_ns - prepared_ns,
            sample_ns=time.monotonic_ns() - computed_ns,
        )
        return results, timing

    def _token_ids(self, step: RowStep) -> Sequence[int]:
        if step.token_ids is not None:
            token_ids = step.token_ids
        else:
            token_ids = (self._sampler.last_token(step.slot), *step.draft_token_ids)
        assert len(token_ids) == step.num_tokens, "a token for each position"
        return token_ids

    def _in_vocabulary(self, token_id: int) -> int:
        """The token, or 0 for what is none: its row fails, but must not take the device along."""
        return token_id if 0 <= token_id < self._capacity.vocab_size else 0

    def _faults(self, steps: Sequence[RowStep], inputs: StepInputs) -> dict[Slot, ErrorInfo]:
        """The rows that cannot be right whatever is computed; the others go on."""
        faults = {}
        for step, adapters in zip(steps, inputs.adapters, strict=True):
            reason = self._fault(step, adapters)
            if reason is not None:
                faults[step.slot] = RowFailedError(reason).to_info()
        return faults

    def _fault(
        self, step: RowStep, adapters: tuple[tuple[AdapterHandle, float], ...]
    ) -> str | None:
        for handle, _ in adapters:
            if not self._adapter_bank.holds(handle):
                return f"adapter {handle} is not on the device"
        for token_id in (*(step.token_ids or ()), *step.draft_token_ids):
            if not 0 <= token_id < self._capacity.vocab_size:
                return f"token {token_id} is not in the vocabulary"
        return None
