"""Computes the rows of a step: from token ids over logits to new tokens.

On an accelerator all of it is only enqueued, if nothing in it needs the host; steps that only
decode are then as large as a recorded one.
"""

import bisect
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import msgspec
import torch
from tqdm import tqdm

from loraplex.core.errors import ErrorInfo
from loraplex.core.plan import RowAdded, RowResult, RowStep, Slot, StepTiming, Wanted
from loraplex.core.task import Pool
from loraplex.execution.pooling import MixedSample, PendingVectors, Pooler
from loraplex.execution.sampling.pending_samples import EndedSample, PendingSample, TokenFeed
from loraplex.execution.sizing.shortage import RowsThatFit
from loraplex.execution.steps.image_rows import ImageRows
from loraplex.execution.steps.input_batch import (
    StepInputs,
    groups_of_encoders,
    groups_of_states,
    no_rows,
)
from loraplex.execution.steps.runner_parts import RunnerParts
from loraplex.execution.steps.stages import SentRows
from loraplex.execution.steps.tensors import ON_DEVICE, DeviceTensors, HostTensors, StepTensors
from loraplex.execution.steps.text_inputs import TextInputs
from loraplex.kernels.accelerator import Accelerator, HostAccelerator
from loraplex.kernels.lora import LoraBatch
from loraplex.models.batch import ForwardBatch
from loraplex.models.decoder import Decoder


class StepWatch:
    """`watch.forward_ns += watch.lap()`, and so on."""

    def __init__(self, prepare_ns: int) -> None:
        """prepare_ns: spent before."""
        self.prepare_ns = prepare_ns
        self.forward_ns = 0
        """Time until the forward pass is enqueued, plus, on an accelerator, until it has ended."""
        self.sample_ns = 0
        self.lora_ns: int | None = None
        """Part of forward_ns; None: not measured."""
        self._last_ns = time.monotonic_ns()

    def lap(self) -> int:
        """Return the time since the last call."""
        last_ns, self._last_ns = self._last_ns, time.monotonic_ns()
        return self._last_ns - last_ns

    def add_lora(self, before_ns: int | None, after_ns: int | None) -> None:
        """Add the time between two counts of the backend."""
        if before_ns is not None and after_ns is not None:
            self.lora_ns = (self.lora_ns or 0) + after_ns - before_ns

    def timing(self, copy_ns: int) -> StepTiming:
        return StepTiming(
            self.prepare_ns, self.forward_ns, self.sample_ns, copy_ns, lora_ns=self.lora_ns
        )


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class DecoderStates:
    """Implements StepStates."""

    decoder: Decoder
    batch: ForwardBatch
    x: torch.Tensor
    """Hidden states [T, hidden] of all tokens."""

    def rows(self, tokens: range) -> torch.Tensor:
        return self.decoder.read_rows(self.x, self._indices(tokens))

    def scores(self, tokens: Sequence[int]) -> Sequence[torch.Tensor]:
        return self.decoder.scores(self.x, self._indices(tokens), self.batch)

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        batch = dataclasses.replace(self.batch, logits_indices=self._indices(tokens))
        return self.decoder.logits(self.x, batch)

    def _indices(self, tokens: Sequence[int]) -> torch.Tensor:
        return torch.tensor(tokens, device=self.x.device)


_BAR_DELAY_SECONDS = 3.0
"""Recording that takes longer shows a progress bar."""


