"""The newest requests that ended, and those that are open: without prompts and outputs.

Each front-end process keeps its own. Those of a tenant that sends many do not displace the others'
requests. Requests without a valid key, and those that neither generate, nor change an adapter, nor
fail, are not kept.
"""

import collections
import enum
import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import Struct

from loraplex.core.errors import (
    InvalidParameterError,
    LoraplexError,
    PromptTooLongError,
    UnsupportedFeatureError,
)
from loraplex.core.output import ResolvedAdapter
from loraplex.frontends.telemetry.access_log import generation_fields, request_fields
from loraplex.serving.wire_request import GenerationRecord, WireRequest

MAX_GENERATIONS: Final = 8
_MAX_PATH: Final = 200
_MAX_NAME: Final = 256
MAX_MESSAGE: Final = 500
"""Characters of an error's message."""
_ADAPTER_ROUTES: Final = (
    *("/v1/adapters", "/v1/uploads", "/v1/loras"),
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
)
"""Beginnings of the routes that are about adapters, also where the name could not be read."""
_OF_PROMPTS: Final = re.compile(
    r"(^|[.\]])(prompts?|messages|inputs?|text|text_input|query|content|documents|suffix|tokens)\b",
    re.IGNORECASE,
)
"""Parameters whose values are texts of prompts, on any wire."""
_VALUE: Final = ", got "
"""What comes before a value in the message of a refusal."""
_MEAN_BYTES: Final = 4096
"""Memory of all kept requests, divided by their greatest number."""


class RequestKind(enum.StrEnum):
    GENERATION = "generation"
    ADAPTER = "adapter"
    """Loads, changes and descriptions of adapters, and uploads."""


class Phases(Struct, frozen=True, kw_only=True):
    """Durations of the stages, which follow each other; null: unknown, or not reached."""

    admit_ms: float | None = None
    """Time from the begin of the generation until the engine has it."""
    adapter_load_ms: float | None = None
    """Time in which the adapters were read and copied to the device; 0 for those that are there."""
    queue_ms: float | None = None
    """Rest of the time until the first step."""
    prefill_ms: float | None = None
    """Time until the first token."""
    decode_ms: float | None = None
    """Time until the last token."""
    write_ms: float | None = None
    """Time until the response is written."""


class RecentGeneration(Struct, frozen=True, kw_only=True):
    """One prompt of a request."""

    model: str
    task: str
    """`generate`, `embed`, `classify` or `score`."""
    adapters: tuple[ResolvedAdapter, ...]
    client_request_id: str | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None
    queue_seconds: float | None
    first_token_seconds: float | None
    seconds: float | None
    finish_reasons: list[str]
    error: str | None
    start_ms: float
    """Time since the begin of the request."""
    phases: Phases
    preemptions: int
    restarts: int
    """Number of engines that died with it."""


class RecentRequest(Struct, frozen=True, kw_only=True):
    id: int
    """Time of the end in microseconds since 1970, unique in a process; 0: it is open."""
    phase: str
    """`ended`; of open requests `admission`, `waiting` (for the first token), `decode` or `write`,
    whichever is the earliest of its generations."""
    time: str
    """Time of the begin."""
    request_id: str
    trace_id: str
    protocol: str
    client: str
    """Address."""
    tenant: str
    method: str | None
    route: str | None
    path: str
    status: int | str | None
    """Status of HTTP, or code of gRPC."""
    error: str | None
    """Code of the error."""
    message: str | None
    """Message of the error, at most 500 characters, without values of prompts; null if there is no
    error, or nothing of its message may be shown."""
    kind: RequestKind
    model: str | None
    """Base model of its generations, or of its `subject`; null: none was found."""
    subject: str | None
    """Adapter that it loads, changes or describes."""
    seconds: float | None
    """Null: it is open."""
    prompt_tokens: int
    completion_tokens: int
    user_agent: str | None
    num_generations: int
    """Number of prompts, of which `generations` has the first 8."""
    generations: tuple[RecentGeneration, ...]


class RequestQuery(Struct, frozen=True, kw_only=True):
    """Which requests; None: any."""

    until: int
    """Ids of ended requests are at most this."""
    limit: int
    after: int | None = None
    """Ids are greater, and the first are returned; None: the last."""
    tenant: str | None = None
    adapter: str | None = None
    """Name of one of its adapters; empty: the base model alone."""
    status: str | None = None
    """`open`, `ok`, `error`, or a status of HTTP or code of gRPC."""
    model: str | None = None
    """Base model of one of its generations, or of its subject."""
    kind: RequestKind | None = None

    def cut(self, found: list[Any]) -> list[Any]:
        """Return at most `limit` of the requests, which are in order."""
        return found[-self.limit :] if self.after is None else found[: self.limit]


