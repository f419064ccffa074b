"""Requests alone in a plain engine, and together under random conditions: equal outputs.

Equal are tokens, reasons to end, and the bits of log probabilities and logits. Engines die, and
others take their place as serving lets them.
"""

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from loraplex.core.errors import ErrorInfo
from loraplex.core.output import EngineOutput
from loraplex.core.request import EngineRequest, RequestId
from loraplex.core.stats import StepRecord
from loraplex.engine.engine import Engine
from loraplex.engine.journal_file import JournalFile, JournalReader
from loraplex.engine.replay import replay
from loraplex.execution.sizing.settings import RunnerSettings
from loraplex.execution.steps.runner_parts import RunnerParts
from loraplex.kernels.ops import Kernels
from loraplex.models.parameters import checkpoint_shapes
from loraplex.models.spec import ModelSpec
from loraplex.serving.engines.in_flight_request import KILL_BLAME, InFlightRequest
from loraplex.testing.fake_clock import FakeClock
from support.feature_engines import PLANNED_FAILURE, Failures, FeatureEngines
from support.feature_outputs import Completion
from support.feature_requests import FeatureRequests
from support.grammar_tokens import VOCAB_SIZE
from support.random_conditions import Conditions
from support.tiny_model import TinyCheckpoint

FEATURE_SETTINGS = RunnerSettings(
    block_size=4,
    num_blocks=400,
    max_num_seqs=8,
    max_lora_rank=8,
    kv_cache_host_memory_bytes=1 << 20,
)
MAX_REQUESTS = 12
"""Counts of one schedule."""
SHORT_PROMPT = 32
LAST_ARRIVALS = (3, 20)
"""Steps."""
LAST_ABORT = 30
MAX_STEPS = 3000
_JOURNAL_BYTES = 1 << 30


BORDER = 26
"""Length in the midst of the requests, for ropes whose factors depend on a length."""
LONGROPE: Final[dict[str, Any]] = {
    "rope_scaling": {
        "rope_type": "longrope",
        "original_max_position_embeddings": BORDER,
        "short_factor": [1.0 + i / 10 for i in range(8)],
        "long_factor": [2.0 + i for i in range(8)],
    }
}
DYNAMIC: Final[dict[str, Any]] = {
    "rope_scaling": {"rope_type": "dynamic", "factor": 7.0},
    "max_position_embeddings": BORDER,
}


def feature_checkpoint(
    folder: Path, changed: Callable[[ModelSpec], ModelSpec] = lambda spec: spec, **fields: Any
) -> Path:
    """Write a model for FEATURE_SETTINGS. fields: of config.json.

    changed: the model that is made of the one of config.json, with some of its weights.
    """
    checkpoint = TinyCheckpoint(
        folder,
        hidden_size=64,
        intermediate_size=80,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB_SIZE,
        **({"max_position_embeddings": 160} | fields),
    )
    # Logits as flat as those of trained models, so that a draw has choices.
    checkpoint.tensors["lm_head.weight"] /= 6
    own = checkpoint_shapes(changed(checkpoint.config))
    checkpoint.tensors = {name: checkpoint.tensors[name] for name in own}
    return checkpoint.save()


