"""The engine of one model: built from its settings, run in a thread or as a process of its own."""

import contextlib
import gc
import logging
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from loraplex.app.open_step_sizes import with_step_sizes
from loraplex.app.rank import ModelRank, overlaps, rank_command, rank_of, world_of
from loraplex.core.clock import SystemClock
from loraplex.core.config import ModelConfig
from loraplex.core.errors import ConfigError, LoraplexError
from loraplex.core.scheduler_settings import SchedulerSettings
from loraplex.engine.channel import EngineChannel
from loraplex.engine.engine import Engine
from loraplex.engine.engine import build_engine as engine_of
from loraplex.engine.journal import Journal
from loraplex.engine.journal_file import JournalFile
from loraplex.engine.loop import EngineLoop
from loraplex.engine.messages import EngineFailed
from loraplex.engine.runner import AdapterLoader, RankProbes, Runner
from loraplex.parallel.executors import Executor, RankEnd
from loraplex.parallel.multiprocess import MultiprocessExecutor
from loraplex.parallel.start import end_of_process, start_sharded
from loraplex.serving.engines.link import EngineLink, LinkFactory, ThreadLink

logger = logging.getLogger(__name__)


def build_engine(
    model: ModelConfig,
    logits_dir: Path | None = None,
    lose: Callable[[RankEnd], None] = lambda _: None,
) -> Engine:
    """Load the weights and allocate the memory, on all ranks. Raises ConfigError.

    logits_dir: a private folder for the logits that requests return. lose: see start_sharded.
    """
    model = with_step_sizes(model)
    steps, loader, ranks = _start_ranks(model, logits_dir, lose)
    with contextlib.ExitStack() as stack:  # closes the last one first
        stack.callback(steps.close)
        stack.callback(loader.close)
        engine = engine_of(
            steps,
            loader,
            SystemClock(),
            scheduler_settings(model),
            adapter_host_bytes=model.lora_host_bytes,
            eviction_policy=model.lora_eviction_policy,
            journal=_journal(model),
            overlap=overlaps(model),
            ranks=ranks,
        )
        stack.pop_all()
    return engine


def _start_ranks(
    model: ModelConfig, logits_dir: Path | None, lose: Callable[[RankEnd], None]
) -> tuple[Runner, AdapterLoader, RankProbes | None]:
    world = world_of(model)
    if world.size == 1:
        return *ModelRank(model, world, logits_dir).load(), None
    return start_sharded(
        world,
        msgspec.msgpack.encode(model),
        lambda start: ModelRank(model, start.world, logits_dir, token=start.token, host=start.host),
        _executor(model),
        lose,
    )


def _executor(model: ModelConfig) -> Executor:
    if model.executor == "multiprocess":
        return MultiprocessExecutor(rank_command)
    from loraplex.parallel.ray_executor import RayExecutor  # noqa: PLC0415 - loraplex[ray]

    cpus, level = model.num_threads or 1, logging.getLevelName(logging.getLogger().level)
    return RayExecutor(rank_of, device=model.device, cpus=cpus, log_level=level)


def run_engine(model: ModelConfig, channel: EngineChannel, *, is_alone: bool = False) -> None:
    """Build the engine and serve the channel; a failed start is the channel's last event.

    is_alone: the engine has a process of its own.
    """
    lose = end_of_process(channel.marker) if is_alone else _leave_to_next_step
    try:
        engine = build_engine(model, channel.logits_dir, lose)
    except LoraplexError as error:
        channel.send(EngineFailed(error.to_info()))
        return
    except (MemoryError, RuntimeError) as error:  # torch raises it when out of memory
        logger.exception("the engine cannot start")
        problem = ConfigError(f"the engine cannot start: {error}")
        channel.send(EngineFailed(problem.to_info()))
        return
    if is_alone:
        # A collection of garbage that looked at all of torch would stop a step for 150 ms.
        gc.freeze()
    try:
        with torch.inference_mode():  # once, and not in each step
            EngineLoop(engine, channel, SystemClock()).run()
    finally:
        engine.close()


def _leave_to_next_step(end: RankEnd) -> None:
    """Only a process of its own can be ended at any time."""


def engine_thread(model: ModelConfig) -> LinkFactory:
    """Return the factory of an engine in a thread of this process."""

    async def start(_epoch: int) -> EngineLink:
        return ThreadLink(lambda channel: run_engine(model, channel))

    return start


def scheduler_settings(model: ModelConfig) -> SchedulerSettings:
    """Return the scheduler's part of a model's settings, which have sizes of a step."""
    return msgspec.convert(model, SchedulerSettings, from_attributes=True)


def _journal(model: ModelConfig) -> Journal | None:
    if not model.iteration_log:
        return None
    return JournalFile(Path(model.iteration_log).expanduser(), model.iteration_log_bytes)
