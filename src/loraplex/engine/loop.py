"""Loop of the thread that owns an engine: it turns commands into steps, and steps into events."""

import logging
from collections.abc import Sequence
from typing import Final

from loraplex.core.adapter import AdapterSource
from loraplex.core.clock import Clock
from loraplex.core.errors import DeviceLost, LoraplexError
from loraplex.core.request import EngineRequest
from loraplex.core.stats import EngineStats
from loraplex.engine.channel import EngineChannel
from loraplex.engine.engine import Engine, EngineTurn
from loraplex.engine.messages import (
    AbortRequest,
    AdapterPinned,
    AdapterRejected,
    AdaptersReport,
    AddRequest,
    AddRequests,
    EngineCommand,
    EngineReady,
    PinAdapter,
    PreloadAdapter,
    QueryAdapters,
    RegisterAdapter,
    Shutdown,
    StepDone,
    UnpinAdapter,
    UnregisterAdapter,
)

logger = logging.getLogger(__name__)

BEAT_SECONDS: Final = 1.0
"""Interval at which an idle loop shows that it is alive, and lets other ranks show it."""
STATS_SECONDS: Final = 0.1
"""Interval of statistics while rows only decode: to make and send them takes as long as a plan."""
_REPLY_SECONDS: Final = 0.001
"""Interval at which an otherwise idle loop checks whether the ranks have replied to a probe."""


class EngineLoop:
    """Runs an engine until Shutdown. Commands, and so aborts, apply between steps only."""

    def __init__(
        self,
        engine: Engine,
        channel: EngineChannel,
        clock: Clock,
        *,
        check_when_idle: bool = False,
    ) -> None:
        self._engine = engine
        self._engine.mark_steps(channel.marker)
        self._channel = channel
        self._clock = clock
        self._check_when_idle = check_when_idle
        self._probed_ns: int | None = None
        """When the other ranks were probed last."""
        self._is_probing = False
        """Whether a rank owes its reply to the last probe."""
        self._sent = EngineStats()
        self._sent_ns: int | None = None
        """The statistics sent last, and when."""
        self._pinned: list[AdapterPinned] = []
        """Replies to be sent once all ranks have replied."""

    def run(self) -> None:
        """Report that the engine is ready, then serve. Raises DeviceLost, and notes the reason."""
        try:
            self._serve()
        except DeviceLost as lost:
            self._channel.marker.note_end(str(lost))
            raise

    def _serve(self) -> None:
        self._channel.send(EngineReady(self._engine.capacity))
        while self._take_commands():
            turn = self._engine.step()
            if turn.outputs or turn.record is not None:
                self._channel.send(StepDone(turn.outputs, self._stats(turn), turn.record))
            if self._check_when_idle and self._engine.is_idle:
                self._engine.check()

    def _stats(self, turn: EngineTurn) -> EngineStats | None:
        """Return statistics that are worth sending after a turn; None: they can wait."""
        record, now_ns = turn.record, self._clock.now_ns()
        if (
            record is not None
            and record.only_decodes
            and record.num_running == self._sent.num_running
            and record.num_waiting == self._sent.num_waiting
            and not any(output.finished for output in turn.outputs)
            and self._sent_ns is not None
            and now_ns - self._sent_ns < STATS_SECONDS * 1e9
        ):
            return None
        self._sent, self._sent_ns = self._engine.stats(), now_ns
        return self._sent

    def _take_commands(self) -> bool:
        """Apply all waiting commands; wait for one if nothing else is to be done.

        Return False after Shutdown.
        """
        command = self._next_command()
        while command is not None:
            if isinstance(command, Shutdown):
                return False
            self._apply(command)
            self._beat()
            command = self._channel.receive(0)
        return True

    def _next_command(self) -> EngineCommand | None:
        """Wait for a command; None when the engine itself has something to do."""
        while True:
            self._beat()
            left = self._seconds_to_wait()
            if left is not None and left <= BEAT_SECONDS:
                return self._channel.receive(left)
            command = self._channel.receive(BEAT_SECONDS)
            if command is not None:
                return command

    def _beat(self) -> None:
        """Show serving that the engine is alive: this loop, and every other rank.

        A rank that a signal stopped would else be noticed in the next step only: before it, loads
        would wait for it without an end, and pins would be confirmed.
        """
        if self._is_probing:
            if self._engine.ranks is not None and self._engine.ranks.silent():
                return
            self._is_probing = False
            for pinned in self._pinned:
                self._channel.send(pinned)
            self._pinned.clear()
        self._channel.marker.beat()
        now_ns = self._clock.now_ns()
        is_due = self._probed_ns is None or now_ns - self._probed_ns >= BEAT_SECONDS * 1e9
        if self._engine.ranks is not None and is_due:
            self._probe(now_ns)

    def _probe(self, now_ns: int) -> None:
        if self._engine.ranks is not None:
            self._engine.ranks.probe()
            self._probed_ns, self._is_probing = now_ns, True

    def _seconds_to_wait(self) -> float | None:
        if self._pinned:
            return _REPLY_SECONDS
        wakes = (self._engine.next_wake_ns(), self._engine.next_expiry_ns())
        wake_ns = min((wake_ns for wake_ns in wakes if wake_ns is not None), default=None)
        return None if wake_ns is None else max(0, wake_ns - self._clock.now_ns()) / 1e9

    def _apply(self, command: EngineCommand) -> None:
        match command:
            case AddRequest(request):
                self._engine.add(request)
            case AddRequests(requests):
                self._add_all(requests)
            case AbortRequest(request_id, sequence_index):
                self._engine.abort(request_id, sequence_index)
            case RegisterAdapter(source):
                self._bring(source.digest, source)
            case PreloadAdapter(digest):
                self._bring(digest)
            case UnregisterAdapter(digest):
                self._engine.forget_adapter(digest)
            case QueryAdapters(query_id):
                activity = self._engine.adapter_activity()
                self._channel.send(AdaptersReport(query_id, activity, self._engine.stats()))
            case PinAdapter(query_id, digest):
                self._hold(query_id, digest)
            case UnpinAdapter(digest):
                self._engine.unpin_adapter(digest)

    def _add_all(self, requests: Sequence[EngineRequest]) -> None:
        for request in requests:
            self._engine.add(request)

    def _hold(self, query_id: int, digest: str) -> None:
        try:
            self._engine.pin_adapter(digest)
        except LoraplexError as error:
            self._channel.send(AdapterPinned(query_id, error.to_info()))
        else:
            self._pinned.append(AdapterPinned(query_id))
            # The ranks get it with the next plan. Until then only their replies show that they can.
            self._probe(self._clock.now_ns())
            self._is_probing = True

    def _bring(self, digest: str, source: AdapterSource | None = None) -> None:
        """Register an adapter, or preload one that is registered."""
        try:
            if source is not None:
                self._engine.register_adapter(source)
            else:
                self._engine.preload(digest)
        except LoraplexError as error:
            self._channel.send(AdapterRejected(digest, error.to_info()))
