"""GET /v1/history: what the engines did in the last minutes, so that a page which is opened now can
show them.

One task reads numbers that the engines and the requests count anyway, every two seconds; requests,
steps and tokens do nothing for it.
"""

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from loraplex.core.errors import NotReadyError
from loraplex.core.stats import EngineStats, StepRecord
from loraplex.frontends.access import Authenticate
from loraplex.frontends.middleware import RecordedRoute
from loraplex.frontends.openapi.operation import OF_NAMES, Parameter, described, json_of
from loraplex.frontends.ops.health import ONE_MODEL, queried_model
from loraplex.frontends.ops.latencies import Latencies, LatencyBounds, LatencyCounts
from loraplex.frontends.ops.responses import (
    for_operators,
    json_response,
    number,
    responding_to_errors,
)
from loraplex.serving.backend import Backend

logger = logging.getLogger(__name__)

STEP_SECONDS: Final = 2
"""Time from one point to the next."""
MAX_SECONDS: Final = 900
_MAX_POINTS: Final = MAX_SECONDS // STEP_SECONDS
_MAX_STEPS: Final = 10_000
"""Steps of a point that are looked at."""


class HistoryPoint(msgspec.Struct, frozen=True, kw_only=True):
    """What one model did since the point before."""

    t: float
    """Time of the point in Unix seconds, which is the end of what it counts."""
    running: int
    """Largest number of sequences that ran at once."""
    waiting: int
    """Largest number of sequences that waited."""
    prompt_tokens: int
    output_tokens: int
    kv_held: int
    """Largest number of KV blocks that sequences held."""
    kv_cached: int
    """KV blocks that were kept for equal prompt beginnings, at the time of the point."""
    pages_used: int
    """Largest number of adapter pages in use."""
    lora_share: float | None
    """Share of the steps' time that LoRA took, 0 to 1; null: not measured."""
    restarts: int
    """Number of engines that were started in place of one that died."""
    ttft: tuple[int, ...]
    """Times to the first token by bucket; empty: there was none."""
    itl: tuple[int, ...]
    """Times from one token to the next by bucket; empty: there was none."""
    e2e: tuple[int, ...]
    """Times of whole requests by bucket; empty: none ended."""


class HistoryCapacity(msgspec.Struct, frozen=True, kw_only=True):
    """Largest values that the numbers of the points can have."""

    kv_blocks: int
    adapter_pages: int
    max_num_seqs: int


