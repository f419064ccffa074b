"""The other ranks of an engine, as rank 0 sees them."""

import contextlib
import logging
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Final, TypeVar

import msgspec
import zmq

from loraplex.core.errors import ConfigError, DeviceLost, LoraplexError, error_from_info
from loraplex.core.plan import Capacity
from loraplex.parallel.executors import Executor, RankEnd
from loraplex.parallel.messages import (
    Begin,
    Hello,
    LeaveLoop,
    LoadDone,
    Probe,
    ProbeReply,
    RankCommand,
    RankEvent,
    RankFailed,
    RankStart,
    Ready,
    StepReport,
)
from loraplex.parallel.sockets import RankServer, RankUnreachable
from loraplex.parallel.world import World, agreed_capacity, check_traits

logger = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 0.1
"""Interval at which a wait for a message checks whether a rank has ended."""
_END_SECONDS: Final = 1.0
"""How long after a rank cannot be reached its end may still be unknown."""
_STOP_SECONDS: Final = 3.0
"""Less than serving waits for an engine to stop."""

_Event = TypeVar("_Event", Hello, Ready)


class Ranks:
    """All ranks but rank 0. Used by one thread, but for what `executor` reports."""

    def __init__(
        self,
        world: World,
        executor: Executor,
        token: str,
        *,
        abort: Callable[[str], None],
        lose: Callable[[RankEnd], None],
    ) -> None:
        """world: of rank 0. token: secret of the ranks. abort: ends waits of rank 0 for others,
        with a reason. lose: called from any thread, once, with the end of a rank after all were
        ready.
        """
        self.world = world
        self.loads: list[tuple[int, LoadDone]] = []
        """Events that the loader has not taken yet."""
        self.reports: dict[int, dict[int, StepReport]] = {}
        """Reports of steps that are not absorbed yet: by step, by rank."""
        self.last_step_id = 0
        self._last_probe = 0
        self._probed: dict[int, int] = {}
        """Numbers of the last probes that the ranks have replied to."""
        self._executor = executor
        self._token = token
        self._abort = abort
        self._lose = lose
        self._server: RankServer | None = None
        self._failure: LoraplexError | None = None
        self._end: RankEnd | None = None
        self._has_ended = threading.Event()
        self._lock = threading.Lock()
        self._is_ready = False
        self._is_closing = False

    def start(self, settings: bytes) -> None:
        """Start the ranks, and return before they are there. Raises ConfigError."""
        try:
            self._server = RankServer(self._token, self._executor.host)
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot open a socket for ranks: {error.strerror}") from error
        starts = [
            RankStart(
                address=self._server.address,
                token=self._token,
                world=world,
                settings=settings,
            )
            for world in self.world.others()
        ]
        self._executor.start(starts, self._note_end)

    def begin(self, traits: Mapping[str, str], addresses: bytes) -> Mapping[int, bytes]:
        """Wait until all ranks are there, and let them load the weights.

        traits: what all must have equal. addresses: what others connect to on rank 0. Return those
        of all ranks. Raises ConfigError.
        """
        hellos = self._await_all(Hello)
        for rank, hello in sorted(hellos.items()):
            check_traits(traits, rank, hello.traits)
        known = {0: addresses} | {rank: hello.addresses for rank, hello in hellos.items()}
        self.broadcast(Begin(known))
        return known

    def agree(self, capacity: Capacity) -> Capacity:
        """Wait until all ranks are ready; return what all of them can do. Raises ConfigError."""
        others = self._await_all(Ready)
        agreed = agreed_capacity([capacity, *(others[rank].capacity for rank in sorted(others))])
        with self._lock:
            self._is_ready = True
            if self._end is None:
                return agreed
        raise self.failure()

    def failure(self) -> LoraplexError:
        """Return why the ranks cannot start."""
        while self._failure is None and (received := self._receive(_LOOK_SECONDS)) is not None:
            self._take(*received)
        return self._failure or ConfigError(f"the engine cannot start: {self._end}")

    @property
    def have_failed(self) -> bool:
        """Whether a rank has ended, or reported that it will."""
        return self._end is not None or self._failure is not None

    def send(self, rank: int, command: RankCommand) -> None:
        """Raises DeviceLost if the rank is gone."""
        self._reach(lambda server: server.send(rank, command))

    def broadcast(self, command: RankCommand) -> None:
        """Raises DeviceLost if a rank is gone."""
        self._reach(lambda server: server.broadcast(command))

    def take_events(self) -> None:
        """Take all events that are there. Raises DeviceLost if a rank failed."""
        while (received := self._receive(0.0)) is not None:
            self._take(*received)
        self._raise_if_lost()

    def probe(self) -> None:
        """Let each rank reply when it takes its next commands. Raises DeviceLost."""
        self._last_probe += 1
        self.broadcast(Probe(self._last_probe))

    def silent(self) -> Collection[int]:
        """Return the ranks that have not replied to the last probe. Raises DeviceLost."""
        self.take_events()
        others = range(1, self.world.size)
        return [rank for rank in others if self._probed.get(rank, 0) < self._last_probe]

    def reports_of(self, step_id: int) -> Mapping[int, StepReport]:
        """Return every rank's report of a step, for which Wait was broadcast.

        They usually are there. Raises DeviceLost if a rank fails or ends before it reports.
        """
        num_others = self.world.size - 1
        while len(self.reports.get(step_id, {})) < num_others:
            received = self._receive(_LOOK_SECONDS)
            if received is not None:
                self._take(*received)
            self._raise_if_lost()
        return self.reports.pop(step_id)

    def give_up(self, reason: str) -> None:
        """End the waits of all ranks for each other: the engine ends."""
        with self._lock:
            self._is_closing = True
        self._abort(reason)

    def close(self) -> None:
        """Stop the ranks, and wait until they are gone."""
        with self._lock:
            seconds = 0.0 if self._is_closing or self._end is not None else _STOP_SECONDS
            self._is_closing = True
        server, self._server = self._server, None
        if server is None:
            return
        with contextlib.ExitStack() as stack:  # closes the last one first
            stack.callback(server.close)
            try:
                server.broadcast(LeaveLoop())
            except RankUnreachable:
                seconds = 0.0
            finally:
                stack.callback(self._executor.stop, seconds)

    def _reach(self, send: Callable[[RankServer], None]) -> None:
        self._raise_if_lost()
        try:
            send(self._open_server())
        except RankUnreachable as error:
            self._has_ended.wait(_END_SECONDS)
            self._raise_if_lost()
            raise DeviceLost(str(error)) from error

    def _open_server(self) -> RankServer:
        assert self._server is not None, "started and not closed"
        return self._server

    def _receive(self, timeout_seconds: float) -> tuple[int, RankEvent] | None:
        return self._open_server().receive(timeout_seconds)

    def _await_all(self, kind: type[_Event]) -> dict[int, _Event]:
        found: dict[int, _Event] = {}
        while len(found) < self.world.size - 1:
            received = self._receive(_LOOK_SECONDS)
            if received is not None:
                rank, event = received
                if isinstance(event, kind):
                    found[rank] = event
                else:
                    self._take(rank, event)
            if self.have_failed:
                raise self.failure()
        return found

    def _take(self, rank: int, event: RankEvent) -> None:
        match event:
            case LoadDone():
                self.loads.append((rank, event))
            case StepReport():
                self.reports.setdefault(event.step_id, {})[rank] = event
            case ProbeReply(number):
                self._probed[rank] = number
            case RankFailed(error=error):
                named = msgspec.structs.replace(error, message=f"rank {rank}: {error.message}")
                self._failure = self._failure or error_from_info(named)

    def _raise_if_lost(self) -> None:
        if self._failure is not None:
            raise DeviceLost(self._failure.message)
        if self._end is not None:
            raise DeviceLost(str(self._end))

    def _note_end(self, end: RankEnd) -> None:
        with self._lock:
            if self._is_closing or self._end is not None:
                return
            if self._is_ready:
                logger.error("%s; the last launched step is %d", end, self.last_step_id)
                # Before rank 0 can notice, and end for this reason.
                self._lose(end)
            self._end = end
        self._has_ended.set()
        self._abort(str(end))
