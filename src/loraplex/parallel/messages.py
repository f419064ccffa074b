"""Messages between rank 0 of an engine and its other ranks. Encoded as msgpack, never pickled."""

import hashlib
from collections.abc import Callable
from typing import Final

import msgspec

from loraplex.core.adapter import AdapterHandle, AdapterSource
from loraplex.core.errors import ErrorInfo
from loraplex.core.plan import Capacity, RowAdded, StepPlan, StepResult
from loraplex.core.task import Generate
from loraplex.parallel.world import World


class RankStart(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank is started with."""

    address: str
    """Address of rank 0's socket."""
    token: str
    """Secret that the first message of a rank repeats."""
    world: World
    settings: bytes
    host: str = ""
    """Address of its machine for ranks on other machines; empty: all ranks are on this one."""
    parent_pid: int = 0
    """Process whose end ends the rank; 0: its executor ends it."""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First message of a rank that could start."""

    token: str
    rank: int
    traits: dict[str, str]
    addresses: bytes
    """What other ranks connect to."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The rank has loaded its share, and takes plans."""

    capacity: Capacity


class LoadDone(msgspec.Struct, frozen=True, tag="loaded"):
    """A load ended; error: None if the adapter is in host memory."""

    handle: AdapterHandle
    error: ErrorInfo | None
    load_ns: int


class StepReport(msgspec.Struct, frozen=True, tag="step"):
    """Outcome of a step on one rank."""

    step_id: int
    rows: bytes
    """Digest of the rows' results, which are the same on all ranks."""
    copies_done: tuple[AdapterHandle, ...] = ()
    copies_failed: tuple[tuple[AdapterHandle, ErrorInfo], ...] = ()
    wait_ns: int = 0
    """Time that the rank has waited for others since its start."""


class ProbeReply(msgspec.Struct, frozen=True, tag="probed"):
    """The reply to Probe."""

    number: int


class RankFailed(msgspec.Struct, frozen=True, tag="failed"):
    """Last message of a rank that cannot start or continue. It may be the first one, too."""

    token: str
    rank: int
    error: ErrorInfo


RankEvent = Hello | Ready | LoadDone | StepReport | ProbeReply | RankFailed


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """Load the weights: all ranks are there, and have the same traits."""

    addresses: dict[int, bytes]
    """What the ranks connect to, by rank."""


class Plan(msgspec.Struct, frozen=True, tag="plan"):
    """Launch a step."""

    plan: StepPlan


class Wait(msgspec.Struct, frozen=True, tag="wait"):
    """Wait for a launched step, and report its outcome.

    Ranks make the same calls in the same order, because some calls take part in a collective.
    """

    step_id: int


class Load(msgspec.Struct, frozen=True, tag="load"):
    """Read an adapter into host memory."""

    handle: AdapterHandle
    source: AdapterSource


class Discard(msgspec.Struct, frozen=True, tag="discard"):
    """Forget the host copy of an adapter."""

    handle: AdapterHandle


class Probe(msgspec.Struct, frozen=True, tag="probe"):
    """Show that the rank takes commands: ProbeReply with the same number is the reply."""

    number: int


class LeaveLoop(msgspec.Struct, frozen=True, tag="stop"):
    """Leave the loop."""


RankCommand = Begin | Plan | Wait | Load | Discard | Probe | LeaveLoop

encode: Final[Callable[[RankCommand | RankEvent], bytes]] = msgspec.msgpack.encode
decode_command: Final[Callable[[bytes], RankCommand]] = msgspec.msgpack.Decoder(RankCommand).decode
"""Read a command. Raises msgspec.DecodeError or ValidationError on anything else."""
decode_event: Final[Callable[[bytes], RankEvent]] = msgspec.msgpack.Decoder(RankEvent).decode
"""Read an event. Raises as decode_command."""


def rows_digest(result: StepResult) -> bytes:
    """Return a digest of what later steps depend on: the rows' tokens, and which of them failed."""
    rows = [
        (row.slot, row.token_ids, [token for token, _ in row.candidates], row.error is not None)
        for row in result.rows
    ]
    return hashlib.blake2b(msgspec.msgpack.encode(rows), digest_size=8).digest()


def for_other_ranks(plan: StepPlan) -> StepPlan:
    """Return a plan without the outputs that only rank 0 gives to clients."""
    added = tuple(map(_without_logits, plan.added))
    return plan if added == plan.added else msgspec.structs.replace(plan, added=added)


def _without_logits(row: RowAdded) -> RowAdded:
    if not isinstance(row.task, Generate):
        return row
    sampling = row.sampling
    if not (sampling.return_logits or sampling.return_prompt_logits):
        return row
    sampling = msgspec.structs.replace(sampling, return_logits=False, return_prompt_logits=False)
    return row.with_sampling(sampling)
