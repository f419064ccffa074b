"""The owner's end of the front-end processes: it admits their requests and passes outputs on."""

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, Final

import msgspec

from loraplex.core.errors import InternalError, LoraplexError
from loraplex.core.output import EngineOutput
from loraplex.core.request import RequestBatch, RequestId
from loraplex.serving.engines.in_flight_request import OutputStream
from loraplex.serving.remote.frames import FrameConnection
from loraplex.serving.remote.messages import (
    Abort,
    AdmittedByOwner,
    CloseBatch,
    Count,
    Find,
    FoundName,
    FromFrontend,
    FromOwner,
    GenerateRemotely,
    Leave,
    ListedRequests,
    ListRequests,
    Numbers,
    Opened,
    OwnerOutputs,
    Refused,
    State,
)
from loraplex.serving.service import AdmittedRequest, Service

logger = logging.getLogger(__name__)

_STATE_SECONDS: Final = 0.05
"""How often the state is compared with the one that the processes know."""
_REPLY_SECONDS: Final = 1.0
"""How long the reply of a process is awaited; a scrape then takes the last numbers."""
_DECODER = msgspec.msgpack.Decoder(FromFrontend)


@dataclasses.dataclass(slots=True, eq=False)
class _Remote:
    """A request of a front-end process."""

    task: asyncio.Task[None] | None = None
    """Its admission."""
    admitted: AdmittedRequest | None = None
    num_tokens: int = 0
    """Tokens of its prompt and of what was passed on."""
    is_finished: bool = False

    def end(self, num_tokens: int | None = None, *, is_error: bool = False) -> None:
        """End it, wherever it is. num_tokens: what its tenant had; None: all that was passed on."""
        if self.task is not None:
            self.task.cancel()
        if self.admitted is not None:
            had = self.num_tokens if num_tokens is None else num_tokens
            self.admitted.lease.end(had, is_error=is_error)
            self.admitted.stream.leave()
            if not self.is_finished:
                self.admitted.engine.abort(self.admitted.request.request_id)


