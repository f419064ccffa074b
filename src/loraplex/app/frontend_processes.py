"""The owner's front-end processes: started with it, restarted when they die, ended with it."""

import asyncio
import contextlib
import itertools
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final, NamedTuple

import msgspec
from starlette.types import ASGIApp

from loraplex.app.http_server import serving_listener
from loraplex.core.config import Config
from loraplex.core.environment import child_environment, server_api_keys
from loraplex.core.errors import ConfigError
from loraplex.core.private_folder import PrivateFolder
from loraplex.core.python_process import module_command
from loraplex.core.server_config import ServerConfig
from loraplex.core.stopped_process import how_it_ended, is_stopped
from loraplex.frontends.ops.frontend_numbers import OtherFrontends
from loraplex.frontends.telemetry.connections import HttpConnections
from loraplex.serving.remote.messages import Refresh, StopProcess
from loraplex.serving.remote.owner import FrontendDesk, FrontendDesks
from loraplex.serving.service import Service

logger = logging.getLogger(__name__)

_BACKLOG: Final = 2048
_COMMAND: Final = module_command("loraplex.app.frontend_process")
_START_SECONDS: Final = 120.0
_STOP_SECONDS: Final = 15.0
"""How long a process may take to end after its responses have ended."""
_LOOK_SECONDS: Final = 5.0
"""Interval between looks at each process: does it reply, and what has it counted?"""
_MAX_UNANSWERED: Final = 10
"""Looks without a reply after which a process is killed, so that its share of new connections does
not wait for ever."""
_MAX_UNANSWERED_START: Final = int(_START_SECONDS / _LOOK_SECONDS)
"""The same for one that does not serve yet."""
_MAX_UNANSWERED_STOPPED: Final = 2
"""The same for one that a signal has stopped."""
_FIRST_PAUSE_SECONDS: Final = 0.1
_LONGEST_PAUSE_SECONDS: Final = 30.0
_STABLE_SECONDS: Final = 60.0
_DEFAULT_NUM_BODIES: Final = 8


class FrontendStart(msgspec.Struct, frozen=True):
    """Start message of a front-end process, as msgpack."""

    number: int
    config: Config
    """Configuration with local paths, the limits of one process, and the port that it serves."""
    keys_variable: str
    """LORAPLEX_API_KEYS, which is not in the environment of our processes."""
    given_keys: tuple[str, ...]
    owner_path: str
    """Unix socket of the owner for messages."""
    http_path: str
    """The same for requests that it forwards."""