class ModelHistory(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    step_seconds: int
    """Usual time between two points."""
    last_request: int | None
    """Time at which the newest request ended, in Unix seconds; null: none did."""
    capacity: HistoryCapacity | None
    """Null until the engine has started once."""
    latency_bounds: LatencyBounds
    """Upper bounds of the buckets; one more bucket has all longer times."""
    points: Sequence[HistoryPoint]
    """Oldest first."""


class _Recorder:
    """Points of one model, and the counts up to the last one."""

    def __init__(self) -> None:
        self.points: deque[HistoryPoint] = deque(maxlen=_MAX_POINTS)
        self._tokens = (0, 0)
        self._restarts = 0
        self._latencies: tuple[tuple[int, ...], ...] = ()
        self.last_step_ns = 0
        """Start of the newest step that was looked at."""

    def record(
        self,
        unix_seconds: float,
        stats: EngineStats,
        steps: Sequence[StepRecord],
        restarts: int,
        latencies: LatencyCounts,
    ) -> None:
        """Add a point. steps: those that started after last_step_ns."""
        tokens = (stats.prompt_tokens, stats.generation_tokens)
        counts: tuple[tuple[int, ...], ...] = msgspec.structs.astuple(latencies)
        before = self._latencies or tuple((0,) * len(kind) for kind in counts)
        ttft, itl, e2e = itertools.starmap(_since, zip(counts, before, strict=True))
        # A new engine counts its tokens from 0 again.
        is_new = any(now < past for now, past in zip(tokens, self._tokens, strict=True))
        past = (0, 0) if is_new else self._tokens
        self.points.append(
            HistoryPoint(
                t=round(unix_seconds, 3),
                running=max([stats.num_running, *(step.num_running for step in steps)]),
                waiting=max([stats.num_waiting, *(step.num_waiting for step in steps)]),
                prompt_tokens=tokens[0] - past[0],
                output_tokens=tokens[1] - past[1],
                kv_held=max([stats.blocks_held, *(step.blocks_held for step in steps)]),
                kv_cached=stats.blocks_cached,
                pages_used=max(
                    [stats.adapters.device_pages_used, *(one.adapter_pages_used for one in steps)]
                ),
                lora_share=_lora_share(steps),
                restarts=restarts - self._restarts,
                ttft=ttft,
                itl=itl,
                e2e=e2e,
            )
        )
        self._tokens, self._restarts, self._latencies = tokens, restarts, counts
        if steps:
            self.last_step_ns = steps[-1].start_ns


class History:
    """The last minutes of all models that are served, in memory of a fixed size for each."""

    def __init__(
        self,
        backend: Backend,
        latencies: Latencies,
        unix_seconds: Callable[[], float] = time.time,
    ) -> None:
        self._backend = backend
        self._latencies = latencies
        self._unix_seconds = unix_seconds
        self._models: dict[str, _Recorder] = {}

    async def follow(self, step_seconds: float = STEP_SECONDS) -> None:
        """Record points until it is cancelled."""
        while True:
            await asyncio.sleep(step_seconds)
            try:
                await self.record()
            except Exception:
                logger.exception("a point of the models' history is missing")

    async def record(self) -> None:
        """Add a point to each model, and forget those that are no longer served."""
        await self._latencies.refresh()
        names = [card.name for card in self._backend.models()]
        latencies, now = self._latencies.by_model(names), self._unix_seconds()
        self._models = {name: self._models.get(name) or _Recorder() for name in names}
        for name, recorder in self._models.items():
            model = self._backend.model(name)
            steps = model.steps(_MAX_STEPS, recorder.last_step_ns)
            restarts = sum(model.engine_restarts.values())
            recorder.record(now, model.stats, steps, restarts, latencies[name])

    def of(self, model: str, seconds: int) -> ModelHistory:
        """Return the points of the last seconds of a served model."""
        since = self._unix_seconds() - seconds
        recorder = self._models.get(model)
        used = self._backend.adapter_usage.of_server().items()
        return ModelHistory(
            model=model,
            step_seconds=STEP_SECONDS,
            last_request=max(
                (use.last_used for by, use in used if by.model == model and use.last_used),
                default=None,
            ),
            capacity=_capacity(self._backend, model),
            latency_bounds=LatencyBounds(),
            points=[point for point in (recorder.points if recorder else ()) if point.t > since],
        )


_SECONDS: Final = Parameter(
    "seconds",
    f"Only the last so many seconds; {MAX_SECONDS} if it is absent.",
    {"type": "integer", "minimum": 1, "maximum": MAX_SECONDS},
)


def history_route(backend: Backend, history: History, authenticate: Authenticate) -> RecordedRoute:
    """Return the route of GET /v1/history."""

    @described(
        json_of(ModelHistory), tag="operations", query=(ONE_MODEL, _SECONDS), errors=OF_NAMES
    )
    async def respond(request: Request) -> Response:
        """What a model did in the last 15 minutes, in steps of two seconds. For operators."""
        seconds = number(request.query_params.get("seconds"), _SECONDS)
        model = queried_model(backend, request)
        return json_response(history.of(model, MAX_SECONDS if seconds is None else seconds))

    handler = responding_to_errors(for_operators(respond, authenticate))
    return RecordedRoute("/v1/history", handler, methods=["GET"])


def _since(counts: tuple[int, ...], before: tuple[int, ...]) -> tuple[int, ...]:
    """Return what was counted in each bucket; empty: nothing."""
    news = tuple(max(now - past, 0) for now, past in zip(counts, before, strict=True))
    return news if any(news) else ()


def _lora_share(steps: Sequence[StepRecord]) -> float | None:
    measured = [step for step in steps if step.timing.lora_ns is not None]
    whole_ns = sum(step.duration_ns for step in measured)
    if not whole_ns:
        return None
    return round(sum(step.timing.lora_ns or 0 for step in measured) / whole_ns, 4)


def _capacity(backend: Backend, model: str) -> HistoryCapacity | None:
    try:
        memory = backend.model(model).memory()
    except NotReadyError:
        return None
    return HistoryCapacity(
        kv_blocks=memory.kv.blocks,
        adapter_pages=memory.device.pages,
        max_num_seqs=memory.max_num_seqs,
    )
