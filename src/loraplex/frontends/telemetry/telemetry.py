"""The one place that a request on any wire passes at its begin and at its end, and its ids.

Headers: `x-request-id`; `traceparent` and `tracestate` (W3C Trace Context, level 1).
"""

import logging
import random
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from loraplex.frontends.metric_families import Family, TableCollector, counter
from loraplex.serving.wire_request import TraceParent, WireRequest

logger = logging.getLogger(__name__)

Sink = Callable[[WireRequest], None]
"""Writes a request down when it has ended. It is called on any thread, and must not block."""


class TenantUse(msgspec.Struct):
    """What a tenant had so far, over every protocol. Of requests that have ended."""

    requests: int = 0
    prompts: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    errors: int = 0


class _Ended(msgspec.Struct):
    """Requests of one protocol that ended alike."""

    number: int
    first_unix: float
    """Seconds; when the first of them ended."""


class Telemetry(TableCollector):
    """Counts open and ended requests, and passes those that ended to the sinks. Thread-safe."""

    families = (
        Family(
            "loraplex_open_requests",
            "Requests of any kind on the wire that have not ended.",
            "num_open",
            ("protocol",),
        ),
        counter(
            "loraplex_wire_requests",
            "Requests on the wire that ended, by status and by the code of the error, which is "
            "empty without one.",
            "num_ended",
            ("protocol", "status", "code"),
        ),
    )

    def __init__(self, sinks: Sequence[Sink] = ()) -> None:
        self._sinks = sinks
        # A request that is collected as garbage ends wherever its thread happens to be.
        self._lock = threading.RLock()
        self._tenants: dict[str, TenantUse] = {}
        self._open: dict[int, WireRequest] = {}
        """Open requests by id()."""
        self._num_open: dict[str, int] = {}
        self._ended: dict[tuple[str, str, str], _Ended] = {}
        """Ended requests by protocol, status and error code."""

    def begin(
        self,
        protocol: str,
        method: str,
        path: str,
        client: str,
        headers: Mapping[str, str],
        route: str = "",
    ) -> WireRequest:
        """Record the start of a request. The caller ends it. headers: by lower-case name."""
        request = WireRequest(
            protocol=protocol,
            method=method,
            path=path,
            client=client,
            request_id=usable_request_id(given)
            if (given := headers.get(REQUEST_ID_HEADER))
            else random_id(),
            headers=headers,
            trace_of=trace_parent,
            on_begin=self._begin,
            on_end=self._end,
            route=route,
        )
        with self._lock:
            self._num_open[protocol] = self._num_open.get(protocol, 0) + 1
            self._open[id(request)] = request
        return request

    @property
    def num_open(self) -> dict[str, int]:
        """Return the number of open requests by protocol."""
        with self._lock:
            return dict(self._num_open)

    @property
    def open_requests(self) -> list[WireRequest]:
        """Return the open requests, streams and those within them."""
        with self._lock:
            return list(self._open.values())

    @property
    def tenants(self) -> dict[str, TenantUse]:
        with self._lock:
            return {name: msgspec.structs.replace(use) for name, use in self._tenants.items()}

    @property
    def num_ended(self) -> dict[tuple[str, ...], tuple[int, float]]:
        """Return the number of ended requests, and when the first of them ended, by label."""
        with self._lock:
            return {labels: (each.number, each.first_unix) for labels, each in self._ended.items()}

    def _begin(self, request: WireRequest) -> None:
        with self._lock:
            self._open[id(request)] = request

    def _end(self, request: WireRequest) -> None:
        with self._lock:
            self._open.pop(id(request), None)
            self._count(request)
        for sink in self._sinks:
            try:
                sink(request)
            except Exception:  # the response has been sent already
                logger.exception("request %s could not be written down", request.request_id)

    def _count(self, request: WireRequest) -> None:
        code = request.error_code
        if not request.is_within:
            self._num_open[request.protocol] -= 1
        ended = self._ended.get(labels := (request.protocol, request.status, code))
        if ended is None:
            ended = self._ended[labels] = _Ended(0, time.time())
        ended.number += 1
        if request.tenant:
            use = self._tenants.get(request.tenant)
            if use is None:
                use = self._tenants[request.tenant] = TenantUse()
            use.requests += 1
            use.errors += bool(code)
            use.prompts += len(request.generations)
            for record in request.generations:
                use.prompt_tokens += record.num_prompt_tokens
                use.completion_tokens += record.num_output_tokens


REQUEST_ID_HEADER = "x-request-id"
MAX_REQUEST_ID_LENGTH = 256

REQUEST_ID_PATTERN = "^[!-~]+$"
"""Visible ASCII: it goes into headers and logs as it is."""


_random = random.Random()
"""Seeded by the system. Ids must be unique, but need not be unpredictable."""


def random_id() -> str:
    """Return 32 hexadecimal digits."""
    return f"{_random.getrandbits(128):032x}"


def request_id_problem(text: str, name: str = REQUEST_ID_HEADER) -> str:
    """What is wrong with a client's id, as a sentence that calls it by `name`; empty: nothing."""
    if len(text) > MAX_REQUEST_ID_LENGTH:
        return f"{name} has {len(text)} characters; at most {MAX_REQUEST_ID_LENGTH} are allowed"
    if not re.fullmatch(REQUEST_ID_PATTERN, text):
        return f"{name} must be of visible ASCII characters, without blanks"
    return ""


def usable_request_id(given: str) -> str:
    """The client's id if there is one that can be used, else one of ours."""
    return given if given and not request_id_problem(given) else random_id()


_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_MAX_TRACE_LENGTH = 512
_SAMPLED = 0x01


def trace_parent(headers: Mapping[str, str]) -> TraceParent:
    """Where a request stands; without a usable `traceparent` it begins a trace of its own.

    A later version's first four fields are read as ours, as the rule has it; version ff and ids
    of zeros are not usable.
    """
    given = headers.get("traceparent")
    if given is None:
        return _new()
    text = given.strip()
    match = _PARENT.fullmatch(text) if len(text) <= _MAX_TRACE_LENGTH else None
    if match is None:
        return _new()
    version, trace_id, span_id, flags, rest = match.groups()
    is_usable = version != "ff" and not (version == "00" and rest)
    if not is_usable or not int(trace_id, 16) or not int(span_id, 16):
        return _new()
    state = headers.get("tracestate", "")
    return TraceParent(
        trace_id,
        span_id,
        is_sampled=bool(int(flags, 16) & _SAMPLED),
        state=state if len(state) <= _MAX_TRACE_LENGTH else "",
    )


def _new() -> TraceParent:
    return TraceParent(random_id(), "")
