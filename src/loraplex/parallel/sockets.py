"""Sockets between rank 0 and the other ranks: rank 0 binds one, which every rank connects to."""

import hmac
import logging
import os
from typing import Final

import msgspec
import zmq

from loraplex.core.private_folder import PrivateFolder
from loraplex.parallel.messages import (
    Hello,
    RankCommand,
    RankEvent,
    RankFailed,
    decode_command,
    decode_event,
    encode,
)

logger = logging.getLogger(__name__)

_UNTIL_DELIVERED: Final = -1
_MAX_EVENT_BYTES: Final = 16 << 20
"""Maximum size of a rank's message: a capacity, or the outcome of one step."""
_MAX_QUEUED: Final = 10_000
"""Maximum number of messages that wait for one rank. A rank has few steps in flight, and loads are
limited by the host memory of adapters."""


class RankUnreachable(Exception):
    """A rank is not connected, or does not read its messages."""


class RankServer:
    """Rank 0's socket. Used by one thread."""

    def __init__(self, token: str, host: str = "") -> None:
        """token: secret of the ranks. host: address of this machine for ranks on other machines;
        empty: none are. Raises zmq.ZMQError if no socket can be bound.
        """
        self._token = token.encode()
        self._folder = None if host else PrivateFolder()
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.SNDHWM, _MAX_QUEUED)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_EVENT_BYTES)
        self._socket.setsockopt(zmq.LINGER, 0)  # an executor has stopped all ranks before
        self._ranks: dict[bytes, int] = {}
        self._identities: dict[int, bytes] = {}
        try:
            if self._folder is None:
                port = self._socket.bind_to_random_port(f"tcp://{host}")
                self.address = f"tcp://{host}:{port}"
            else:
                self.address = f"ipc://{os.path.join(self._folder.path, 'ranks')}"
                self._socket.bind(self.address)
        except zmq.ZMQError:
            self.close()
            raise

    def send(self, rank: int, command: RankCommand) -> None:
        """Send a command. Raises RankUnreachable."""
        self._send(rank, encode(command))

    def broadcast(self, command: RankCommand) -> None:
        """Send a command to every rank that said Hello. Raises RankUnreachable."""
        payload = encode(command)
        for rank in self._identities:
            self._send(rank, payload)

    def receive(self, timeout_seconds: float = 0.0) -> tuple[int, RankEvent] | None:
        """Return the next event and its rank; None after timeout_seconds without one.

        Messages of others than ranks are dropped.
        """
        while self._socket.poll(int(timeout_seconds * 1000)):
            identity, *frames = self._socket.recv_multipart()
            event = self._event(identity, frames)
            if event is not None:
                return self._ranks[identity], event
        return None

    def close(self) -> None:
        """Close the socket. Commands that no rank has read are dropped."""
        self._socket.close()
        self._context.term()
        if self._folder is not None:
            self._folder.remove()

    def _send(self, rank: int, payload: bytes) -> None:
        try:
            self._socket.send_multipart([self._identities[rank], payload], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise RankUnreachable(f"rank {rank} takes no messages: {error.strerror}") from error

    def _event(self, identity: bytes, frames: list[bytes]) -> RankEvent | None:
        try:
            (payload,) = frames
            event = decode_event(payload)
        except (ValueError, msgspec.DecodeError):
            logger.warning("dropped a message that is none of a rank")
            return None
        if identity in self._ranks:
            return event
        if (
            not isinstance(event, Hello | RankFailed)
            or event.rank in self._identities
            or not hmac.compare_digest(event.token.encode(), self._token)
        ):
            logger.warning("dropped a message of a process that is not a rank of this engine")
            return None
        self._ranks[identity], self._identities[event.rank] = event.rank, identity
        return event


class RankSocket:
    """The socket of a rank that is not rank 0. Used by one thread."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, _MAX_QUEUED)
        self._socket.setsockopt(zmq.LINGER, _UNTIL_DELIVERED)
        self._socket.connect(address)

    def send(self, event: RankEvent) -> None:
        """Send an event; never blocks."""
        self._socket.send(encode(event))

    def receive(self, timeout_seconds: float | None) -> RankCommand | None:
        """Return the next command; None after timeout_seconds without one.

        timeout_seconds None waits for ever.
        """
        timeout_ms = None if timeout_seconds is None else max(1, int(timeout_seconds * 1000))
        return decode_command(self._socket.recv()) if self._socket.poll(timeout_ms) else None

    def close(self) -> None:
        """Close the socket after delivering sent events, such as the reason of the rank's end.

        There is no limit of time, since a busy machine may need any: rank 0 ends the ranks that it
        does not need any more, and its own end ends them, too.
        """
        self._socket.close()
        self._context.term()
