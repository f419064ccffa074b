"""What serving and an engine say to each other. Encoded as msgpack by msgspec; never pickled.

Every message travels beside the engine's epoch, so that nothing meant for a dead engine reaches
the one that took its place.
"""

import msgspec

from loraplex.core.adapter import AdapterSource
from loraplex.core.errors import ErrorInfo
from loraplex.core.output import EngineOutput
from loraplex.core.plan import Capacity
from loraplex.core.request import EngineRequest, RequestId
from loraplex.core.stats import AdapterActivity, EngineStats, StepRecord


class AddRequest(msgspec.Struct, frozen=True, tag="add"):
    request: EngineRequest


class AbortRequest(msgspec.Struct, frozen=True, tag="abort"):
    """End a request, or one sequence of it. Unknown ids are no error: it may have just ended."""

    request_id: RequestId
    sequence_index: int | None = None


class RegisterAdapter(msgspec.Struct, frozen=True, tag="register"):
    """Make a digest known. Sent before the first request that names it."""

    source: AdapterSource


class UnregisterAdapter(msgspec.Struct, frozen=True, tag="unregister"):
    """Forget a digest, and its copies, as soon as no request needs it."""

    digest: str


class QueryAdapters(msgspec.Struct, frozen=True, tag="ask_adapters"):
    """Where the adapters are and for whom; answered by AdaptersReport with the same number."""

    query_id: int


class PinAdapter(msgspec.Struct, frozen=True, tag="hold"):
    """Keep a registered adapter on the device; AdapterPinned with the same number is the reply."""

    query_id: int
    digest: str


class UnpinAdapter(msgspec.Struct, frozen=True, tag="release"):
    """Undo PinAdapter. An unknown one is fine."""

    digest: str


class PreloadAdapter(msgspec.Struct, frozen=True, tag="preload"):
    """Bring a registered adapter to the device while there is room for it."""

    digest: str


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Leave the loop. What still runs ends with an error."""


EngineCommand = (
    AddRequest
    | AbortRequest
    | RegisterAdapter
    | UnregisterAdapter
    | QueryAdapters
    | PinAdapter
    | UnpinAdapter
    | PreloadAdapter
    | Shutdown
)


class EngineReady(msgspec.Struct, frozen=True, tag="ready"):
    """The first event of an engine: it takes requests now."""

    capacity: Capacity


class EngineFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The last event of an engine that cannot start or go on."""

    error: ErrorInfo


class StepDone(msgspec.Struct, frozen=True, tag="step"):
    """Once a turn of the loop: what it did for whom."""

    outputs: tuple[EngineOutput, ...]
    stats: EngineStats
    record: StepRecord | None = None
    """None where nothing was launched: an abort, or a request refused."""


class AdapterRejected(msgspec.Struct, frozen=True, tag="rejected"):
    """A registered adapter can never be served by this engine."""

    digest: str
    error: ErrorInfo


class AdaptersReport(msgspec.Struct, frozen=True, tag="adapters"):
    query_id: int
    activity: AdapterActivity
    stats: EngineStats = EngineStats()
    """Of the same moment: an engine that only lets adapters leave tells it nowhere else."""


class AdapterPinned(msgspec.Struct, frozen=True, tag="held"):
    """The reply to PinAdapter, with an error if the adapter is not pinned."""

    query_id: int
    error: ErrorInfo | None = None


EngineEvent = (
    EngineReady | EngineFailed | StepDone | AdapterRejected | AdaptersReport | AdapterPinned
)

_COMMAND_DECODER = msgspec.msgpack.Decoder(EngineCommand)
_EVENT_DECODER = msgspec.msgpack.Decoder(EngineEvent)


def encode(message: EngineCommand | EngineEvent) -> bytes:
    return msgspec.msgpack.encode(message)


def decode_command(data: bytes) -> EngineCommand:
    """Raises msgspec.DecodeError or ValidationError on anything but a command."""
    command: EngineCommand = _COMMAND_DECODER.decode(data)
    return command


def decode_event(data: bytes) -> EngineEvent:
    event: EngineEvent = _EVENT_DECODER.decode(data)
    return event
