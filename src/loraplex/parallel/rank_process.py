"""A rank that is not rank 0: it makes the calls that rank 0 makes, in the same order."""

import contextlib
import ctypes
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Final, Protocol

from loraplex.core.adapter import AdapterHandle
from loraplex.core.errors import InternalError, LoraplexError
from loraplex.engine.process import open_start_pipe, read_framed
from loraplex.engine.runner import AdapterLoader, Runner, StepHandle
from loraplex.parallel.messages import (
    Begin,
    Discard,
    Hello,
    LeaveLoop,
    Load,
    LoadDone,
    Plan,
    Probe,
    ProbeReply,
    RankCommand,
    RankFailed,
    RankStart,
    Ready,
    StepReport,
    Wait,
    rows_digest,
)
from loraplex.parallel.sockets import RankSocket

logger = logging.getLogger(__name__)

_LOAD_POLL_SECONDS: Final = 0.001
"""Interval at which a rank without commands checks whether a load ended."""
_SET_PARENT_DEATH_SIGNAL: Final = 1
"""PR_SET_PDEATHSIG of prctl(2)."""


class RankProgram(Protocol):
    """What a rank computes. Rank 0 has one, too."""

    def traits(self) -> Mapping[str, str]:
        """Return what all ranks must have equal, by name."""
        ...

    def open(self) -> bytes:
        """Make what other ranks connect to; return its addresses. Raises ConfigError."""
        ...

    def connect(self, addresses: Mapping[int, bytes]) -> None:
        """Connect to other ranks, whose addresses these are. Raises LoraplexError."""
        ...

    def load(self) -> tuple[Runner, AdapterLoader]:
        """Load the rank's share of the model. Raises ConfigError."""
        ...

    def abort(self, reason: str) -> None:
        """End all waits for other ranks. May be called by any thread, at any time."""
        ...

    def wait_ns(self) -> int:
        """Return how long this rank has waited for others since its start."""
        ...


ProgramOf = Callable[[RankStart], RankProgram]


def run_rank(start: RankStart, program_of: ProgramOf) -> bool:
    """Be a rank until it is stopped; return False if it failed. The reason is sent to rank 0."""
    with contextlib.closing(RankSocket(start.address)) as socket:
        try:
            program = program_of(start)
            try:
                _run(start, program, socket)
            except Exception:
                program.abort(f"rank {start.world.rank} failed")
                raise
        except LoraplexError as error:
            logger.error("%s", error.message)
            socket.send(RankFailed(start.token, start.world.rank, error.to_info()))
            return False
        except Exception as error:
            logger.exception("the rank failed")
            failure = InternalError(f"the rank failed: {error}")
            socket.send(RankFailed(start.token, start.world.rank, failure.to_info()))
            return False
    return True


def _run(start: RankStart, program: RankProgram, socket: RankSocket) -> None:
    world = start.world
    socket.send(Hello(start.token, world.rank, dict(program.traits()), program.open()))
    begin = socket.receive(None)
    if not isinstance(begin, Begin):
        return
    program.connect(begin.addresses)
    runner, loader = program.load()
    try:
        socket.send(Ready(runner.capacity()))
        RankLoop(runner, loader, socket, program.wait_ns).run()
    finally:
        with contextlib.ExitStack() as stack:  # calls the last one first
            stack.callback(runner.close)
            stack.callback(loader.close)
            # A load may wait for rank 0, which loads no more.
            stack.callback(program.abort, f"rank {world.rank} ended")


class RankLoop:
    """Takes commands until LeaveLoop. What a step or a copy raises ends the rank."""

    def __init__(
        self,
        runner: Runner,
        loader: AdapterLoader,
        socket: RankSocket,
        wait_ns: Callable[[], int] = lambda: 0,
    ) -> None:
        self._runner = runner
        self._loader = loader
        self._socket = socket
        self._wait_ns = wait_ns
        self._steps: dict[int, StepHandle] = {}
        self._loading: set[AdapterHandle] = set()

    def run(self) -> None:
        while True:
            command = self._socket.receive(_LOAD_POLL_SECONDS if self._loading else None)
            if isinstance(command, LeaveLoop):
                return
            if command is not None:
                self._apply(command)
            self._report_loads()

    def _apply(self, command: RankCommand) -> None:
        match command:
            case Plan(plan):
                self._steps[plan.step_id] = self._runner.launch(plan)
            case Wait(step_id):
                result = self._steps.pop(step_id).wait()
                self._socket.send(
                    StepReport(
                        step_id,
                        rows_digest(result),
                        result.copies_done,
                        result.copies_failed,
                        self._wait_ns(),
                    )
                )
            case Load(handle, source):
                self._loading.add(handle)
                self._loader.start(handle, source)
            case Discard(handle):
                self._loader.discard(handle)
            case Probe(number):
                self._socket.send(ProbeReply(number))

    def _report_loads(self) -> None:
        if self._loading:
            for load in self._loader.poll():
                self._loading.discard(load.handle)
                self._socket.send(LoadDone(load.handle, load.error, load.load_ns))


def be_rank_process(program_of: ProgramOf) -> None:
    """Be the rank that the message on standard input describes, at most as long as its parent."""
    # A signal to the whole process group is meant for serving, which decides when an engine stops.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    try:
        start = read_framed(open_start_pipe(), RankStart)
    except EOFError:
        return
    end_with_parent(start.parent_pid)
    if not run_rank(start, program_of):
        sys.exit(1)


def end_with_parent(parent_pid: int) -> None:
    """Let the kernel kill this process when its parent ends, however that ends."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:  # it ended before
        os._exit(1)