class FeatureSchedules:
    """One model with its requests, each of which ran alone first."""

    def __init__(
        self,
        parts: RunnerParts,
        folder: Path,
        kernels: Kernels | None = None,
        encoder_inputs: Sequence[tuple[int, ...]] = (),
    ) -> None:
        """See FeatureEngines and FeatureRequests. folder: for what is written."""
        self.planned_errors = [PLANNED_FAILURE.to_info()]
        """Errors with which requests of a schedule may end."""
        self.tally: Counter[str] = Counter()
        """What happened in the schedules."""
        self._folder = folder
        self._names = itertools.count()
        self.storages = parts.kv_cache.storages
        """Storages of all engines."""
        self._engines = FeatureEngines(parts, kernels)
        digests = [source.digest for source in self._engines.sources]
        self.requests = FeatureRequests(digests, self._first_tokens, encoder_inputs).make()
        self.alone = [self._run_alone(request) for request in self.requests]

    def run(self, seed: object) -> list[str]:
        """Return the differences between this seed's schedule and lone requests; empty if none."""
        conditions = Conditions.draw(seed)
        folder = self._new_folder()
        schedule = _Schedule(self._engines, conditions, self.requests, folder)
        try:
            schedule.run()
            problems = [
                *schedule.problems,
                *schedule.differences(self.alone, self.planned_errors),
            ]
        except Exception as error:
            error.add_note(f"in schedule {seed}: {conditions}")
            raise
        self.tally += schedule.tally
        return [f"schedule {seed}: {problem}\n  {conditions}" for problem in problems]

    def _first_tokens(self, request: EngineRequest) -> tuple[int, ...]:
        return tuple(self._run_alone(request).sequences[0].token_ids)

    def _run_alone(self, request: EngineRequest) -> Completion:
        engine = self._engines.plain(FakeClock(1), self._new_folder())
        sampling = msgspec.structs.replace(request.sampling, num_draft_tokens=0)
        engine.add(request.with_sampling(sampling))
        outputs: list[EngineOutput] = []
        while not engine.is_idle:
            turn = engine.step()
            assert turn.record is None or turn.record.step_id < MAX_STEPS
            outputs += turn.outputs
        engine.close()
        completion = Completion.of(outputs)
        assert completion.error is None, f"{completion.error}: {request}"
        return completion

    def _new_folder(self) -> Path:
        folder = self._folder / str(next(self._names))
        folder.mkdir()
        return folder