class RequestPage(Struct, frozen=True, kw_only=True):
    """Requests that a query found, in order, with their ids or times."""

    ended: list[tuple[int, msgspec.Raw]]
    open: list[tuple[int, msgspec.Raw]]
    num_open: int

    @classmethod
    def joined(cls, pages: Sequence["RequestPage"], query: RequestQuery) -> "RequestPage":
        """Return the page of all processes from a page of each."""
        # Two processes may give requests the same microsecond.
        order = itemgetter(0)
        ended = sorted((row for page in pages for row in page.ended), key=order)
        open_rows = sorted((row for page in pages for row in page.open), key=order)
        return cls(
            ended=query.cut(ended),
            open=open_rows[-query.limit :],
            num_open=sum(page.num_open for page in pages),
        )


class _Facts(NamedTuple):
    """Facts that queries select by."""

    tenant: str
    status: str
    """Empty: it is open."""
    has_failed: bool
    kind: RequestKind
    models: frozenset[str]
    adapters: frozenset[str]
    """Names of its generations' adapters, and its subject."""

    @classmethod
    def of(cls, request: WireRequest) -> "_Facts":
        names = [each.name for record in request.generations for each in record.adapters]
        models = [record.request.model for record in request.generations]
        return cls(
            tenant=request.tenant,
            status=request.status,
            has_failed=request.failure is not None,
            kind=kind_of(request),
            models=frozenset(filter(None, (*models, request.model))),
            adapters=frozenset(filter(None, (*names, request.subject))),
        )

    def match(self, query: RequestQuery) -> bool:
        if query.tenant not in (None, self.tenant):
            return False
        if query.adapter is not None and not self._has(query.adapter):
            return False
        if query.model is not None and query.model not in self.models:
            return False
        if query.kind not in (None, self.kind):
            return False
        match query.status:
            case None:
                return True
            case "open":
                return not self.status
            case "ok" | "error":
                return bool(self.status) and self.has_failed == (query.status == "error")
        return query.status == self.status

    def _has(self, adapter: str) -> bool:
        return adapter in self.adapters if adapter else not self.adapters


class _Kept(NamedTuple):
    id: int
    facts: _Facts
    data: bytes
    """A RecentRequest as JSON."""


