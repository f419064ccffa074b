"""Computes step plans with one base model on one device: the engine's `Runner`.

Owns the decoder, the KV storage, the adapter pool and the sampler. What a plan may name, and what
it means for requests, only the scheduler knows.
"""

import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Iterable, Mapping, Sequence

from loraplex.core.adapter import AdapterHandle
from loraplex.core.errors import (
    AdapterLoadError,
    ErrorInfo,
    LoraplexError,
    RowFailedError,
)
from loraplex.core.plan import (
    AdapterCopy,
    Capacity,
    RowStep,
    Slot,
    StepPlan,
    StepResult,
)
from loraplex.execution.adapters.bank import AdapterBank
from loraplex.execution.adapters.host_adapters import HostAdapter
from loraplex.execution.steps.computer import LaunchedRows, StepComputer, StepWatch
from loraplex.execution.steps.image_rows import ImageRows
from loraplex.execution.steps.input_batch import (
    EncoderInput,
    InputBatch,
    StepInputs,
    groups_of_encoders,
    groups_of_states,
)
from loraplex.execution.steps.launched_step import LaunchedStep, LaunchedSteps, StepWork
from loraplex.execution.steps.runner_parts import RunnerParts

_LOGGER = logging.getLogger(__name__)

CopyFailures = tuple[tuple[AdapterHandle, ErrorInfo], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class PreparedStep:
    """Step that ModelRunner.run can execute."""

    plan: StepPlan
    inputs: StepInputs | Exception | None
    """None: it has no rows. An exception: why it cannot run."""
    prepare_ns: int
    texts: tuple[EncoderInput, ...] = ()
    """Inputs of encoders that it encodes."""


class ModelRunner:
    """Used by one thread, but for `prepare_adapter`; or by two: one prepares, one runs.

    Without an accelerator a step runs within `launch`. With one it is only enqueued, and may follow
    another one that was not waited for; `wait` then gives it the host's part.
    """

    def __init__(self, parts: RunnerParts) -> None:
        self._decoder = parts.decoder
        self._kv_cache = parts.kv_cache
        self._adapter_bank = parts.adapter_bank
        self._cutter = parts.adapter_cutter
        self._host_adapters = parts.host_adapters
        self._sampler = parts.sampler
        self._links = parts.links
        self._storing = parts.storing
        self._kernels = parts.kernels
        self._capacity = parts.capacity
        self._batch = InputBatch(
            parts.capacity.max_num_seqs,
            parts.capacity.max_model_len,
            parts.capacity.block_size,
            len(parts.capacity.cache_groups),
            parts.capacity.rotation_border,
            states=groups_of_states(parts.capacity),
            reads_images=parts.capacity.images is not None,
            encoder_groups=groups_of_encoders(parts.capacity),
            longest_encoder_input=parts.capacity.longest_encoder_input,
        )
        assert (parts.text_encoder is None) != bool(parts.capacity.longest_encoder_input)
        self._images: ImageRows | None = None
        if parts.encoder is not None:
            assert parts.capacity.images is not None, "its capacity is missing"
            self._images = ImageRows(
                parts.encoder,
                parts.capacity.images,
                parts.decoder.spec.hidden_size,
                parts.decoder.dtype,
                parts.device,
            )
        self._computer = StepComputer(parts, self._images)
        self._launched = LaunchedSteps(self._computer.accelerator.synchronize)

    def capacity(self) -> Capacity:
        return self._capacity

    def set_capacity(self, capacity: Capacity) -> None:
        """Replace the capacity by one with measured bytes; its numbers of blocks and pages stay."""
        self._capacity = capacity

    def record_steps(self) -> None:
        """Record the steps of the recorded sizes: once, when all memory has been taken."""
        self._computer.record()

    def forget_steps(self) -> None:
        """Free the memory of the recorded steps."""
        self._computer.forget_recorded()

    def prepare_adapter(self, adapter: HostAdapter) -> HostAdapter:
        """AdapterBank.prepare of this rank's share, for the loader's thread."""
        if self._cutter is not None:
            adapter = self._cutter.cut(adapter)
        return self._adapter_bank.prepare(adapter)

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Launch a step. wait() raises what goes wrong in it. Raises DeviceLost."""
        return self.run(self.prepare(plan))

    def prepare(self, plan: StepPlan) -> PreparedStep:
        """Do the part of a step that does not depend on the results of earlier steps.

        Plans are prepared in their order, by one thread. Never raises.
        """
        start_ns = time.monotonic_ns()
        try:
            for slot in plan.removed:
                self._batch.remove_row(slot)
            for row in plan.added:
                self._batch.add_row(row)
            inputs = self._batch.prepare(plan.rows) if plan.rows else None
            texts = self._batch.encoder_inputs(plan.encoded_texts) if plan.encodes else ()
        except Exception as error:
            return PreparedStep(plan, error, time.monotonic_ns() - start_ns)
        return PreparedStep(plan, inputs, time.monotonic_ns() - start_ns, texts)

    def run(self, step: PreparedStep) -> LaunchedStep:
        """Launch a prepared step. Steps run in their order, by one thread; some may never run."""
        return self._launched.launch(step.plan.step_id, functools.partial(self._execute, step))

    def close(self) -> None:
        with contextlib.ExitStack() as stack:  # closes the last one first
            for part in (self._storing, self._links, self._sampler):
                if part is not None:
                    stack.callback(part.close)

    def _execute(self, step: PreparedStep) -> StepWork:
        if isinstance(step.inputs, Exception):
            raise step.inputs
        if self._storing is not None:
            self._storing.note_step()
        plan, watch = step.plan, StepWatch(step.prepare_ns)
        with self._computer.computing():
            for slot in plan.removed:
                self._computer.remove_row(slot)
            for row in plan.added:
                self._computer.add_row(row)
            if plan.block_offloads or plan.block_loads or plan.block_copies:
                self._kv_cache.offload_blocks(plan.block_offloads)
                self._kv_cache.load_blocks(plan.block_loads)
                self._kv_cache.copy_blocks(plan.block_copies)
            copies_start_ns = time.monotonic_ns()
            copies_failed = self._start_copies(plan.adapter_copies)
            copy_ns = time.monotonic_ns() - copies_start_ns
            if plan.encodes and self._images is not None:
                self._images.encode(plan.encoded_images)
            rows = None
            if step.inputs is not None:
                faults = self._faults(plan.rows, step.inputs)
                if step.texts:
                    self._encode(step.texts, faults, watch)
                rows = self._run_rows(plan.rows, step.inputs, faults, watch)
        return _LaunchedWork(self._adapter_bank, plan, rows, copies_failed, watch, copy_ns)

    def _start_copies(self, copies: Sequence[AdapterCopy]) -> CopyFailures:
        """Start the copies, and return those that cannot be made."""
        failed = []
        for copy in copies:
            try:
                host = self._host_adapters.get(copy.handle)
                if host is None:
                    raise AdapterLoadError(f"adapter {copy.handle} is not in host memory")
                self._adapter_bank.copy(copy.handle, host, copy.page_ids)
            except LoraplexError as error:
                failed.append((copy.handle, error.to_info()))
            except Exception as error:
                # A failed step is planned again with its copies, and would fail without end.
                _LOGGER.exception("copying adapter %s failed", copy.handle)
                reason = AdapterLoadError(f"copying adapter {copy.handle} failed: {error}")
                failed.append((copy.handle, reason.to_info()))
        return tuple(failed)

    def _encode(
        self, texts: Sequence[EncoderInput], faults: dict[Slot, ErrorInfo], watch: StepWatch
    ) -> None:
        """Encode the inputs of rows without faults; those that cannot be encoded are new faults."""
        assert self._computer.text_inputs is not None, "there is an encoder"
        encode = self._computer.text_inputs.encode
        watch.prepare_ns += watch.lap()
        lora_ns = self._kernels.lora_ns
        for text in [text for text in texts if text.slot not in faults]:
            reason = self._outside(text.token_ids)
            error = RowFailedError(reason).to_info() if reason is not None else encode(text)
            if error is not None:
                faults[text.slot] = error
        watch.add_lora(lora_ns, self._kernels.lora_ns)
        watch.forward_ns += watch.lap()

    def _run_rows(
        self,
        steps: Sequence[RowStep],
        inputs: StepInputs,
        faults: Mapping[Slot, ErrorInfo],
        watch: StepWatch,
    ) -> LaunchedRows:
        self._sampler.begin(steps)
        return LaunchedRows(self._computer, steps, inputs, faults, watch)

    def _faults(self, steps: Sequence[RowStep], inputs: StepInputs) -> dict[Slot, ErrorInfo]:
        """Return the rows that fail whatever is computed; the others go on."""
        faults, of_cells = {}, {}
        if inputs.encoded_spans and self._images is not None:
            of_cells = self._images.problems(inputs.encoded_spans)
        for step, adapters in zip(steps, inputs.adapters, strict=True):
            reason = self._fault(step, adapters)
            if of_cells and reason is None:
                reason = next(filter(None, map(of_cells.get, step.image_cells)), None)
            if reason is not None:
                faults[step.slot] = RowFailedError(reason).to_info()
        return faults

    def _fault(
        self, step: RowStep, adapters: tuple[tuple[AdapterHandle, float], ...]
    ) -> str | None:
        for handle, _ in adapters:
            if not self._adapter_bank.holds(handle):
                return f"adapter {handle} is not on the device"
        if step.token_ids is None and not step.draft_token_ids:
            return None
        return self._outside((*(step.token_ids or ()), *step.draft_token_ids))

    def _outside(self, token_ids: Iterable[int]) -> str | None:
        """Return that a token is not in the vocabulary; None if all are."""
        for token_id in token_ids:
            if not 0 <= token_id < self._capacity.vocab_size:
                return f"token {token_id} is not in the vocabulary"
        return None


@dataclasses.dataclass(frozen=True, slots=True)
class _LaunchedWork:
    """Implements StepWork."""

    adapter_bank: AdapterBank
    plan: StepPlan
    rows: LaunchedRows | None
    copies_failed: CopyFailures
    watch: StepWatch
    copy_ns: int

    @property
    def is_late(self) -> bool:
        return self.rows is not None and self.rows.is_late

    def finish(self) -> StepResult:
        plan = self.plan
        rows = () if self.rows is None else self.rows.finish()
        # Last, because an arrival is reported only once.
        has_news = bool(rows or self.copies_failed)
        arrived = self.adapter_bank.arrived(wait=not has_news)
        timing = self.watch.timing(self.copy_ns if plan.adapter_copies else 0)
        return StepResult(plan.step_id, rows, arrived, self.copies_failed, timing)
