"""An engine in this process, over a model of random weights; requests go in, times come out."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from gpu.journal import Figures
from gpu.rig import Rig, adapter_source
from loraplex.bench.statistics import percentile
from loraplex.bench.workload import PlannedRequest
from loraplex.core.adapter import AdapterSource, AdapterUse
from loraplex.core.clock import SystemClock
from loraplex.core.request import EngineRequest
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.scheduler_settings import SchedulerSettings
from loraplex.core.task import Generate
from loraplex.engine.engine import Engine, build_engine
from loraplex.engine.runner import AdapterLoader
from loraplex.execution.adapters.host_adapters import HostAdapter
from support.instant_loader import InstantLoader

_PATIENCE_SECONDS = 120.0


@dataclasses.dataclass(frozen=True)
class Kind:
    """What the adapters of a run are: all of one rank, on the same modules."""

    rank: int
    modules: str

    def digest(self, number: int) -> str:
        return f"{self.modules} r{self.rank} {number}"


def make_engine(rig: Rig, host_bytes: int, loader: AdapterLoader | None = None) -> Engine:
    """Make an engine without a prefix cache. Without a loader, adapters are on the host at once."""
    return build_engine(
        rig.runner,
        loader or InstantLoader(rig.host, _copies_of(rig)),
        SystemClock(),
        SchedulerSettings(
            max_num_batched_tokens=rig.settings.max_num_batched_tokens,
            enable_prefix_cache=False,
            max_queue_size=0,
        ),
        adapter_host_bytes=host_bytes,
        overlap=True,
    )


def _copies_of(rig: Rig) -> Callable[[AdapterSource], HostAdapter]:
    """All adapters of a kind have the same numbers, in the same place of the host's memory."""

    def make(source: AdapterSource) -> HostAdapter:
        modules, rank, _ = source.digest.split(" ")
        return dataclasses.replace(rig.adapter(int(rank[1:]), modules), digest=source.digest)

    return make


def register(engine: Engine, rig: Rig, kind: Kind, count: int) -> list[str]:
    """The digests of so many adapters."""
    digests = [kind.digest(number) for number in range(count)]
    for digest in digests:
        engine.register_adapter(adapter_source(rig.config, digest, kind.rank, kind.modules))
    return digests


def forget(engine: Engine, digests: Sequence[str]) -> None:
    for digest in digests:
        engine.forget_adapter(digest)
    while not engine.is_idle:
        engine.step()


def request_of(number: int, planned: PlannedRequest, digests: Sequence[str]) -> EngineRequest:
    uses = () if planned.adapter is None else (AdapterUse(digests[planned.adapter]),)
    return EngineRequest(
        request_id=number,
        prompt_token_ids=planned.prompt_token_ids,
        task=Generate(
            SamplingParams(
                temperature=0.0, max_tokens=planned.num_output_tokens, ignore_eos=True, seed=0
            )
        ),
        eos_token_ids=(),
        adapters=uses,
        kv_salt=uses[0].digest.encode() if uses else b"",
        tenant="",
        priority=0,
        arrival_ns=time.monotonic_ns(),
        deadline_ns=None,
    )


class Loop:
    """One run: what is sent when, and what came back when, in seconds from the start."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.sent: dict[int, float] = {}
        self.first: dict[int, float] = {}
        self.ended: dict[int, float] = {}
        self.num_tokens = 0
        self._start = time.perf_counter()

    def run(
        self, requests: Sequence[PlannedRequest], digests: Sequence[str], concurrency: int | None
    ) -> None:
        """concurrency: of a closed loop; None: each request is sent when it is due."""
        self._start = time.perf_counter()
        waiting = list(enumerate(requests))[::-1]
        quiet_since = self._now
        while len(self.ended) < len(requests):
            while waiting and self._may_send(waiting[-1][1], concurrency):
                number, planned = waiting.pop()
                self.sent[number] = planned.due_seconds if concurrency is None else self._now
                self._engine.add(request_of(number, planned, digests))
            if self._turn():
                quiet_since = self._now
            assert self._now - quiet_since < _PATIENCE_SECONDS, "nothing comes any more"

    def figures(self) -> Figures:
        latencies = [ended - self.sent[number] for number, ended in self.ended.items()]
        first = sorted(self.first[number] - sent for number, sent in self.sent.items())
        seconds = max(self.ended.values())
        return {
            "seconds": seconds,
            "tokens_per_second": self.num_tokens / seconds,
            "requests_per_second": len(self.ended) / seconds,
            "mean_latency": statistics.mean(latencies),
            "first_token_p50": percentile(first, 50),
            "first_token_p99": percentile(first, 99),
        }

    @property
    def _now(self) -> float:
        return time.perf_counter() - self._start

    def _may_send(self, planned: PlannedRequest, concurrency: int | None) -> bool:
        if concurrency is None:
            return planned.due_seconds <= self._now
        return len(self.sent) - len(self.ended) < concurrency

    def _turn(self) -> bool:
        """Whether a token came; a due time is waited for, too."""
        if self._engine.is_idle:
            time.sleep(0.0005)
            return True
        outputs = self._engine.step().outputs
        for output in outputs:
            assert output.error is None, output.error
            for delta in output.deltas:
                self.num_tokens += len(delta.token_ids)
                self.first.setdefault(output.request_id, self._now)
            if output.finished:
                self.ended[output.request_id] = self._now
        return bool(outputs)


def closed_loop(
    engine: Engine, requests: Sequence[PlannedRequest], digests: Sequence[str], concurrency: int
) -> Figures:
    loop = Loop(engine)
    loop.run(requests, digests, concurrency)
    return loop.figures()


def open_loop(
    engine: Engine, requests: Sequence[PlannedRequest], digests: Sequence[str]
) -> Figures:
    loop = Loop(engine)
    loop.run(requests, digests, None)
    return loop.figures()


def bytes_on_host(device: torch.device) -> int:
    """What adapters may take there."""
    return 48 << 30 if device.type == "cuda" else 1 << 28