class RecentRequests:
    """A sink of `Telemetry`. Thread-safe."""

    def __init__(
        self, most: int, unix_us: Callable[[], int] = lambda: time.time_ns() // 1000
    ) -> None:
        """most: number of ended requests that are kept."""
        self._most = most
        self._unix_us = unix_us
        # A request that is collected as garbage ends wherever its thread happens to be.
        self._lock = threading.RLock()
        self._kept: dict[str, collections.deque[_Kept]] = {}
        """Kept requests by tenant."""
        self._num_kept = 0
        self._num_bytes = 0
        self._last_id = 0

    def __call__(self, request: WireRequest) -> None:
        """Keep a request that has ended."""
        is_of_interest = request.generations or request.error_code or request.changes_adapter
        if not self._most or not request.tenant or not is_of_interest:
            return
        with self._lock:
            self._last_id = max(self._last_id + 1, self._unix_us())
            data = msgspec.json.encode(recent_request(request, self._last_id))
            kept = _Kept(self._last_id, _Facts.of(request), data)
            self._kept.setdefault(request.tenant, collections.deque()).append(kept)
            self._num_kept += 1
            self._num_bytes += len(data)
            while self._num_kept > self._most or self._num_bytes > self._most * _MEAN_BYTES:
                self._drop_one()

    def now(self) -> int:
        """Return the greatest id of the requests that have ended."""
        return max(self._last_id, self._unix_us())

    def page(self, query: RequestQuery, open_requests: Iterable[WireRequest]) -> RequestPage:
        """Return the requests of this process that a query is about."""
        opened = [
            (request.started_unix_ns // 1000, request)
            for request in open_requests
            if request.tenant and request.generations and _Facts.of(request).match(query)
        ]
        opened.sort(key=lambda row: row[0])
        return RequestPage(
            ended=[(kept.id, msgspec.Raw(kept.data)) for kept in self._ended(query)],
            open=[
                (started_us, msgspec.Raw(msgspec.json.encode(recent_request(request, 0))))
                for started_us, request in opened[-query.limit :]
            ],
            num_open=len(opened),
        )

    def _ended(self, query: RequestQuery) -> list[_Kept]:
        with self._lock:
            if query.tenant is None:
                rows = [list(rows) for rows in list(self._kept.values())]
            else:
                rows = [list(self._kept.get(query.tenant, ()))]
        after = query.after or 0
        found = [
            kept
            for kept in (kept for tenant in rows for kept in tenant)
            if after < kept.id <= query.until and kept.facts.match(query)
        ]
        found.sort(key=lambda kept: kept.id)
        return query.cut(found)

    def _drop_one(self) -> None:
        """Drop the oldest request of the tenant that has most."""
        tenant, rows = max(self._kept.items(), key=lambda item: len(item[1]))
        self._num_kept -= 1
        self._num_bytes -= len(rows.popleft().data)
        if not rows:
            del self._kept[tenant]


def recent_request(request: WireRequest, number: int) -> RecentRequest:
    """Describe a request. number: its id; 0: it is open."""
    fields = request_fields(request)
    fields["path"] = fields["path"][:_MAX_PATH]
    model = request.model or next((each.request.model for each in request.generations), "")
    return RecentRequest(
        **fields,
        message=shown_message(request.failure),
        kind=kind_of(request),
        model=model[:_MAX_NAME] or None,
        subject=request.subject[:_MAX_NAME] or None,
        id=number,
        phase="ended" if number else _phase(request.generations),
        num_generations=len(request.generations),
        generations=tuple(
            _generation(record, request) for record in request.generations[:MAX_GENERATIONS]
        ),
    )


def kind_of(request: WireRequest) -> RequestKind:
    is_about_adapter = request.subject or request.route.startswith(_ADAPTER_ROUTES)
    return RequestKind.ADAPTER if is_about_adapter else RequestKind.GENERATION


def shown_message(error: LoraplexError | None) -> str | None:
    """Return what may be shown of an error's message: no text that a prompt may have.

    Refusals repeat the value that they refuse, and a chat template raises what it likes.
    """
    if error is None:
        return None
    if faults := getattr(error, "__notes__", None):  # several, each about a parameter of its own
        return "; ".join(fault.partition(_VALUE)[0] for fault in faults)[:MAX_MESSAGE]
    message = error.message
    is_about_prompt = error.param is None or _OF_PROMPTS.search(error.param)
    if is_about_prompt and not isinstance(error, PromptTooLongError | UnsupportedFeatureError):
        if error.param is not None and not isinstance(error, InvalidParameterError):
            return None
        message = message.partition(_VALUE)[0]
    return message[:MAX_MESSAGE]


def _phase(records: Sequence[GenerationRecord]) -> str:
    if any(not record.admitted_ns for record in records):
        return "admission"
    if any(not record.first_token_ns for record in records):
        return "waiting"
    return "decode" if any(not record.ended_ns for record in records) else "write"


def _generation(record: GenerationRecord, request: WireRequest) -> RecentGeneration:
    fields, timing = generation_fields(record), record.timing
    fields["model"] = fields["model"][:_MAX_NAME]
    if not request.ended_ns and not record.finish_reasons:
        fields["finish_reasons"] = []
    return RecentGeneration(
        **fields,
        start_ms=_ms(request.started_ns, record.started_ns) or 0.0,
        phases=_phases(record, request.ended_ns),
        preemptions=timing.num_preemptions if timing else 0,
        restarts=timing.num_restarts if timing else 0,
    )


def _phases(record: GenerationRecord, ended_ns: int) -> Phases:
    """ended_ns: the end of the response; 0: it is open."""
    timing = record.timing
    if timing is None or not timing.first_scheduled_ns:
        return Phases(
            admit_ms=_ms(record.started_ns, record.admitted_ns),
            decode_ms=_ms(record.first_token_ns, record.ended_ns),
        )
    scheduled_ns = timing.first_scheduled_ns
    ready_ns = timing.arrival_ns + timing.adapters_moving_ns
    return Phases(
        admit_ms=_ms(record.started_ns, timing.arrival_ns),
        adapter_load_ms=_ms(timing.arrival_ns, ready_ns),
        queue_ms=_ms(ready_ns, scheduled_ns),
        prefill_ms=_ms(scheduled_ns, timing.first_token_ns),
        decode_ms=_ms(timing.first_token_ns, timing.last_token_ns),
        write_ms=_ms(timing.last_token_ns, ended_ns),
    )


def _ms(start_ns: int, end_ns: int) -> float | None:
    return round(max(end_ns - start_ns, 0) / 1e6, 3) if start_ns and end_ns else None