class StepComputer:
    """Used by one thread."""

    def __init__(self, parts: RunnerParts, images: ImageRows | None = None) -> None:
        """images: what the encoder of images gave; None: there is none."""
        self._images = images
        self._decoder = parts.decoder
        self._kv_cache = parts.kv_cache
        self._adapter_bank = parts.adapter_bank
        self._sampler = parts.sampler
        self._vocab_size = parts.capacity.vocab_size
        self._num_cache_groups = len(parts.capacity.cache_groups)
        self._states = groups_of_states(parts.capacity)
        self._encoder_groups = groups_of_encoders(parts.capacity)
        self._recorded_sizes = parts.recorded_sizes
        self._kernels = parts.kernels
        self.is_alone = parts.adapter_cutter is None
        """Whether this is the only rank."""
        self._links = parts.links
        self._device = parts.device
        self._hidden: torch.Tensor | None = None
        """Place of what the stage before computed, for recorded steps."""
        self.accelerator: Accelerator = parts.accelerator or HostAccelerator()
        self._pooler = Pooler(self.accelerator, parts.vector_layers)
        self._feed: TokenFeed | None = None
        self._tensors: StepTensors = HostTensors(parts.device)
        if parts.accelerator is not None:
            num_recorded = max(parts.recorded_sizes, default=0)
            with self._computing():
                self._feed = TokenFeed(parts.accelerator, parts.capacity.max_num_seqs)
                self._tensors = DeviceTensors(
                    parts.accelerator, self._feed, parts.capacity, num_recorded
                )
                if self._takes_hidden:
                    shape = (num_recorded, parts.decoder.spec.hidden_size)
                    dtype = parts.decoder.dtype
                    self._hidden = torch.zeros(shape, dtype=dtype, device=parts.device)
        self.text_inputs: TextInputs | None = None
        """None: the model has no encoder."""
        if parts.text_encoder is not None:
            self.text_inputs = TextInputs(
                parts.text_encoder,
                parts.decoder,
                parts.kv_cache,
                parts.adapter_bank,
                self._tensors,
                trim=self.accelerator.trim,
                is_alone=self.is_alone,
            )

    @property
    def _takes_hidden(self) -> bool:
        return self._links is not None and not self._links.stage.is_first

    def computing(self) -> AbstractContextManager[None]:
        """Return the block in which tensors of steps may be used."""
        if self._feed is None and torch.is_inference_mode_enabled():
            return nullcontext()  # to enter it costs 20 us, as a step has just filled the caches
        return self._computing()

    @contextmanager
    def _computing(self) -> Iterator[None]:
        with torch.inference_mode(), self.accelerator.compute():
            yield

    def compute(
        self,
        steps: Sequence[RowStep],
        inputs: StepInputs,
        faults: Mapping[Slot, ErrorInfo],
        rows: Sequence[int],
        watch: StepWatch,
    ) -> PendingSample:
        """Compute these rows. If it raises, no row has changed.

        faults: rows that cannot be right whatever is computed.
        """
        steps = [steps[row] for row in rows]
        inputs = self._as_recorded(inputs.of_rows(rows))
        batch = self._tensors.batch(
            inputs, [self._token_ids(step) for step in steps], self._lora(steps, inputs, faults)
        )
        if inputs.encoded_spans and self._images is not None:
            encoded = self._images.of_spans(inputs.encoded_spans)
            batch = dataclasses.replace(batch, encoded=encoded)
        watch.prepare_ns += watch.lap()
        hidden = self._received(batch.token_ids.shape[0])
        lora_ns = self._kernels.lora_ns
        output, vectors = self._forward(batch, inputs, steps, hidden)
        watch.add_lora(lora_ns, lora_ns if batch.lora is None else self._kernels.lora_ns)
        watch.forward_ns += watch.lap()
        sample = self._launch(output, steps, vectors)
        watch.sample_ns += watch.lap()
        return sample

    def _forward(
        self,
        batch: ForwardBatch,
        inputs: StepInputs,
        steps: Sequence[RowStep],
        hidden: torch.Tensor | None,
    ) -> tuple[torch.Tensor, PendingVectors | None]:
        """Compute the logits, or the hidden state for the next stage, and vectors of prompts."""
        decoder, storages = self._decoder, self._kv_cache.storages
        if not decoder.spec.is_last_stage:
            return decoder.forward(batch, storages, hidden), None
        num_logits = len(inputs.logits_indices)
        pooled = [row for row, step in enumerate(steps) if step.wanted is Wanted.POOL]
        if not pooled:
            logits = decoder.forward(batch, storages, hidden)
            # A view costs more than it seems: the weights have just filled the caches.
            return (logits if logits.shape[0] == num_logits else logits[:num_logits]), None
        x = decoder.hidden_states(batch, storages, hidden)
        ends = inputs.query_start_loc
        rows = [(steps[row], ends[row], ends[row + 1]) for row in pooled]
        vectors = self._pooler.launch(DecoderStates(decoder, batch, x), rows)
        return decoder.logits(x, batch)[:num_logits], vectors

    def _launch(
        self, output: torch.Tensor, steps: Sequence[RowStep], vectors: PendingVectors | None
    ) -> PendingSample:
        """Sample the rows that generate; the last stage sends the results of all rows."""
        if not self._decoder.spec.is_last_stage:
            return self._sampler.launch(output, steps, self._feed)
        sampled = [step for step in steps if step.slot not in self._pooler]
        if len(sampled) == len(steps):
            sample = self._sampler.launch(output, steps, self._feed)
        else:
            sample = EndedSample([])
            if sampled:
                sample = self._sampler.launch(output, sampled, self._feed)
            sample = MixedSample(steps, sample, vectors)
        return sample if self._links is None else SentRows(sample, self._links)

    def add_row(self, row: RowAdded) -> None:
        """Let a sequence take a slot."""
        if isinstance(row.task, Pool):
            self._pooler.add_row(row.slot, row.task)
            return
        ids = row.token_ids
        # A beam that forks joins with all its tokens: two calls in C instead of one for each token.
        if ids and not 0 <= min(ids) <= max(ids) < self._vocab_size:
            row = msgspec.structs.replace(row, token_ids=tuple(map(self._in_vocabulary, ids)))
        self._sampler.add_row(row)

    def remove_row(self, slot: Slot) -> None:
        self._sampler.remove_row(slot)
        self._pooler.remove_row(slot)

    def record(self) -> None:
        """Compute a step of each recorded size, without and with LoRA, so that it is recorded."""
        if not self._recorded_sizes:
            return
        with (
            self._kernels.recording(),
            self.computing(),
            tqdm(
                self._recorded_sizes[::-1],
                desc="recording steps",
                unit="size",
                leave=False,
                delay=_BAR_DELAY_SECONDS,
                disable=None,  # only where a person watches
            ) as sizes,
        ):
            for size in sizes:
                self._record(size)
            self.accelerator.synchronize()

    def forget_recorded(self) -> None:
        self._kernels.forget_recorded()

    def _record(self, size: int) -> None:
        inputs = dataclasses.replace(
            no_rows(self._num_cache_groups, self._states, self._encoder_groups), num_padding=size
        )
        blank = self._adapter_bank.blank_batch(size)
        for lora in (None,) if blank is None else (None, blank):
            batch = self._tensors.batch(inputs, (), lora)
            hidden = None if self._hidden is None else self._hidden[:size]
            self._decoder.forward(batch, self._kv_cache.storages, hidden)

    def _received(self, num_tokens: int) -> torch.Tensor | None:
        """Receive what the stage before computed; None in the first stage."""
        if self._links is None or not self._takes_hidden:
            return None
        received = self._links.receive_hidden(num_tokens)
        if self._hidden is None or num_tokens > len(self._hidden):
            return received.to(self._device)
        return self._hidden[:num_tokens].copy_(received)

    def _as_recorded(self, inputs: StepInputs) -> StepInputs:
        """Add padding up to a recorded size, if there is one for such a step.

        Recorded steps have rows of one token, so a row with draft tokens becomes several.
        """
        sizes = self._recorded_sizes
        if not sizes or not inputs.wants_all_logits or inputs.num_tokens > sizes[-1]:
            return inputs
        if inputs.encoded_spans:
            return inputs
        if inputs.num_tokens > len(inputs.seq_lens):
            inputs = inputs.with_row_per_token()
        size = sizes[bisect.bisect_left(sizes, inputs.num_tokens)]
        return dataclasses.replace(inputs, num_padding=size - inputs.num_tokens)

    def _lora(
        self, steps: Sequence[RowStep], inputs: StepInputs, faults: Mapping[Slot, ErrorInfo]
    ) -> LoraBatch | None:
        """Make the LoRA of the rows. Padding and rows that fail anyhow use the base model."""
        rows = tuple(
            (step.num_tokens, () if step.slot in faults else adapters)
            for step, adapters in zip(steps, inputs.adapters, strict=True)
        )
        padding = ((inputs.num_padding, ()),) if inputs.num_padding else ()
        return self._adapter_bank.lora_batch((*rows, *padding))

    def _token_ids(self, step: RowStep) -> Sequence[int]:
        if step.token_ids is not None:
            token_ids = [self._in_vocabulary(token_id) for token_id in step.token_ids]
        else:
            newest = self._sampler.last_token(step.slot)
            token_ids = [ON_DEVICE if newest is None else newest]
            if step.draft_token_ids:
                token_ids += map(self._in_vocabulary, step.draft_token_ids)
        assert len(token_ids) == step.num_tokens, "a token for each position"
        return token_ids

    def _in_vocabulary(self, token_id: int) -> int:
        """Return the token, or 0 for an invalid one, which fails its row and not the device."""
        return token_id if 0 <= token_id < self._vocab_size else 0


