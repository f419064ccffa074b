"""Record of one request on a wire: its client, its generations and its response.

A front end begins one and makes it the current one; whatever runs on its behalf finds it there,
through threads' and loops' hand-overs too, and adds to it. When it ends it is passed to those who
write it down. Nothing here decides anything.
"""

import contextlib
import contextvars
import threading
import time
from collections.abc import Callable, Iterator, Mapping

import msgspec

from loraplex.core.errors import LoraplexError
from loraplex.core.output import FinishReason, RequestOutput, RequestTiming, ResolvedAdapter
from loraplex.core.request import GenerateRequest


class TraceParent(msgspec.Struct, frozen=True):
    """Where a request stands in a trace, by W3C's rule."""

    trace_id: str
    """32 hexadecimal digits."""
    span_id: str
    """16 hexadecimal digits; empty: no span before ours."""
    is_sampled: bool = True
    state: str = ""
    """Other systems' words, passed on as they are."""


MAX_USER_AGENT = 200


class GenerationRecord(msgspec.Struct, eq=False):
    """One prompt's way through the engine, as far as it came. Times are the clock's nanoseconds."""

    request: GenerateRequest
    tenant: str
    started_ns: int
    admitted_ns: int = 0
    first_token_ns: int = 0
    ended_ns: int = 0
    adapters: tuple[ResolvedAdapter, ...] = ()
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    finish_reasons: dict[int, FinishReason] = msgspec.field(default_factory=dict)
    """Finish reasons of ended sequences, by index."""
    timing: RequestTiming | None = None
    """The engine's, if the request came to its end."""
    error: LoraplexError | None = None

    def admitted(
        self, adapters: tuple[ResolvedAdapter, ...], num_prompt_tokens: int, now_ns: int
    ) -> None:
        self.adapters, self.num_prompt_tokens = adapters, num_prompt_tokens
        self.admitted_ns = now_ns

    def count(self, output: RequestOutput, now_ns: int) -> None:
        """Take note of what one output brings."""
        self.num_output_tokens = output.num_output_tokens
        if output.num_output_tokens and not self.first_token_ns:
            self.first_token_ns = now_ns
        for sequence in output.sequences:
            if sequence.finish_reason is not None:
                self.finish_reasons[sequence.index] = sequence.finish_reason
        self.timing = output.timing or self.timing

    def end(self, now_ns: int, error: LoraplexError | None = None) -> None:
        """Only the first end counts."""
        if not self.ended_ns:
            self.ended_ns, self.error = now_ns, error

    @property
    def ends(self) -> list[FinishReason]:
        """Return the reasons of its sequences in order, or why the request ended without them."""
        if self.finish_reasons:
            return [self.finish_reasons[index] for index in sorted(self.finish_reasons)]
        return [FinishReason.ABORT if self.error is None else FinishReason.ERROR]


class WireRequest(msgspec.Struct, eq=False):
    """One request, from its first bytes to its last response."""

    protocol: str
    """http, grpc, socket, or grpc-stream for a request within a stream."""
    method: str
    """HTTP's; empty for gRPC."""
    path: str
    """Path without the query, which may hold anything; for gRPC the full name of the RPC."""
    client: str
    """The address, without its port."""
    request_id: str
    headers: Mapping[str, str]
    """Headers by lower-case name."""
    trace_of: Callable[[Mapping[str, str]], TraceParent]
    """Function from headers to a trace, which makes a new one each time if they have none."""
    on_begin: Callable[["WireRequest"], None]
    """Called for requests within this one."""
    on_end: Callable[["WireRequest"], None]
    route: str = ""
    """The path's pattern, if one was found; few, unlike paths."""
    is_within: bool = False
    """A request of a stream, which is one itself."""
    tenant: str = ""
    status: str = ""
    """HTTP's number, or the name of gRPC's code."""
    error: LoraplexError | None = None
    model: str = ""
    """Base model of the adapter that it is about."""
    subject: str = ""
    """Name of the adapter that it is about, if it manages or describes one."""
    changes_adapter: bool = False
    """Whether it manages that."""
    generations: list[GenerationRecord] = msgspec.field(default_factory=list)
    started_ns: int = msgspec.field(default_factory=time.monotonic_ns)
    started_unix_ns: int = msgspec.field(default_factory=time.time_ns)
    ended_ns: int = 0
    num_response_bytes: int = 0
    """Memory that is reserved for its response."""
    _trace: TraceParent | None = None
    _when_ended: tuple[Callable[[], None], ...] = ()

    def __repr__(self) -> str:
        """Show the request without its headers: one may be a key."""
        return f"<{self.protocol} request {self.request_id} {self.method} {self.path}>"

    @property
    def trace(self) -> TraceParent:
        """Trace of the request, made at first use: most requests need none. Thread-safe."""
        if self._trace is None:
            with _making_traces:
                if self._trace is None:
                    self._trace = self.trace_of(self.headers)
        return self._trace

    @property
    def user_agent(self) -> str:
        return self.headers.get("user-agent", "")[:MAX_USER_AGENT]

    def within(self) -> "WireRequest":
        """Begin a request of its own within this one, which is a stream of them."""
        request = WireRequest(
            protocol=f"{self.protocol}-stream",
            method=self.method,
            path=self.path,
            client=self.client,
            request_id=self.request_id,
            headers=self.headers,
            trace_of=self.trace_of,
            on_begin=self.on_begin,
            on_end=self.on_end,
            route=self.route,
            is_within=True,
            tenant=self.tenant,
            _trace=self.trace,
        )
        self.on_begin(request)
        return request

    def end(self, status: str) -> None:
        """Pass the request to its observers; only the first end counts."""
        if not self.ended_ns:
            self.ended_ns = time.monotonic_ns()
            self.status = status
            for call in self._when_ended:
                call()
            self._when_ended = ()
            self.on_end(self)

    def when_ended(self, call: Callable[[], None]) -> None:
        """Call a function at the end; at once if that was before."""
        if self.ended_ns:
            call()
        else:
            self._when_ended = (*self._when_ended, call)

    @property
    def failure(self) -> LoraplexError | None:
        """Return what went wrong; None: nothing did."""
        if self.error is not None:
            return self.error
        errors = (record.error for record in self.generations)
        return next((error for error in errors if error is not None), None)

    @property
    def error_code(self) -> str:
        """The stable code of what went wrong; empty if nothing did."""
        failure = self.failure
        return "" if failure is None else failure.code


_making_traces = threading.Lock()
_current: contextvars.ContextVar[WireRequest | None] = contextvars.ContextVar(
    "wire_request", default=None
)


current_request = _current.get
"""Return the request that the caller works for; None outside a server."""


def current_tenant() -> str:
    """Return the tenant that the caller works for; empty without a request."""
    request = _current.get()
    return "" if request is None else request.tenant


@contextlib.contextmanager
def as_current(request: WireRequest) -> Iterator[None]:
    """Whatever runs inside, and what it starts, works for this request."""
    # No token: a generator that was left is closed in another context than it began in.
    before = _current.get()
    _current.set(request)
    try:
        yield
    finally:
        _current.set(before)


def note_error(error: LoraplexError) -> None:
    """Note the error with which the current request ends."""
    if (request := current_request()) is not None:
        request.error = error


def note_subject(model: str, adapter: str, *, is_change: bool) -> None:
    """Note the adapter that the current request manages or describes."""
    if (request := current_request()) is not None:
        request.model, request.subject, request.changes_adapter = model, adapter, is_change


def note_request_id(request_id: str) -> None:
    """The current request has an id in its body, which holds instead of ours."""
    if (request := current_request()) is not None:
        request.request_id = request_id
