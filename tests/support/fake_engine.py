"""A real engine on fake parts: the whole control plane, in one thread and without a model."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from loraplex.core.adapter import AdapterHandle, AdapterUse
from loraplex.core.image import ImageSpan
from loraplex.core.output import EngineOutput
from loraplex.core.plan import Capacity
from loraplex.core.request import EngineRequest, RequestId
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.scheduler_settings import SchedulerSettings
from loraplex.core.stats import StepRecord
from loraplex.core.task import Generate, Task
from loraplex.engine.engine import Engine, build_engine
from loraplex.engine.journal import Journal
from loraplex.engine.runner import AdapterLoader, Runner
from loraplex.memory.kv_salt import kv_salt
from loraplex.testing.fake_clock import FakeClock
from support.delayed_runner import DelayedRunner
from support.fake_loader import FakeLoader, fake_source
from support.fake_model import FakeModel
from support.fake_runner import FAKE_CAPACITY, FakeRunner

MILLISECOND_NS = 1_000_000
START_NS = 1_000_000_000


@dataclasses.dataclass(slots=True)
class Completion:
    """Everything that came back for one request, put together."""

    token_ids: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    """Tokens of each sequence, by index."""
    finish_reasons: dict[int, str] = dataclasses.field(default_factory=dict)
    outputs: list[EngineOutput] = dataclasses.field(default_factory=list)

    @property
    def is_finished(self) -> bool:
        return bool(self.outputs) and self.outputs[-1].finished

    @property
    def error_code(self) -> str | None:
        error = self.outputs[-1].error if self.outputs else None
        return None if error is None else error.code

    def take(self, output: EngineOutput) -> None:
        assert not self.is_finished, "an output after the last one"
        self.outputs.append(output)
        for delta in output.deltas:
            self.token_ids.setdefault(delta.index, []).extend(delta.token_ids)
            if delta.finish_reason is not None:
                self.finish_reasons[delta.index] = delta.finish_reason


class EngineParts(NamedTuple):
    """What an engine computes with, and the FakeRunner that is in it."""

    fake: FakeRunner
    runner: Runner
    loader: AdapterLoader


class FakeEngine:
    """An Engine with its FakeRunner, FakeLoader and FakeClock, and its completions.

    A step takes `step_ns` of the fake clock.
    """

    def __init__(
        self,
        capacity: Capacity = FAKE_CAPACITY,
        settings: SchedulerSettings | None = None,
        *,
        model: FakeModel | None = None,
        adapter_host_bytes: int = 1_000_000,
        num_polls: int = 1,
        copy_steps: int = 0,
        step_ns: int = MILLISECOND_NS,
        eviction_policy: str = "lru",
        journal: Journal | None = None,
        overlap: bool = False,
        parts: EngineParts | None = None,
    ) -> None:
        """parts: in place of a FakeRunner and a FakeLoader of its own."""
        self.clock = FakeClock(START_NS)
        if parts is None:
            self.loader = FakeLoader(num_polls)
            self.runner = FakeRunner(capacity, model, self.loader, copy_steps=copy_steps)
            is_delayed = overlap or capacity.num_stages > 1
            delayed = DelayedRunner(self.runner) if is_delayed else self.runner
            parts = EngineParts(self.runner, delayed, self.loader)
        self.runner = parts.fake
        self.engine: Engine = build_engine(
            parts.runner,
            parts.loader,
            self.clock,
            settings,
            adapter_host_bytes=adapter_host_bytes,
            eviction_policy=eviction_policy,
            journal=journal,
            overlap=overlap,
        )
        self.step_ns = step_ns
        self.completions: dict[RequestId, Completion] = {}
        self.requests: dict[RequestId, EngineRequest] = {}
        self.records: list[StepRecord] = []

    def register(self, digest: str, *, num_pages: int = 1, num_bytes: int = 100) -> AdapterHandle:
        geometry = self.runner.capacity().page_geometry
        source = fake_source(digest, geometry, num_pages=num_pages, num_bytes=num_bytes)
        return self.engine.register_adapter(source)

    def add(
        self,
        prompt: Sequence[int] = (1, 2, 3),
        *digests: str,
        sampling: SamplingParams | None = None,
        task: Task | None = None,
        max_tokens: int = 4,
        scale: float = 1.0,
        priority: int = 0,
        tenant: str = "default",
        share_weight: float = 1.0,
        eos_token_ids: tuple[int, ...] = (0,),
        encoder_token_ids: Sequence[int] = (),
        timeout_ns: int | None = None,
        images: tuple[ImageSpan, ...] = (),
    ) -> RequestId:
        """Add a request of the next id; `task`, else `sampling`, goes before `max_tokens`."""
        request_id = len(self.requests) + 1
        if task is None:
            task = Generate(sampling or SamplingParams(max_tokens=max_tokens, seed=request_id))
        now_ns = self.clock.now_ns()
        request = EngineRequest(
            request_id=request_id,
            prompt_token_ids=tuple(prompt),
            encoder_token_ids=tuple(encoder_token_ids),
            task=task,
            eos_token_ids=eos_token_ids,
            adapters=tuple(AdapterUse(digest, scale) for digest in digests),
            kv_salt=kv_salt("fake", "none", tuple((digest, scale) for digest in digests), tenant),
            tenant=tenant,
            priority=priority,
            share_weight=share_weight,
            arrival_ns=now_ns,
            deadline_ns=None if timeout_ns is None else now_ns + timeout_ns,
            images=images,
            image_salt=tenant.encode() if images else b"",
        )
        self.requests[request_id] = request
        self.completions[request_id] = Completion()
        self.engine.add(request)
        return request_id

    def step(self, num_steps: int = 1) -> None:
        """Turns of the engine, with or without something to launch."""
        for _ in range(num_steps):
            turn = self.engine.step()
            if self.runner.violations:
                raise self.runner.violations[0]
            for output in turn.outputs:
                self.completions[output.request_id].take(output)
            if turn.record is not None:
                self.records.append(turn.record)
            self.clock.advance(self.step_ns)

    def run(self, max_steps: int = 1000) -> None:
        """Step until the engine is idle, and check that it is at rest."""
        for _ in range(max_steps):
            if self.engine.is_idle:
                break
            wake_ns = self.engine.next_wake_ns()
            assert wake_ns is not None, "the engine sleeps, and is not idle"
            self.clock.advance(max(0, wake_ns - self.clock.now_ns()))
            self.step()
            self.engine.check()
        assert self.engine.is_idle, f"not idle after {max_steps} steps"

    def tokens(self, request_id: RequestId, index: int = 0) -> list[int]:
        """What has come back so far."""
        return self.completions[request_id].token_ids.get(index, [])

    def alone(self, request_id: RequestId, index: int = 0) -> list[int]:
        """What the request should give, up to max_tokens."""
        request = self.requests[request_id]
        return self.runner.model.output(request, index, request.sampling.max_tokens or 0)