def share_of(settings: ServerConfig) -> ServerConfig:
    """Return the settings of one front-end process: its part of the limits that each counts."""
    number = settings.frontend_processes
    if number == 1:
        return settings
    bodies = settings.max_bodies_bytes or _DEFAULT_NUM_BODIES * settings.max_body_bytes
    return msgspec.structs.replace(
        settings,
        max_connections=-(-settings.max_connections // number),
        max_bodies_bytes=-(-bodies // number),
    )


def check_frontends(settings: ServerConfig, *, may_add_models: bool) -> None:
    """Raise ConfigError for what only a server of one front-end process does.

    may_add_models: clients may load base models that are not served at the start.
    """
    if settings.frontend_processes == 1:
        return
    number = settings.frontend_processes
    if not settings.http:
        raise ConfigError(
            f"frontend_processes is {number}, but the HTTP port is closed: open it, or leave "
            "frontend_processes at 1"
        )
    if may_add_models:
        raise ConfigError(
            f"frontend_processes is {number}, but clients may load more base models (explicit "
            "model control): only a server with frontend_processes 1 can serve those"
        )


class FrontendProcesses:
    """All but the owner, which is a front-end process itself."""

    def __init__(
        self,
        service: Service,
        config: Config,
        given_keys: Sequence[str],
        shown: OtherFrontends,
    ) -> None:
        """config: with local paths, and the limits of one process. shown: gets what the processes
        know."""
        self._config = config
        self._given_keys = tuple(given_keys)
        self._desks = FrontendDesks(service, self._opened, self._lost)
        self._shown = shown
        shown.numbers.count = self._count
        shown.requests = self._requests
        self._process_numbers = itertools.count(1)
        self._open: dict[int, asyncio.Event] = {}
        """Events of processes by number, set when they serve their port."""
        self._slots: list[asyncio.Task[None]] = []
        self._first: list[asyncio.Event] = []
        """Events of the first process of each slot."""
        self._is_stopping = False

    @contextlib.asynccontextmanager
    async def running(
        self, app: ASGIApp, http_port: int, seconds_left: Callable[[], float]
    ) -> AsyncIterator[None]:
        """Run the processes while the context lasts, at the HTTP port of the owner.

        app: serves the requests that they forward. seconds_left: called at the end, how long open
        responses may take.
        """
        settings = self._config.server
        inner = msgspec.structs.replace(settings, trusted_proxies=("*",))
        folder = PrivateFolder()
        paths = _Paths(os.path.join(folder.path, "owner"), os.path.join(folder.path, "http"))
        try:
            listener = _bound(paths.http)
            async with (
                serving_listener(app, inner, listener, HttpConnections()),
                self._desks.listening(paths.owner),
            ):
                start = self._start(http_port, paths)
                for _ in range(settings.frontend_processes - 1):
                    self._first.append(asyncio.Event())
                    slot = self._keep_running(start, self._first[-1])
                    self._slots.append(asyncio.create_task(slot))
                try:
                    yield
                finally:
                    await self._end(seconds_left())
        finally:
            folder.remove()

    async def until_open(self) -> None:
        """Wait until all processes serve. Raises ConfigError if one cannot start."""
        opening = [asyncio.create_task(event.wait()) for event in self._first]
        waiting: set[asyncio.Task[Any]] = set(opening)
        try:
            async with asyncio.timeout(_START_SECONDS):
                while waiting:
                    done, _ = await asyncio.wait(
                        waiting | {*self._slots}, return_when=asyncio.FIRST_COMPLETED
                    )
                    for ended in done.intersection(self._slots):
                        ended.result()
                    waiting -= done
        except TimeoutError:
            raise ConfigError(
                f"the front-end processes did not start within {_START_SECONDS:g} s"
            ) from None
        finally:
            for task in opening:
                task.cancel()

    def refresh(self) -> None:
        """Let them read the API keys again, and open the access log again."""
        self._desks.send(Refresh())

    def _start(self, http_port: int, paths: "_Paths") -> FrontendStart:
        server = msgspec.structs.replace(self._config.server, http_port=http_port)
        return FrontendStart(
            number=0,
            config=msgspec.structs.replace(self._config, server=server),
            keys_variable=server_api_keys(),
            given_keys=self._given_keys,
            owner_path=paths.owner,
            http_path=paths.http,
        )

    async def _keep_running(self, start: FrontendStart, first: asyncio.Event) -> None:
        """Run one process after the other. Raises ConfigError if the first one cannot start."""
        pause, opened, loop = _FIRST_PAUSE_SECONDS, first, asyncio.get_running_loop()
        while True:
            number, began = next(self._process_numbers), loop.time()
            self._open[number] = opened
            try:
                end = await self._run(msgspec.structs.replace(start, number=number))
            finally:
                del self._open[number]
            if self._is_stopping:
                return
            if not first.is_set():
                raise ConfigError(f"a front-end process {end} as it started: see its log")
            self._shown.restarts[end] += 1
            if loop.time() - began > _STABLE_SECONDS:
                pause = _FIRST_PAUSE_SECONDS
            logger.error("a front-end process %s: it is started again in %g s", end, pause)
            await asyncio.sleep(pause)
            pause, opened = min(2 * pause, _LONGEST_PAUSE_SECONDS), asyncio.Event()

    async def _run(self, start: FrontendStart) -> str:
        """Run one process to its end, and return how it ended."""
        try:
            process = await asyncio.create_subprocess_exec(
                *_COMMAND,
                stdin=asyncio.subprocess.PIPE,
                env=child_environment(),
            )
        except OSError as error:
            return f"cannot be started ({error})"
        try:
            assert process.stdin is not None
            with contextlib.suppress(ConnectionError):  # its end is reported instead
                process.stdin.write(msgspec.msgpack.encode(start))
                await process.stdin.drain()
            process.stdin.close()
            watching = asyncio.create_task(self._watch(process, start.number))
            try:
                return how_it_ended(await process.wait())
            finally:
                watching.cancel()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    async def _watch(self, process: asyncio.subprocess.Process, number: int) -> None:
        """Kill a process that hangs. Its end is then handled as any other."""
        num_unanswered = 0
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            desk = next((desk for desk in self._desks if desk.number == number), None)
            replies = desk is not None and await desk.count()
            num_unanswered = 0 if replies else num_unanswered + 1
            most = _MAX_UNANSWERED if desk is not None else _MAX_UNANSWERED_START
            if is_stopped(process.pid):
                most = _MAX_UNANSWERED_STOPPED
            if num_unanswered >= most:
                logger.error("front-end process %d hangs, and is killed", number)
                process.kill()
                return

    async def _end(self, seconds: float) -> None:
        self._is_stopping = True
        self._desks.send(StopProcess(max(seconds, 0.0)))
        await asyncio.wait(self._slots, timeout=max(seconds, 0.0) + _STOP_SECONDS)
        for slot in self._slots:
            slot.cancel()
        await asyncio.gather(*self._slots, return_exceptions=True)

    async def _count(self) -> list[bytes]:
        desks = [desk for desk in self._desks if desk.number]
        await asyncio.gather(*(desk.count() for desk in desks))
        return [desk.families for desk in desks]

    async def _requests(self, query: bytes) -> list[bytes]:
        desks = [desk for desk in self._desks if desk.number]
        return await asyncio.gather(*(desk.requests(query) for desk in desks))

    def _opened(self, desk: FrontendDesk) -> None:
        logger.info("front-end process %d serves", desk.number)
        if opened := self._open.get(desk.number):
            opened.set()

    def _lost(self, desk: FrontendDesk) -> None:
        self._shown.numbers.keep(desk.families)


class _Paths(NamedTuple):
    """Unix sockets of the owner."""

    owner: str
    """Socket for messages."""
    http: str
    """Socket for requests that are forwarded."""


def _bound(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(_BACKLOG)
    listener.setblocking(False)
    return listener
