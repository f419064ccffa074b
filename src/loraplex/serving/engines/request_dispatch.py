"""Dispatch of in-flight requests to the engine that runs at the moment.

It sends requests and aborts to an engine, puts its outputs into their streams, and keeps
the requests while there is no engine.

Whatever was in a step when an engine crashed may have crashed it (and any request, if there was no
step). Such suspects are given to the next engine first, one at a time: the next one when the one
before has ended, or has got beyond the place where the engine crashed. All others wait meanwhile,
so that a second crash has one cause.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence

import msgspec

from loraplex.core.adapter import AdapterSource
from loraplex.core.clock import Clock
from loraplex.core.errors import ErrorInfo, LoraplexError, error_from_info
from loraplex.core.output import EngineOutput
from loraplex.core.request import RequestBatch, RequestId
from loraplex.engine.messages import (
    AbortRequest,
    AddRequest,
    AddRequests,
    EngineCommand,
    RegisterAdapter,
    StepDone,
    UnregisterAdapter,
)
from loraplex.serving.engines.engine_state import EngineEnd
from loraplex.serving.engines.in_flight_request import (
    CRASH_BLAME,
    KILL_BLAME,
    SUSPECT_BLAME,
    InFlightRequest,
)
from loraplex.serving.engines.link import EngineDied, EngineLink
from loraplex.serving.engines.restart_limits import (
    RestartLimits,
    end_at_deadline,
    error_after_restart,
    verdict,
)
from loraplex.serving.logits_files import LogitsFolder, discard

Send = Callable[[EngineCommand], None]


class EngineRegistrations:
    """Registrations by digest. Those of a dead engine are forgotten."""

    def __init__(self) -> None:
        self.registered: set[str] = set()
        """Digests that are registered with the running engine."""
        self.pinned: dict[str, AdapterSource] = {}
        """Adapters that are to stay on the device, also with the next engine."""
        self.confirmed: set[str] = set()
        """Those that the running engine has confirmed to `AsyncEngine.pin`."""
        self._rejected: dict[str, ErrorInfo] = {}
        """Adapters that the running engine can never serve, with the reason."""
        self._leaving: set[str] = set()
        """Digests unloaded while requests need them: registered for these requests only."""

    def want(self, source: AdapterSource, send: Send) -> None:
        """Register an adapter that the operator wants. Raises as `expect`."""
        self.expect(source)
        self.register(source, send)

    def expect(self, source: AdapterSource) -> None:
        """Note that an adapter is wanted and will be registered.

        Raises the running engine's error if it rejected the adapter.
        """
        rejection = self._rejected.get(source.digest)
        if rejection is not None:
            raise error_from_info(rejection)
        self._leaving.discard(source.digest)

    def register(self, source: AdapterSource, send: Send) -> None:
        """Register an adapter for an in-flight request, unless it is registered."""
        if source.digest not in self.registered:
            self.registered.add(source.digest)
            send(RegisterAdapter(source))

    def let_leave(self, source: AdapterSource, send: Send) -> None:
        """Unregister an adapter that was unloaded meanwhile: the engine has the request now."""
        if source.digest in self._leaving and source.digest in self.registered:
            self.registered.remove(source.digest)
            send(UnregisterAdapter(source.digest))

    def forget(self, digest: str, send: Send | None, needed: Collection[str]) -> None:
        """Forget an unloaded adapter. needed: digests that in-flight requests use."""
        self._rejected.pop(digest, None)
        self.pinned.pop(digest, None)
        self.confirmed.discard(digest)
        self._leaving.intersection_update(needed)  # the requests of others have ended
        if digest in needed:
            self._leaving.add(digest)
        if digest in self.registered:
            self.registered.remove(digest)
            if send is not None:
                send(UnregisterAdapter(digest))

    def reject(self, digest: str, error: ErrorInfo) -> bool:
        """Note why the engine can never serve an adapter; False if a reason is known already.

        A preload sent after the registration is refused, too.
        """
        self.registered.discard(digest)  # registered again once the reason may be gone
        is_first = digest not in self._rejected
        if is_first:
            self._rejected[digest] = error
        return is_first

    def forgive(self) -> None:
        """Forget rejections, since there is more memory now."""
        self._rejected.clear()

    def lose_engine(self) -> None:
        """Forget what a dead engine knew."""
        self.registered.clear()
        self.confirmed.clear()
        self._rejected.clear()


logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.1
"""How often requests with a deadline, and those that no engine knows, are looked at: their time may
be up."""


class RequestDispatch:
    """Dispatcher of one model. All methods run on serving's event loop."""

    def __init__(
        self, model: str, adapters: EngineRegistrations, clock: Clock, patience: RestartLimits
    ) -> None:
        self._model = model
        self._adapters = adapters
        self._clock = clock
        self._patience = patience
        self._requests: dict[RequestId, InFlightRequest] = {}
        """All requests from submission to last output, in the order of their submission."""
        self._unsent: dict[RequestId, InFlightRequest] = {}
        """Those that the running engine does not know, or that wait for one."""
        self._timed: dict[RequestId, InFlightRequest] = {}
        """Those that have a deadline."""
        self._searches: set[RequestId] = set()
        """Those whose only sign of life is a step that ends well."""
        self._on_probation: InFlightRequest | None = None
        self._logits = LogitsFolder()
        self._link: EngineLink | None = None
        self._lost_ns: int | None = None
        """When the last engine died, while there is none."""
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._requests)

    def submit(self, request: InFlightRequest) -> None:
        """Send it to the engine, now or when there is one."""
        self._requests[request.request_id] = self._unsent[request.request_id] = request
        if request.deadline_ns is not None:
            self._timed[request.request_id] = request
        if request.is_search:
            self._searches.add(request.request_id)
        if request.batch is not None:
            request.batch.when_closed(self._send_due)
        try:
            self._send_due()
        except BaseException:
            self._remove(request)
            raise

    def abort(self, request_id: RequestId, sequence_index: int | None) -> None:
        request = self._requests.get(request_id)
        if request is None or not request.abort(sequence_index):
            return
        if request.is_sent and self._link is not None:
            self._link.send(AbortRequest(request_id, sequence_index))
        elif request.end_aborted():
            self._remove(request)

    def num_by_label(self) -> Mapping[Hashable, int]:
        """Return the number of in-flight requests by label."""
        return Counter(label for request in self._requests.values() for label in request.labels)

    def fail_labelled(self, label: Hashable, error: LoraplexError) -> int:
        """End the requests that carry a label, with an error; return how many those were."""
        found = [request for request in self._requests.values() if label in request.labels]
        self._end(found, error)
        return len(found)

    def end_all(self, error: LoraplexError) -> None:
        """End all requests with an error. The engine lives on, and new ones are accepted."""
        self._end(tuple(self._requests.values()), error)

    def fail_all(self, error: LoraplexError) -> None:
        """None of them gets an engine any more."""
        for request in tuple(self._requests.values()):
            self._fail(request, error)
        if self._timer is not None:
            self._timer.cancel()

    def close(self) -> None:
        """Delete logits that no client read."""
        self._logits.close()

    def needed_adapters(self) -> Collection[str]:
        """Return digests of adapters that the next engine may need."""
        requests = self._requests.values()
        return {source.digest for request in requests for source in request.adapters}

    def take_engine(self, link: EngineLink) -> None:
        """A new engine is ready."""
        self._link, self._lost_ns = link, None
        for request in self._unsent.values():
            request.has_waited = True
        self._send_due()

    def lose_engine(self, death: EngineDied) -> None:
        """The engine is dead, or the next one did not come to life."""
        if self._link is not None:
            self._link, self._lost_ns = None, self._clock.now_ns()
        was_killed = death.end is EngineEnd.KILL
        blame = KILL_BLAME if was_killed or not death.in_flight else CRASH_BLAME
        for request in self._requests.values():
            if request.is_sent:
                may_be_cause = not death.in_flight or request.request_id in death.in_flight
                request.lose_engine(blame if may_be_cause else 0)
        self._on_probation, self._unsent = None, dict(self._requests)
        for request in tuple(self._requests.values()):
            error = verdict(request)
            if request.end_aborted():
                self._remove(request)
            elif error is not None:
                logger.error("model %s: request %d: %s", self._model, request.request_id, error)
                self._fail(request, error)
        self._send_due()

    def take_step(self, step: StepDone) -> None:
        """Deliver the outputs of a step."""
        if step.record is not None and self._searches:
            for request_id in self._searches.intersection(step.record.request_ids):
                self._requests[request_id].note_step()
        for output in step.outputs:
            self._deliver(output)
        if self._unsent:
            self._send_due()

    def _deliver(self, output: EngineOutput) -> None:
        request = self._requests.get(output.request_id)
        if request is None:
            discard((output,))
            return
        if output.finished:
            self._remove(request)
        if request.has_waited and output.error is not None:
            error = error_after_restart(output.error)
            output = msgspec.structs.replace(output, error=error)
        request.deliver(self._logits.keep(output))

    def _send_due(self) -> None:
        """Send the engine the requests that are due. Those that came as one are one command."""
        if (link := self._link) is not None:
            for batch in self._take_due():
                sources = [source for request in batch for source in request.adapters]
                for source in sources:
                    self._adapters.register(source, link.send)
                requests = tuple(request.engine_request() for request in batch)
                link.send(AddRequest(*requests) if len(requests) == 1 else AddRequests(requests))
                for source in sources:
                    self._adapters.let_leave(source, link.send)
        if (self._unsent or self._timed) and self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_POLL_SECONDS, self._look_at_times)

    def _take_due(self) -> Collection[Sequence[InFlightRequest]]:
        """Return the requests that the running engine is to receive now, batch by batch."""
        if self._on_probation is not None and self._on_probation.blame >= SUSPECT_BLAME:
            return ()
        unsent = self._unsent.values()
        self._on_probation = next((one for one in unsent if one.blame >= SUSPECT_BLAME), None)
        batches: dict[RequestBatch | RequestId, list[InFlightRequest]] = {}
        for request in (self._on_probation,) if self._on_probation else tuple(unsent):
            if not request.waits_for_others:
                batches.setdefault(request.batch or request.request_id, []).append(request)
                del self._unsent[request.request_id]
                request.is_sent = True
        return batches.values()

    def _look_at_times(self) -> None:
        """End the requests whose time is up, whatever the engine does."""
        self._timer = None
        now_ns = self._clock.now_ns()
        for request in tuple(self._timed.values()):
            error = end_at_deadline(request, now_ns)
            if error is not None:
                self._end([request], error)
        for request in tuple(self._unsent.values()):
            error = self._patience.end_of_wait(request, now_ns, self._lost_ns)
            if error is not None:
                self._fail(request, error)
        self._send_due()

    def _end(self, requests: Iterable[InFlightRequest], error: LoraplexError) -> None:
        for request in requests:
            if request.is_sent and self._link is not None:
                self._link.send(AbortRequest(request.request_id))
            self._fail(request, error)

    def _fail(self, request: InFlightRequest, error: LoraplexError) -> None:
        self._remove(request)
        request.fail(error)

    def _remove(self, request: InFlightRequest) -> None:
        """Forget a request, which has ended."""
        del self._requests[request.request_id]
        self._unsent.pop(request.request_id, None)
        self._timed.pop(request.request_id, None)
        self._searches.discard(request.request_id)
        if request is self._on_probation:
            self._on_probation = None
