"""Relay of one HTTP request to replicas: a response continues at another one if its replica dies.

Free of Ray: what calls a replica, and which errors mean that it is lost, are arguments.
"""

import hashlib
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final

import msgspec

from loraplex.core.errors import EngineRestartedError
from loraplex.serving.continuation import RecordPart, Unrecorded

logger = logging.getLogger(__name__)


class HttpCall(msgspec.Struct, frozen=True):
    """One HTTP request with its whole body, and the record of the replica that had it before."""

    method: str
    path: str
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    client: str = ""
    former: tuple[bytes, ...] = ()
    """Encoded parts of the record."""


class Start(msgspec.Struct, frozen=True, tag=True):
    """Status line and headers of a response."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]


class Body(msgspec.Struct, frozen=True, tag=True):
    """A piece of a response's body."""

    data: bytes


class Recorded(msgspec.Struct, frozen=True, tag=True):
    """A part of the record, encoded for the ingress, which only keeps it.

    It comes before the part of the response that follows from it.
    """

    part: bytes
    problem: str = ""
    """Why the request cannot be continued; empty: it can."""

    @classmethod
    def of(cls, part: RecordPart) -> "Recorded":
        problem = part.reason if isinstance(part, Unrecorded) else ""
        return cls(msgspec.msgpack.encode(part), problem)


Message = Start | Body | Recorded

_MESSAGES: Final = msgspec.msgpack.Decoder(list[Message])
_PARTS: Final = msgspec.msgpack.Decoder(RecordPart)
encode: Final = msgspec.msgpack.Encoder().encode


def called_path(scope: Mapping[str, Any]) -> str:
    """Return the path of an ASGI request without the route prefix of its application."""
    prefix = scope.get("root_path", "").rstrip("/")
    path = str(scope["path"])
    is_below = path == prefix or path.startswith(f"{prefix}/")
    return (path.removeprefix(prefix) if is_below else path) or "/"


def decode_messages(data: bytes) -> list[Message]:
    return _MESSAGES.decode(data)


def decode_call(data: bytes) -> HttpCall:
    return msgspec.msgpack.decode(data, type=HttpCall)


def decode_record(parts: Sequence[bytes]) -> list[RecordPart]:
    return [_PARTS.decode(part) for part in parts]


MAX_LOSSES: Final = 3
"""Number of replicas that may be lost with one request: it might be what ends them."""
MAX_RECORD_BYTES: Final = 8 << 20
"""Maximum size of a request's record: about 200,000 tokens."""
_SAFE_METHODS: Final = ("GET", "HEAD", "OPTIONS")

CallReplica = Callable[[HttpCall], AsyncGenerator[list[Message], None]]
"""Sends a request to a replica that the router chooses, and yields its messages."""


class ReplicaLost(Exception):
    """The replica ended before its response did."""


class Relay:
    """The response to one request, whichever replicas compute it."""

    def __init__(self, call: HttpCall, send: CallReplica) -> None:
        """send: raises ReplicaLost if a replica ended."""
        self._call = call
        self._send = send
        self._start: Start | None = None
        self._record: list[bytes] = []
        self._record_bytes = 0
        self._was_admitted = False
        self._unrecorded = ""
        """Why there is no record of an admitted request."""
        self._num_sent = 0
        """Bytes of the body that the client has."""
        self._digest = hashlib.blake2b(digest_size=16)

    @property
    def has_started(self) -> bool:
        """Whether the client has the status line."""
        return self._start is not None

    async def messages(self) -> AsyncGenerator[Start | Body, None]:
        """Yield the start and the body, each byte once.

        Raises EngineRestartedError if the response cannot be continued.
        """
        losses = 0
        while True:
            try:
                async with aclosing(self._response()) as response:
                    async for message in response:
                        yield message
                return
            except ReplicaLost as lost:
                losses += 1
                problem = self._problem(losses)
                if problem:
                    raise EngineRestartedError(problem, retry_after_seconds=2) from lost
                logger.warning("%s %s continues: %s", self._call.method, self._call.path, lost)

    async def _response(self) -> AsyncGenerator[Start | Body, None]:
        """Yield what the next replica adds to the response."""
        former = tuple(self._record)
        num_parts, replay = 0, _Replay(self._num_sent, self._digest.digest())
        call = msgspec.structs.replace(self._call, former=former)
        async with aclosing(self._send(call)) as responding:
            async for messages in responding:
                for message in messages:
                    match message:
                        case Recorded():
                            num_parts += 1
                            if num_parts > len(self._record):
                                self._keep(message)
                        case Start() if self._start is None:
                            self._start = message
                            yield message
                        case Start():
                            self._require_same(message)
                        case Body(data):
                            if new := replay.new(data):
                                self._num_sent += len(new)
                                self._digest.update(new)
                                yield Body(new)
        replay.end()

    def _require_same(self, start: Start) -> None:
        assert self._start is not None
        if start.status != self._start.status:
            raise EngineRestartedError(
                f"the response cannot be continued: the next replica responds {start.status}"
            )

    def _keep(self, recorded: Recorded) -> None:
        self._was_admitted = True
        self._unrecorded = self._unrecorded or recorded.problem
        self._record_bytes += len(recorded.part)
        if self._record_bytes > MAX_RECORD_BYTES:
            self._unrecorded = self._unrecorded or "its record would be larger than 8 MiB"
        if self._unrecorded:
            self._record.clear()
        else:
            self._record.append(recorded.part)

    def _problem(self, losses: int) -> str:
        """Return why no other replica can have the request; empty: one can."""
        if losses > MAX_LOSSES:
            return f"{losses} replicas ended with this request"
        if self._record or (self._start is None and self._call.method in _SAFE_METHODS):
            return ""
        if not self._was_admitted:
            return "the replica ended before it had admitted the request: send it again"
        # A generation changes nothing, so it may begin again.
        return (
            f"the replica ended, and the response cannot be continued: {self._unrecorded}"
            if self._start is not None
            else ""
        )


class _Replay:
    """Leaves out the beginning of a body that the client has, if it is the same."""

    def __init__(self, num_bytes: int, digest: bytes) -> None:
        self._left = num_bytes
        self._expected = digest
        self._digest = hashlib.blake2b(digest_size=16)

    def new(self, data: bytes) -> bytes:
        """Return what the client does not have of the next piece."""
        if not self._left:
            return data
        known, rest = data[: self._left], data[self._left :]
        self._digest.update(known)
        self._left -= len(known)
        if not self._left and self._digest.digest() != self._expected:
            raise EngineRestartedError(
                "the response cannot be continued: the next replica's differs from what was sent"
            )
        return rest

    def end(self) -> None:
        if self._left:
            raise EngineRestartedError(
                "the response cannot be continued: the next replica's is shorter"
            )
