"""A connection to the serving process that comes back by itself after a loss.

A thread sends pings, and after a loss joins the server again, or starts it. Until then requests are
refused at once, with the reason.
"""

import threading
import time
from collections.abc import Callable

from .connection import Connection, ConnectionLost, Sink
from .server import ServerProcess, ServerUnavailable
from .wire import PING_SECONDS, Infer, Status

_STATUS_SECONDS = 5.0
_PAUSES_SECONDS = (0.0, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Pauses between attempts to reconnect; the last one repeats."""


class Link:
    """Connection of one model. Any thread may submit and cancel."""

    def __init__(
        self,
        server: ServerProcess,
        model: str,
        *,
        start_seconds: float,
        report: Callable[[str], None],
        each_tick: Callable[[], None],
        tick_seconds: float,
    ) -> None:
        """report: called on losses and reconnections. each_tick: called every tick_seconds."""
        self._server = server
        self._model = model
        self._start_seconds = start_seconds
        self._report = report
        self._each_tick = each_tick
        self._tick_seconds = tick_seconds
        self._connection: Connection | None = None
        self._reason = "the server is not there yet"
        self._closing = threading.Event()
        self._lost = threading.Event()
        self._threads: list[threading.Thread] = []

    def open(self) -> None:
        """Wait until the server is ready. Raises ServerUnavailable, ConnectionLost."""
        self._connection = self._ready_connection()
        for work, name in ((self._tick, "loraplex-ticks"), (self._keep, "loraplex-upkeep")):
            thread = threading.Thread(target=work, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def submit(self, request: Infer, sink: Sink) -> tuple[Connection, int]:
        """The connection, and the number to cancel it by.

        Raises ConnectionLost with the reason while there is no server, MessageTooLarge.
        """
        connection = self._connection
        if connection is None or connection.lost is not None:
            raise ConnectionLost(f"{self._reason}; the model looks for a server again")
        return connection, connection.submit(request, sink)

    def close(self) -> None:
        """Close: in-flight requests fail; the server ends if it was started for this
        model and no other needs it. Idempotent.
        """
        self._closing.set()
        self._lost.set()
        if self._connection is not None:
            self._connection.close()
        for thread in self._threads:
            thread.join(_STATUS_SECONDS)
        self._server.release()

    def _ready_connection(self) -> Connection:
        """Return a connection; a server that is just stopping may be joined: then try once more."""
        for attempt in range(3):
            connection = self._server.connect(self._on_lost, self._closing.is_set)
            try:
                self._wait_until_ready(connection)
            except ConnectionLost:
                if attempt == 2 or self._closing.is_set():
                    raise
            except BaseException:
                connection.close()
                raise
            else:
                return connection
        raise AssertionError("unreachable")

    def _wait_until_ready(self, connection: Connection) -> None:
        deadline = time.monotonic() + self._start_seconds
        status: Status | None = None
        while time.monotonic() < deadline and not self._closing.is_set():
            connection.ping()
            status = connection.wait_for_status(_STATUS_SECONDS)
            if connection.lost is not None:
                raise ConnectionLost(f"{connection.lost}{self._server.last_words()}")
            if status is not None and status.is_ready:
                self._check_served(status)
                return
            self._closing.wait(0.2)
        reason = "it does not respond" if status is None else status.reason
        raise ServerUnavailable(
            f"the server is not ready after {self._start_seconds:.0f} s: {reason}"
        )

    def _check_served(self, status: Status) -> None:
        if self._model not in status.models:
            raise ServerUnavailable(
                f"the server does not serve '{self._model}'; it serves {', '.join(status.models)}"
            )

    def _on_lost(self, reason: str) -> None:
        self._reason = reason
        self._lost.set()

    def _tick(self) -> None:
        next_ping = 0.0
        while not self._closing.wait(self._tick_seconds):
            self._each_tick()
            connection = self._connection
            if connection is not None and time.monotonic() >= next_ping:
                connection.ping()
                next_ping = time.monotonic() + PING_SECONDS

    def _keep(self) -> None:
        while self._lost.wait() and not self._closing.is_set():
            self._lost.clear()
            if self._connection is None or self._connection.lost is not None:
                self._report(f"{self._reason}{self._server.last_words()}")
                self._reconnect()

    def _reconnect(self) -> None:
        pauses = iter(_PAUSES_SECONDS)
        while not self._closing.wait(next(pauses, _PAUSES_SECONDS[-1])):
            try:
                connection = self._ready_connection()
            except (ServerUnavailable, ConnectionLost) as error:
                self._reason = str(error)
                self._report(self._reason)
                continue
            self._connection = connection
            self._report("the server is there again")
            return
