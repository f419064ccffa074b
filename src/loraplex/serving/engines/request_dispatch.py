"""Dispatch of in-flight requests to the engine that runs at the moment.

It sends requests and aborts to an engine, puts its outputs into their streams, and keeps
the requests while there is no engine.
"""

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence

import msgspec

from loraplex.core.clock import Clock
from loraplex.core.errors import LoraplexError
from loraplex.core.output import EngineOutput
from loraplex.core.request import RequestId
from loraplex.engine.messages import AbortRequest, AddRequest, AddRequests, StepDone
from loraplex.serving.engines.engine_state import EngineEnd
from loraplex.serving.engines.in_flight_request import InFlightRequest
from loraplex.serving.engines.in_flight_requests import InFlightRequests
from loraplex.serving.engines.link import EngineDied, EngineLink
from loraplex.serving.engines.registrations import EngineRegistrations
from loraplex.serving.engines.restart_limits import (
    RestartLimits,
    end_at_deadline,
    error_after_restart,
    verdict,
)
from loraplex.serving.logits_files import LogitsFolder, discard

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
        self._requests = InFlightRequests()
        self._logits = LogitsFolder()
        self._link: EngineLink | None = None
        self._lost_ns: int | None = None
        """When the last engine died, while there is none."""
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._requests)

    def submit(self, request: InFlightRequest) -> None:
        """Send it to the engine, now or when there is one."""
        self._requests.add(request)
        if request.batch is not None:
            request.batch.when_closed(self._send_due)
        try:
            self._send_due()
        except BaseException:
            self._requests.remove(request)
            raise

    def abort(self, request_id: RequestId, sequence_index: int | None) -> None:
        request = self._requests.find(request_id)
        if request is None or not request.abort(sequence_index):
            return
        if request.is_sent and self._link is not None:
            self._link.send(AbortRequest(request_id, sequence_index))
        elif request.end_aborted():
            self._requests.remove(request)

    def num_by_label(self) -> Mapping[Hashable, int]:
        return Counter(label for request in self._requests for label in request.labels)

    def fail_labelled(self, label: Hashable, error: LoraplexError) -> int:
        """How many those were."""
        found = [request for request in self._requests if label in request.labels]
        self._end(found, error)
        return len(found)

    def end_all(self, error: LoraplexError) -> None:
        """The engine lives on, without them."""
        self._end(list(self._requests), error)

    def fail_all(self, error: LoraplexError) -> None:
        """None of them gets an engine any more."""
        for request in self._requests:
            self._fail(request, error)
        if self._timer is not None:
            self._timer.cancel()

    def close(self) -> None:
        """Delete logits that no client read."""
        self._logits.close()

    def needed_adapters(self) -> Collection[str]:
        """Return digests of adapters that the next engine may need."""
        return {source.digest for request in self._requests for source in request.adapters}

    def take_engine(self, link: EngineLink) -> None:
        """A new engine is ready."""
        self._link, self._lost_ns = link, None
        for request in self._requests.unsent:
            request.has_waited = True
        self._send_due()

    def lose_engine(self, death: EngineDied) -> None:
        """The engine is dead, or the next one did not come to life."""
        if self._link is not None:
            self._link, self._lost_ns = None, self._clock.now_ns()
        self._requests.lose_engine(death.in_flight, was_killed=death.end is EngineEnd.KILL)
        for request in self._requests:
            error = verdict(request)
            if request.end_aborted():
                self._requests.remove(request)
            elif error is not None:
                logger.error("model %s: request %d: %s", self._model, request.request_id, error)
                self._fail(request, error)
        self._send_due()

    def take_step(self, step: StepDone) -> None:
        """Deliver the outputs of a step."""
        if step.record is not None:
            self._requests.note_step(frozenset(step.record.request_ids))
        for output in step.outputs:
            self._deliver(output)
        if self._requests.has_unsent:
            self._send_due()

    def _deliver(self, output: EngineOutput) -> None:
        request = self._requests.find(output.request_id)
        if request is None:
            discard((output,))
            return
        if output.finished:
            self._requests.remove(request)
        if request.has_waited and output.error is not None:
            error = error_after_restart(output.error)
            output = msgspec.structs.replace(output, error=error)
        request.deliver(self._logits.keep(output))

    def _send_due(self) -> None:
        """Send the engine the requests that are due."""
        link = self._link
        if link is not None:
            due = self._requests.take_due()
            for _, batch in itertools.groupby(due, lambda request: request.batch or request):
                self._send(link, tuple(batch))
        if (self._requests.has_unsent or self._requests.timed) and self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_POLL_SECONDS, self._look_at_times)

    def _send(self, link: EngineLink, batch: Sequence[InFlightRequest]) -> None:
        """Send requests that came as one, or a single one, with their adapters."""
        sources = [source for request in batch for source in request.adapters]
        for source in sources:
            self._adapters.register(source, link.send)
        requests = tuple(request.engine_request() for request in batch)
        link.send(AddRequest(*requests) if len(requests) == 1 else AddRequests(requests))
        for source in sources:
            self._adapters.let_leave(source, link.send)

    def _look_at_times(self) -> None:
        """End the requests whose time is up, whatever the engine does."""
        self._timer = None
        now_ns = self._clock.now_ns()
        for request in self._requests.timed:
            error = end_at_deadline(request, now_ns)
            if error is not None:
                self._end([request], error)
        for request in self._requests.unsent:
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
        self._requests.remove(request)
        request.fail(error)
