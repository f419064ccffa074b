"""GET /v1/processes: the server's processes as the system sees them, and its engines.

Everything is read when it is requested. Without /proc there is only the first process, and without
its numbers.
"""

import asyncio
import os
import time
from pathlib import Path
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from loraplex.frontends.access import Authenticate
from loraplex.frontends.middleware import RecordedRoute
from loraplex.frontends.openapi.operation import OF_KEYS, described, json_of
from loraplex.frontends.ops.frontend_numbers import OtherFrontends
from loraplex.frontends.ops.responses import for_operators, json_response, responding_to_errors
from loraplex.serving.backend import Backend

MAX_PROCESSES: Final = 1000
_KINDS: Final = {
    b"loraplex.app.engine_process": "engine",
    b"loraplex.app.rank": "rank",
    b"loraplex.app.frontend_process": "front end",
    b"loraplex.adapters.staging_worker": "staging worker",
    b"loraplex.serving.grammar.grammar_worker": "grammar worker",
    b"loraplex.serving.text.chat_worker": "chat worker",
}
"""Kinds of processes by module."""
_STATES: Final = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting for a device",
    "T": "stopped",
    "t": "traced",
    "Z": "ended",
    "X": "ended",
    "I": "idle",
}
"""Letters of proc(5)."""


class ProcessEntry(msgspec.Struct, frozen=True, kw_only=True):
    pid: int
    parent: int
    kind: str
    """`server` (the first process), `engine`, `rank`, `front end`, `staging worker`, `grammar
    worker`, `chat worker`, or `other`."""
    state: str
    """`running`, `sleeping`, `stopped` (by a signal), `ended`, ..."""
    uptime_seconds: float | None
    cpu_seconds: float | None
    memory_bytes: int | None
    """Resident memory; pages that processes share count in each."""
    threads: int | None


class EngineEntry(msgspec.Struct, frozen=True, kw_only=True):
    ready: bool
    restarts: dict[str, int]
    """Number of restarts by reason."""
    last_step_seconds: float | None
    """Time since the newest step; null: none yet. An engine without requests computes none."""


class ProcessList(msgspec.Struct, frozen=True, kw_only=True):
    processes: list[ProcessEntry]
    engines: dict[str, EngineEntry]
    """Engines by model."""
    frontend_restarts: dict[str, int]
    """Number of front-end processes that ended and were replaced, by how they ended."""


def processes_route(
    backend: Backend, authenticate: Authenticate, others: OtherFrontends
) -> RecordedRoute:
    """Return the route of GET /v1/processes."""

    @described(json_of(ProcessList), tag="operations", errors=OF_KEYS)
    async def processes(request: Request) -> Response:
        """The server's processes: kind, state, memory and uptime; restarts and the age of the last
        step of each engine. For operators."""
        del request
        now_ns = time.monotonic_ns()
        engines = {card.name: _engine(backend, card.name, now_ns) for card in backend.models()}
        found = await asyncio.to_thread(process_tree, os.getpid())
        return json_response(
            ProcessList(processes=found, engines=engines, frontend_restarts=dict(others.restarts))
        )

    handler = responding_to_errors(for_operators(processes, authenticate))
    return RecordedRoute("/v1/processes", handler, methods=["GET"])


def process_tree(pid: int) -> list[ProcessEntry]:
    """Return a process and those that it started, directly or not, parents first."""
    found: list[ProcessEntry] = []
    waiting = [pid]
    while waiting and len(found) < MAX_PROCESSES:
        one = waiting.pop(0)
        entry = _process(one, is_first=one == pid)
        if entry is not None:
            found.append(entry)
            waiting += _children(one)
    return found


def _engine(backend: Backend, name: str, now_ns: int) -> EngineEntry:
    model = backend.model(name)
    steps = model.steps(1)
    ended_ns = steps[-1].start_ns + steps[-1].duration_ns if steps else 0
    return EngineEntry(
        ready=backend.model_ready(name),
        restarts=dict(model.engine_restarts),
        last_step_seconds=round(max(now_ns - ended_ns, 0) / 1e9, 3) if steps else None,
    )


def _process(pid: int, *, is_first: bool) -> ProcessEntry | None:
    """Describe a process; None: it is gone."""
    folder = Path(f"/proc/{pid}")
    try:
        # The name in parentheses may have any character.
        fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
        command = (folder / "cmdline").read_bytes().split(b"\0")
        uptime = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    except OSError:
        return _unknown(pid) if is_first else None
    ticks = os.sysconf("SC_CLK_TCK")
    kinds = (_KINDS[word] for word in command if word in _KINDS)
    return ProcessEntry(
        pid=pid,
        parent=int(fields[1]),
        kind="server" if is_first else next(kinds, "other"),
        state=_STATES.get(fields[0], fields[0]),
        uptime_seconds=round(uptime - int(fields[19]) / ticks, 2),
        cpu_seconds=(int(fields[11]) + int(fields[12])) / ticks,
        memory_bytes=int(fields[21]) * os.sysconf("SC_PAGE_SIZE"),
        threads=int(fields[17]),
    )


def _unknown(pid: int) -> ProcessEntry:
    return ProcessEntry(
        pid=pid,
        parent=os.getppid(),
        kind="server",
        state="running",
        uptime_seconds=None,
        cpu_seconds=None,
        memory_bytes=None,
        threads=None,
    )


def _children(pid: int) -> list[int]:
    """Return the processes that the threads of a process have started."""
    found: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += map(int, file.read_text(encoding="ascii").split())
        except OSError:  # the thread has ended
            continue
    return sorted(found)
