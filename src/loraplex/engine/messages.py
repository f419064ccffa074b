"""Messages between serving and an engine. Encoded as msgpack by msgspec; never pickled.

Every message is sent with the engine's epoch, so that no message for a dead engine reaches the one
that took its place.
"""

from collections.abc import Callable
from typing import Final

import msgspec

from loraplex.core.adapter import AdapterSource
from loraplex.core.errors import ErrorInfo
from loraplex.core.output import EngineOutput
from loraplex.core.plan import Capacity
from loraplex.core.request import EngineRequest, RequestId
from loraplex.core.stats import AdapterActivity, EngineStats, StepRecord


class AddRequest(msgspec.Struct, frozen=True, tag="add"):
    """Compute a request."""

    request: EngineRequest


class AddRequests(msgspec.Struct, frozen=True, tag="add_all"):
    """Compute requests that came as one, so that the next plan can admit all of them."""

    requests: tuple[EngineRequest, ...]


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
    """Query place and use of the adapters; an AdaptersReport with the same number is the reply."""

    query_id: int


class PinAdapter(msgspec.Struct, frozen=True, tag="hold"):
    """Keep a registered adapter on the device; AdapterPinned with the same number is the reply."""

    query_id: int
    digest: str


class UnpinAdapter(msgspec.Struct, frozen=True, tag="release"):
    """Undo PinAdapter. An unknown one is fine."""

    digest: str


class PreloadAdapter(msgspec.Struct, frozen=True, tag="preload"):
    """Bring a registered adapter to the device while there is free memory."""

    digest: str


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Leave the loop. Running requests end with an error."""


class ConfirmEvents(msgspec.Struct, frozen=True, tag="confirm"):
    """The reply to EngineEnded: serving has all events of the engine."""


EngineCommand = (
    AddRequest
    | AddRequests
    | AbortRequest
    | RegisterAdapter
    | UnregisterAdapter
    | QueryAdapters
    | PinAdapter
    | UnpinAdapter
    | PreloadAdapter
    | Shutdown
    | ConfirmEvents
)


class EngineReady(msgspec.Struct, frozen=True, tag="ready"):
    """First event of an engine: it takes requests now."""

    capacity: Capacity


class EngineFailed(msgspec.Struct, frozen=True, tag="failed"):
    """Report of an engine that cannot start or continue: no event but EngineEnded follows."""

    error: ErrorInfo


class StepDone(msgspec.Struct, frozen=True, tag="step"):
    """Outputs and statistics of one turn of the loop."""

    outputs: tuple[EngineOutput, ...]
    stats: EngineStats | None
    """None: those sent last still hold, but for counters of steps that only decode."""
    record: StepRecord | None = None
    """None if no step was launched: after an abort or a refused request."""


class AdapterRejected(msgspec.Struct, frozen=True, tag="rejected"):
    """Report that a registered adapter can never be served by this engine."""

    digest: str
    error: ErrorInfo


class AdaptersReport(msgspec.Struct, frozen=True, tag="adapters"):
    """Place and use of the adapters: the reply to QueryAdapters."""

    query_id: int
    activity: AdapterActivity
    stats: EngineStats = EngineStats()
    """Statistics of the same moment. An engine that only evicts idle adapters sends no StepDone."""


class AdapterPinned(msgspec.Struct, frozen=True, tag="held"):
    """The reply to PinAdapter, with an error if the adapter is not pinned."""

    query_id: int
    error: ErrorInfo | None = None


class EngineEnded(msgspec.Struct, frozen=True, tag="ended"):
    """Last event of an engine process that ends by itself, whatever the reason.

    The process lives until serving confirms it with ConfirmEvents. Events of an engine that ended
    without it may be lost.
    """


EngineEvent = (
    EngineReady
    | EngineFailed
    | StepDone
    | AdapterRejected
    | AdaptersReport
    | AdapterPinned
    | EngineEnded
)

encode: Final[Callable[[EngineCommand | EngineEvent], bytes]] = msgspec.msgpack.encode
decode_command: Final[Callable[[bytes], EngineCommand]] = msgspec.msgpack.Decoder(
    EngineCommand
).decode
"""Read a command. Raises msgspec.DecodeError or ValidationError on anything else."""
decode_event: Final[Callable[[bytes], EngineEvent]] = msgspec.msgpack.Decoder(EngineEvent).decode
"""Read an event. Raises as decode_command."""