class FrontendDesk:
    """The owner's end of one front-end process, as long as that is connected."""

    def __init__(self, service: Service, on_opened: "OnDesk", on_lost: "OnDesk") -> None:
        self._service = service
        self._on_opened = on_opened
        self._on_lost = on_lost
        self.number = 0
        """Number of the process, once it serves; 0: it does not yet."""
        self.families = b""
        """What it counted, as of the last reply."""
        self._requests: dict[RequestId, _Remote] = {}
        self._batches = weakref.WeakValueDictionary[int, RequestBatch]()
        self._tasks: set[asyncio.Task[None]] = set()
        self._replies: dict[int, asyncio.Future[bytes]] = {}
        self._query_ids = itertools.count(1)
        self._outputs: list[EngineOutput] = []
        self.connection = FrameConnection(_DECODER, self._take, self._lose)

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    async def count(self) -> bool:
        """Bring `families` up to date, and return whether the process replied in time."""
        return await self._reply_to(Count(next(self._query_ids))) is not None

    async def requests(self, query: bytes) -> bytes:
        """Return a page of the requests of the process; empty if it did not reply in time."""
        return await self._reply_to(ListRequests(next(self._query_ids), query)) or b""

    async def _reply_to(self, query: Count | ListRequests) -> bytes | None:
        """Return the reply, empty from a process that has ended; None: none came in time."""
        reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._replies[query.query_id] = reply
        self.connection.send(query)
        try:
            return await asyncio.wait_for(reply, _REPLY_SECONDS)
        except TimeoutError:
            logger.warning("front-end process %d did not reply in time", self.number)
            return None
        finally:
            del self._replies[query.query_id]

    def _take(self, message: FromFrontend) -> None:
        match message:
            case GenerateRemotely():
                remote = self._requests[message.request.request_id] = _Remote()
                remote.task = self._start(self._admit(message, remote))
            case Leave() | Abort():
                self._end(message)
            case CloseBatch(number):
                if batch := self._batches.pop(number, None):
                    batch.close()
            case Find():
                self._start(self._find(message))
            case Numbers(query_id, families):
                self.families = families
                self._take_reply(query_id, families)
            case ListedRequests(query_id, page):
                self._take_reply(query_id, page)
            case Opened(number):
                self.number = number
                self._on_opened(self)

    def _take_reply(self, query_id: int, data: bytes) -> None:
        reply = self._replies.get(query_id)
        if reply is not None and not reply.done():
            reply.set_result(data)

    def _end(self, message: Leave | Abort) -> None:
        """End a request, or one sequence of it. One that has ended is none of both."""
        remote = self._requests.get(message.request_id)
        if remote is None:
            return
        if isinstance(message, Leave):
            del self._requests[message.request_id]
            remote.end(message.num_tokens, is_error=message.is_error)
        elif remote.admitted is not None:
            remote.admitted.engine.abort(message.request_id, message.sequence_index)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)  # the event loop alone would not keep it alive
        task.add_done_callback(self._tasks.discard)
        return task

    async def _admit(self, message: GenerateRemotely, remote: _Remote) -> None:
        request = message.request
        if message.batch:
            batch = self._batches.get(message.batch) or RequestBatch()
            self._batches[message.batch] = batch
            request = msgspec.structs.replace(request, batch=batch)
        try:
            admitted = await self._service.admitted(request, message.principal)
        except Exception as error:
            self._requests.pop(request.request_id, None)
            self._refuse(request.request_id, error)
            return
        remote.task, remote.admitted = None, admitted
        own = admitted.request
        remote.num_tokens = len(own.prompt_token_ids)
        if own.prompt_token_ids == request.prompt:
            own = msgspec.structs.replace(own, prompt_token_ids=())
        self.connection.send(AdmittedByOwner(own, admitted.adapters))
        assert isinstance(admitted.stream, OutputStream), "none is continued from another server"
        admitted.stream.pass_on(self._pass_on)

    async def _find(self, message: Find) -> None:
        try:
            card, key = await self._service.find(message.name, message.principal)
        except Exception as error:
            self._refuse(message.query_id, error)
        else:
            self.connection.send(FoundName(message.query_id, card.name, key))

    def _refuse(self, query_id: int, error: Exception) -> None:
        if not isinstance(error, LoraplexError):
            logger.error("a request of a front-end process failed", exc_info=error)
            error = InternalError("the server failed to admit the request: see its log")
        self.connection.send(Refused(query_id, error.to_info()))

    def _pass_on(self, output: EngineOutput) -> None:
        remote = self._requests.get(output.request_id)
        if remote is None:
            return
        remote.num_tokens += sum(len(delta.token_ids) for delta in output.deltas)
        remote.is_finished = output.finished
        if not self._outputs:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outputs.append(output)

    def _flush(self) -> None:
        outputs, self._outputs = self._outputs, []
        self.connection.send(OwnerOutputs(outputs))

    def _lose(self) -> None:
        """The process has ended: so do its requests, and no others."""
        requests, self._requests = self._requests, {}
        for remote in requests.values():
            remote.end()
        for query_id in self._replies:
            self._take_reply(query_id, b"")
        self._on_lost(self)


OnDesk = Callable[[FrontendDesk], None]


class FrontendDesks:
    """The desks of all front-end processes that are connected."""

    def __init__(self, service: Service, on_opened: OnDesk, on_lost: OnDesk) -> None:
        """on_opened: called when a process serves its ports; on_lost: when it has ended."""
        self._service = service
        self._on_opened = on_opened
        self._on_lost = on_lost
        self._desks: set[FrontendDesk] = set()
        self._state = State(is_draining=False, max_model_lens={})

    def __iter__(self) -> Iterator[FrontendDesk]:
        return iter(tuple(self._desks))

    @contextlib.asynccontextmanager
    async def listening(self, path: str) -> AsyncIterator[None]:
        """Take connections at a Unix socket while the context lasts."""
        server = await asyncio.get_running_loop().create_unix_server(self._connected, path)
        following = asyncio.create_task(self._follow_state(), name="front-end-state")
        try:
            yield
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            server.close()
            for desk in self:
                desk.connection.close()

    def send(self, message: FromOwner) -> None:
        """Send a message to all processes."""
        for desk in self:
            desk.connection.send(message)

    def _connected(self) -> FrameConnection[FromFrontend]:
        desk = FrontendDesk(self._service, self._opened, self._lost)
        self._desks.add(desk)
        return desk.connection

    def _opened(self, desk: FrontendDesk) -> None:
        desk.connection.send(self._state)
        self._on_opened(desk)

    def _lost(self, desk: FrontendDesk) -> None:
        self._desks.discard(desk)
        self._on_lost(desk)

    async def _follow_state(self) -> None:
        while True:
            cards = self._service.models()
            state = State(
                self._service.draining.is_active, {card.name: card.max_model_len for card in cards}
            )
            if state != self._state:
                self._state = state
                self.send(state)
            await asyncio.sleep(_STATE_SECONDS)
