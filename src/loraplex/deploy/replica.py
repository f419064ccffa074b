"""Replica: a whole server without ports, to which an ingress passes HTTP requests as messages."""

import asyncio
import contextlib
import logging
import shutil
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from pathlib import Path
from typing import Final

import msgspec
from starlette.types import Message as AsgiMessage
from starlette.types import Scope

from loraplex.app.front_ends import FrontEnds, front_ends
from loraplex.app.launch import engine_process, started_engines
from loraplex.app.model_settings import with_fair_shares, with_local_paths
from loraplex.core.adapter import Residency
from loraplex.core.config import Config
from loraplex.core.errors import LoraplexError, NotReadyError
from loraplex.core.state_places import state_place
from loraplex.deploy.relay import Body, HttpCall, Message, Recorded, Start, decode_record
from loraplex.deploy.routing import ReplicaReport, Residents, task_name
from loraplex.serving.continuation import Continuation, RecordPart, continuing
from loraplex.serving.engines.link import EngineLauncher
from loraplex.serving.served_model import ServedModel

logger = logging.getLogger(__name__)

_FOLDER: Final = "replica-"
_ALONE: Final = (
    "adapters of replicas cannot be changed by requests without declarations, because the other "
    "replicas would not know: set adapter_declarations to a folder or bucket that all of them see"
)


class Replica:
    """A started server. All methods run on one event loop."""

    def __init__(self, served: FrontEnds) -> None:
        self._served = served
        self._names: dict[str, tuple[str, ...]] = {}
        """Names under which requests route to an adapter, by digest."""

    async def respond(self, call: HttpCall) -> AsyncGenerator[list[Message], None]:
        """Yield the record and the response of a request, what there is at once together."""
        output = _Output()
        working = asyncio.create_task(self._respond(call, output))
        try:
            while messages := await output.take():
                yield messages
            await working
        finally:
            # The ingress has gone: the request is aborted.
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)

    async def _respond(self, call: HttpCall, output: "_Output") -> None:
        def record(part: RecordPart) -> None:
            output.put(Recorded.of(part))

        try:
            continuation = Continuation(record, decode_record(call.former))
            with continuing(continuation):
                await self._served.app(_scope(call), _Receiver(call.body), output.send)
        finally:
            output.close()

    def check(self) -> None:
        """Raise NotReadyError if the engine of a model was given up."""
        service = self._served.service
        for card in service.models():
            failure = service.model(card.name).engine.failure
            if failure is not None:
                raise NotReadyError(failure.message)

    async def report(self) -> ReplicaReport:
        """Return what routers decide by."""
        service = self._served.service
        models = [service.model(card.name) for card in service.models()]
        tiers: dict[Residency, list[str]] = {Residency.DEVICE: [], Residency.HOST: []}
        for model in models:
            with contextlib.suppress(LoraplexError):  # its engine restarts: nothing is resident
                # In a long step of the engine this is what it was before.
                activity = await model.adapter_activity()
                for digest, residency in activity.residency.items():
                    if residency in tiers:
                        tiers[residency] += self._names_of(model, digest)
        return ReplicaReport(
            num_slots=sum(model.engine.capacity.max_num_seqs for model in models),
            num_requests=sum(model.stats.num_running + model.stats.num_waiting for model in models),
            on_device=bytes(Residents.of(tiers[Residency.DEVICE])),
            on_host=bytes(Residents.of(tiers[Residency.HOST])),
        )

    def _names_of(self, model: ServedModel, digest: str) -> tuple[str, ...]:
        if digest not in self._names:
            # Only a new digest costs a look at all adapters, of which there may be many.
            self._names = {}
            for version in model.store.present(model.card.name):
                names = (version.name, *_task(version.task_id))
                self._names[version.digest] = self._names.get(version.digest, ()) + names
            self._names.setdefault(digest, ())
        return self._names[digest]


@contextlib.asynccontextmanager
async def started_replica(
    config: Config, launch: EngineLauncher | None = None
) -> AsyncIterator[Replica]:
    """Start a server for a replica; on leaving, in-flight requests have `shutdown_seconds`.

    It has a state directory of its own in `state_dir`, and keeps no names beyond its life.
    launch: starts engines; None: as processes. Raises why it cannot start.
    """
    # Packed weights are in the common state directory, so all replicas of a machine share them.
    shared = await asyncio.to_thread(with_local_paths, config)
    with _own_state(with_fair_shares(shared)) as local:
        async with contextlib.AsyncExitStack() as stack:
            if launch is None:
                engines = started_engines(local, engine_process)
                launch = await stack.enter_async_context(engines)
            served = await stack.enter_async_context(front_ends(local, launch))
            if not config.server.adapter_declarations:
                served.service.adapter_admin.refuse_changes(_ALONE)
            await served.start()
            yield Replica(served)
            await served.service.drain(config.server.shutdown_seconds)


@contextlib.contextmanager
def _own_state(config: Config) -> Iterator[Config]:
    """Give the replica a folder; two may not share one, even on one machine."""
    parent = state_place(config)
    parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=_FOLDER, dir=parent))
    server = msgspec.structs.replace(
        config.server, state_dir=str(folder), persist_adapters=False, stop_with_stdin=False
    )
    try:
        yield msgspec.structs.replace(config, server=server)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _task(task_id: int | None) -> tuple[str, ...]:
    return () if task_id is None else (task_name(task_id),)


def _scope(call: HttpCall) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": call.method,
        "scheme": "http",
        "path": call.path,
        "raw_path": call.path.encode(),
        "query_string": call.query,
        "root_path": "",
        "headers": list(call.headers),
        "client": (call.client, 0) if call.client else None,
        "server": None,
    }


class _Receiver:
    """ASGI's receive: the body, then nothing, since a client that goes cancels the request."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body

    async def __call__(self) -> AsgiMessage:
        if self._body is None:
            await asyncio.Event().wait()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}


class _Output:
    """Messages on their way to the ingress; their number is bounded by the response's length."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._is_closed = False
        self._filled = asyncio.Event()

    def put(self, message: Message) -> None:
        self._messages.append(message)
        self._filled.set()

    def close(self) -> None:
        self._is_closed = True
        self._filled.set()

    async def send(self, message: AsgiMessage) -> None:
        """Take a message of ASGI."""
        if message["type"] == "http.response.start":
            self.put(Start(message["status"], tuple(map(tuple, message["headers"]))))
        elif message.get("body"):
            self.put(Body(bytes(message["body"])))

    async def take(self) -> list[Message]:
        """Return all messages since the last call; none after the end."""
        while not self._messages and not self._is_closed:
            await self._filled.wait()
            self._filled.clear()
        messages, self._messages = self._messages, []
        return messages
