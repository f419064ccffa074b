"""Start of an engine of several ranks, from rank 0."""

import contextlib
import os
import secrets
from collections.abc import Callable

from loraplex.engine.step_marker import StepMarker
from loraplex.parallel.executors import Executor, RankEnd
from loraplex.parallel.messages import RankStart
from loraplex.parallel.rank_process import ProgramOf
from loraplex.parallel.ranks import Ranks
from loraplex.parallel.sharded_loader import ShardedLoader
from loraplex.parallel.sharded_runner import ShardedRunner
from loraplex.parallel.world import World


def start_sharded(
    world: World,
    settings: bytes,
    program_of: ProgramOf,
    executor: Executor,
    lose: Callable[[RankEnd], None] = lambda _: None,
) -> tuple[ShardedRunner, ShardedLoader, Ranks]:
    """Start all ranks, and load rank 0's share meanwhile. Raises ConfigError.

    Return the runner and the loader of all ranks, and the ranks but this one.

    world: of rank 0. settings: what the other ranks' programs are made of. program_of: makes that
    of rank 0. lose: called from any thread when a rank has ended that was ready; if it returns, the
    next step raises DeviceLost.
    """
    token = secrets.token_hex(32)
    program = program_of(
        RankStart(address="", token=token, world=world, settings=settings, host=executor.host)
    )
    ranks = Ranks(world, executor, token, abort=program.abort, lose=lose)
    with contextlib.ExitStack() as stack:
        stack.callback(ranks.close)
        try:
            ranks.start(settings)
            program.connect(ranks.begin(program.traits(), program.open()))
            runner, loader = program.load()
            stack.callback(runner.close)
            stack.callback(loader.close)
            capacity = ranks.agree(runner.capacity())
        except Exception as error:
            failure = ranks.failure() if ranks.have_failed else None
            ranks.give_up("the engine cannot start")
            if failure is None or failure is error:
                raise
            # What rank 0 ran into follows from the end of the other rank.
            raise failure from error
        stack.pop_all()
    sharded = ShardedRunner(runner, ranks, capacity, program.wait_ns)
    return sharded, ShardedLoader(loader, ranks), ranks


def end_of_process(marker: StepMarker) -> Callable[[RankEnd], None]:
    """Return what ends an engine's process with a rank, at once: rank 0 may wait for that rank.

    Serving reads the reason from the marker, and starts the engine again.
    """

    def end_process(end: RankEnd) -> None:
        marker.note_end(str(end), is_kill=end.is_kill)
        os._exit(1)

    return end_process