class LaunchedRows:
    """Rows of one step, from their launch to their results."""

    def __init__(
        self,
        computer: StepComputer,
        steps: Sequence[RowStep],
        inputs: StepInputs,
        faults: Mapping[Slot, ErrorInfo],
        watch: StepWatch,
    ) -> None:
        """Launch the rows; see StepComputer.compute."""
        self._computer = computer
        self._compute: Callable[[Sequence[int]], PendingSample] = lambda rows: computer.compute(
            steps, inputs, faults, rows, watch
        )
        self._steps = steps
        self._faults = faults
        self._watch = watch
        self._fitting = RowsThatFit(
            [step.num_tokens for step in steps],
            computer.accelerator.trim,
            is_alone=computer.is_alone,
        )
        self._sample = self._fitting.attempt(self._compute)

    @property
    def is_late(self) -> bool:
        """See PendingSample."""
        return self._sample is not None and self._sample.is_late

    def finish(self) -> tuple[RowResult, ...]:
        """Wait for them; one result per row."""
        self._watch.lap()  # leaves out the time of other steps
        if self._sample is not None:
            self._sample.wait()
        self._watch.forward_ns += self._watch.lap()
        if self.is_late:
            with self._computer.computing():
                results = self._fitting.attempt(self._finish_late)
        else:
            results = None if self._sample is None else self._sample.finish()
        self._watch.sample_ns += self._watch.lap()
        return self._with_errors(results or [])

    def _finish_late(self, rows: Sequence[int]) -> list[RowResult]:
        """Finish the rows; if memory runs out, compute them again, fewer at a time."""
        sample, self._sample = self._sample, None
        if sample is None:
            sample = self._compute(rows)
        return sample.finish()

    def _with_errors(self, results: Sequence[RowResult]) -> tuple[RowResult, ...]:
        errors = dict(self._faults)
        for row, error in self._fitting.lost.items():
            errors[self._steps[row].slot] = error
        if not errors:
            return tuple(results)
        of_slots = {result.slot: result for result in results}
        return tuple(
            RowResult(step.slot, error=errors[step.slot])
            if step.slot in errors
            else of_slots[step.slot]
            for step in self._steps
        )