class _Schedule:
    """Some of the requests under one set of conditions."""

    def __init__(
        self,
        engines: FeatureEngines,
        conditions: Conditions,
        requests: Sequence[EngineRequest],
        folder: Path,
    ) -> None:
        self.tally: Counter[str] = Counter()
        self.problems: list[str] = []
        self._engines = engines
        self._conditions = conditions
        self._folder = folder
        self._clock = FakeClock(1)
        self._draws = draws = random.Random(f"schedule {conditions.seed}")
        chosen = _choose(draws, requests)
        self._of_alone = [request.request_id for request in chosen]
        """Which request each of these is."""
        self._requests = [
            conditions.changed(msgspec.structs.replace(request, request_id=index))
            for index, request in enumerate(chosen)
        ]
        self._works = {
            request.request_id: InFlightRequest(request, engines.sources)
            for request in self._requests
        }
        last_arrival = draws.choice(LAST_ARRIVALS)
        self._arrivals = sorted(
            (draws.randint(0, last_arrival), request.request_id) for request in self._requests
        )
        self._aborts = self._draw_aborts()
        self._unfinished: dict[RequestId, InFlightRequest] = {}
        self._aborted: set[tuple[RequestId, int]] = set()
        self._num_engines = 0
        self._journal_path: Path | None = None
        """State of the running engine."""

    def run(self) -> None:
        engine = self._new_engine(self._conditions.failures)
        for step in range(MAX_STEPS):
            if not self._arrivals and not self._unfinished and engine.is_idle:
                break
            self._arrive_and_abort(engine, step)
            turn = engine.step()
            self._count(turn.record)
            if step in self._conditions.crashes:
                engine = self._crash(
                    engine, is_reported=self._draws.random() < 0.5, outputs=turn.outputs
                )
                continue
            self._deliver(turn.outputs)
            if self._draws.random() < 0.1:
                engine.check()
            # A rare long pause lets idle adapters expire (lora_ttl_seconds).
            is_long = self._draws.random() < 0.03
            self._clock.advance(600_000_000 if is_long else self._draws.randint(1, 1_500_000))
        else:
            raise AssertionError(
                f"{MAX_STEPS} steps, and {len(self._unfinished)} requests are left"
            )
        engine.check()
        assert engine.stats().blocks_on_host == 0
        self._leave(engine)

    def differences(
        self, alone: Sequence[Completion], planned_errors: Sequence[ErrorInfo]
    ) -> list[str]:
        problems = []
        for request in self._requests:
            request_id = request.request_id
            stream = self._works[request_id].stream
            completion = Completion.of(asyncio.run(stream.take()))
            may_fail = completion.error in planned_errors
            self.tally["failed"] += may_fail
            found = list(
                completion.differences(alone[self._of_alone[request_id]], may_fail=may_fail)
            )
            for index, sequence in completion.sequences.items():
                if sequence.is_aborted and (request_id, index) not in self._aborted:
                    found.append(f"sequence {index} was aborted without a request for it")
            problems += [f"request {self._of_alone[request_id]}: {problem}" for problem in found]
        return problems

    def _draw_aborts(self) -> list[tuple[int, RequestId, int | None]]:
        draws = self._draws
        aborts = []
        for request in self._requests:
            if draws.random() < self._conditions.abort_share:
                index = draws.choice([None, draws.randrange(request.sampling.n)])
                aborts.append((draws.randint(0, LAST_ABORT), request.request_id, index))
        return aborts

    def _arrive_and_abort(self, engine: Engine, step: int) -> None:
        while self._arrivals and self._arrivals[0][0] <= step:
            _, request_id = self._arrivals.pop(0)
            self._unfinished[request_id] = self._works[request_id]
            engine.add(self._works[request_id].engine_request())
        for at, request_id, index in self._aborts:
            work = self._unfinished.get(request_id)
            if at == step and work is not None and work.abort(index):
                engine.abort(request_id, index)
                self._note_abort(request_id, index)

    def _note_abort(self, request_id: RequestId, index: int | None) -> None:
        sampling = self._requests[request_id].sampling
        # A beam search is aborted as a whole.
        is_whole = sampling.beam is not None
        indices = range(sampling.num_sequences) if is_whole or index is None else (index,)
        self._aborted.update((request_id, of_request) for of_request in indices)
        self.tally["aborts"] += 1

    def _deliver(self, outputs: Sequence[EngineOutput]) -> None:
        for output in outputs:
            self._unfinished[output.request_id].deliver(output)
            if output.finished:
                del self._unfinished[output.request_id]

    def _crash(
        self, engine: Engine, *, is_reported: bool, outputs: Sequence[EngineOutput]
    ) -> Engine:
        """is_reported: the engine dies only after it sent the result of its last step."""
        if is_reported:
            self._deliver(outputs)
        self._leave(engine)
        self.tally["crashes"] += 1
        engine = self._new_engine(())
        for request_id, work in list(self._unfinished.items()):
            work.lose_engine(KILL_BLAME)
            if work.end_aborted():
                del self._unfinished[request_id]
            else:
                self.tally["replayed"] += work.num_output_tokens > 0
                engine.add(work.engine_request())
        return engine

    def _new_engine(self, failures: Failures) -> Engine:
        folder = self._folder / f"engine-{self._num_engines}"
        folder.mkdir()
        self._num_engines += 1
        self._journal_path = folder / "journal" if self._conditions.has_journal else None
        return self._engines.under(
            self._conditions,
            self._requests,
            self._clock,
            folder,
            JournalFile(self._journal_path, _JOURNAL_BYTES) if self._journal_path else None,
            failures,
        )

    def _count(self, record: StepRecord | None) -> None:
        if record is not None:
            self.tally.update(
                offloads=record.block_offloads,
                loads=record.block_loads,
                copies=record.block_copies,
                failed_steps=record.num_failed_rows == record.num_rows > 0,
            )

    def _leave(self, engine: Engine) -> None:
        stats = engine.stats()
        self.tally.update(
            preemptions=stats.preemptions,
            cached_tokens=stats.cached_tokens,
            steps=stats.steps,
            drafts=stats.draft_tokens,
            accepted=stats.accepted_tokens,
            adapter_evictions=stats.adapters.device_evictions,
        )
        engine.close()
        if self._journal_path is not None:
            self._replay(self._journal_path)

    def _replay(self, journal: Path) -> None:
        reader = JournalReader(journal)
        summary = replay(reader.header, reader)
        self.tally["journaled_steps"] += summary.steps
        if summary.difference is not None:
            self.problems.append(f"its journal: {summary.difference}")


def _choose(draws: random.Random, requests: Sequence[EngineRequest]) -> list[EngineRequest]:
    """Some of them, and some of those more than once: they find their own blocks."""
    if draws.random() < 0.7:  # among short ones, more of them compete for as many blocks
        requests = [r for r in requests if len(r.prompt_token_ids) <= SHORT_PROMPT]
    if draws.random() < 0.4:
        adapters = draws.choice(requests).adapters
        requests = [request for request in requests if request.adapters == adapters]
    return draws.choices(requests, k=draws.randint(4, MAX_REQUESTS))
