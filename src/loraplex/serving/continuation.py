"""Continuation of a response at another server, after the one that computed it is gone.

A server that runs for a router records what its engine yields, in the units in which the front end
reads it. The next server reads the record first and computes only what follows: a front end is a
function of these units, so it writes the same response again, and the router leaves out what the
client has. A record is for one generation: what several prompts of a request yield has no fixed
order.
"""

import contextlib
import contextvars
import hashlib
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec

from loraplex.core.errors import EngineRestartedError
from loraplex.core.output import EngineOutput
from loraplex.core.request import EngineRequest
from loraplex.core.task import Generate
from loraplex.serving.engines.in_flight_request import EngineOutputs


class Admitted(msgspec.Struct, frozen=True, tag=True):
    """The first part of a record: the request that was admitted."""

    fingerprint: bytes
    """Digest of all that its tokens depend on."""
    seed: int
    unix_seconds: int
    """Creation time that the response has."""


class Taken(msgspec.Struct, frozen=True, tag=True):
    """Outputs that were read at once."""

    outputs: tuple[EngineOutput, ...]


class Unrecorded(msgspec.Struct, frozen=True, tag=True):
    """The last part of a record of a request that cannot be continued."""

    reason: str


RecordPart = Admitted | Taken | Unrecorded
_SEVERAL: Final = "it has several prompts"
_VECTOR: Final = "its result is a vector, which has no beginning"
_LOGITS: Final = "it returns logits, which are files of the server that is gone"


class Continuation:
    """Recorder of one HTTP request, and the record of the server that had it before."""

    def __init__(
        self, record: Callable[[RecordPart], None], former: Sequence[RecordPart] = ()
    ) -> None:
        """record: called with each part before the response that follows from it."""
        self._record = record
        self._former = former
        self._has_begun = False
        admitted = former[0] if former and isinstance(former[0], Admitted) else None
        self._admitted = admitted
        self.unix_seconds = admitted.unix_seconds if admitted else int(time.time())
        """Creation time that the response shows."""

    @property
    def seed(self) -> int | None:
        """Seed of the response that is continued."""
        return None if self._admitted is None else self._admitted.seed

    def begin(
        self, request: EngineRequest, submit: Callable[[EngineRequest], EngineOutputs]
    ) -> tuple[EngineRequest, EngineOutputs]:
        """Submit an admitted request, or the rest of it; return it and its outputs from the first.

        Raises EngineRestartedError if it is no longer the request that was admitted before.
        """
        if self._has_begun or not isinstance(request.task, Generate):
            self._record(Unrecorded(_SEVERAL if self._has_begun else _VECTOR))
            return request, submit(request)
        self._has_begun = True
        if self._admitted is None:
            assert request.sampling.seed is not None, "set by admission"
            seed, former = request.sampling.seed, list[Taken]()
        else:
            seed = self._admitted.seed
            former = [part for part in self._former if isinstance(part, Taken)]
            sampling = msgspec.structs.replace(request.sampling, seed=seed)
            request = request.with_sampling(sampling)
            self._require_same(request)
        self._record(Admitted(_fingerprint(request), seed, self.unix_seconds))
        rest = _rest(request, former)
        outputs = None if _is_over(former) else submit(rest)
        return request, _RecordedOutputs(former, outputs, self._record)

    def _require_same(self, request: EngineRequest) -> None:
        assert self._admitted is not None
        if _fingerprint(request) != self._admitted.fingerprint:
            raise EngineRestartedError(
                "the response cannot be continued: at this server the request has other tokens, "
                "parameters or another version of its adapter"
            )


class _RecordedOutputs:
    """Outputs of the former server, then those of this one, which are recorded."""

    def __init__(
        self,
        former: Sequence[Taken],
        rest: EngineOutputs | None,
        record: Callable[[RecordPart], None],
    ) -> None:
        self._former = list(reversed(former))
        self._rest = rest
        self._record = record

    async def take(self) -> list[EngineOutput]:
        if self._former:
            taken = self._former.pop()
        else:
            assert self._rest is not None, "nothing follows a finished output"
            taken = Taken(tuple(await self._rest.take()))
        self._record(_recorded(taken))
        return list(taken.outputs)

    def leave(self) -> None:
        if self._rest is not None:
            self._rest.leave()


def _recorded(taken: Taken) -> RecordPart:
    """Return what another server can use: times of this machine's clock mean nothing there."""
    outputs = taken.outputs
    if any(out.prompt_logits or any(delta.logits for delta in out.deltas) for out in outputs):
        return Unrecorded(_LOGITS)
    return Taken(tuple(msgspec.structs.replace(out, timing=None) for out in outputs))


def _is_over(former: Sequence[Taken]) -> bool:
    return bool(former) and former[-1].outputs[-1].finished


def _rest(request: EngineRequest, former: Sequence[Taken]) -> EngineRequest:
    """Return the request as the next engine receives it, as after the death of an engine."""
    if not former:
        return request
    tokens: list[list[int]] = [[] for _ in range(request.task.num_returned)]
    ended, has_scores = set(), False
    for output in (output for taken in former for output in taken.outputs):
        has_scores = has_scores or output.prompt_logprobs is not None
        for delta in output.deltas:
            tokens[delta.index].extend(delta.token_ids)
            if delta.finish_reason is not None:
                ended.add(delta.index)
    is_search = request.task.is_search
    return msgspec.structs.replace(
        request,
        outputs=() if is_search else tuple(map(tuple, tokens)),
        ended=tuple(sorted(ended)),
        prompt_scores_delivered=has_scores,
        requires_resident=False,
        num_restarts=1,
    )


def _fingerprint(request: EngineRequest) -> bytes:
    """Return a digest of all that the tokens of a request depend on."""
    same = msgspec.structs.replace(
        request, request_id=0, arrival_ns=0, deadline_ns=None, share_weight=1.0
    )
    return hashlib.blake2b(msgspec.msgpack.encode(same), digest_size=16).digest()


_current: contextvars.ContextVar[Continuation | None] = contextvars.ContextVar(
    "continuation", default=None
)

current_continuation = _current.get
"""Return the record of the response for which the caller works; None if none is kept."""


@contextlib.contextmanager
def continuing(continuation: Continuation) -> Iterator[None]:
    """Record or continue whatever generates inside, and in the tasks that start there."""
    token = _current.set(continuation)
    try:
        yield
    finally:
        _current.reset(token)


def response_seed() -> int:
    """Return a seed for a response whose client gave none: a continued one keeps its own."""
    continuation = _current.get()
    seed = None if continuation is None else continuation.seed
    return secrets.randbits(63) if seed is None else seed


def response_unix_seconds() -> int:
    """Return the time of creation that a response shows."""
    continuation = _current.get()
    return int(time.time()) if continuation is None else continuation.unix_seconds
