"""The engine of one model: built from its settings, run in a thread or as a process of its own.

`python -m loraplex.app.engine` is the engine process: it reads an EngineStart from its standard
input, serves until Shutdown, and ends when that pipe ends, because then serving is gone.
"""

import logging
import os
import signal
import sys
import threading
from io import RawIOBase
from pathlib import Path

import msgspec
import torch

from loraplex.core.clock import SystemClock
from loraplex.core.config import ModelConfig
from loraplex.core.errors import ConfigError, LoraplexError
from loraplex.engine.channel import EngineChannel, SocketChannel
from loraplex.engine.engine import Engine
from loraplex.engine.engine import build_engine as engine_of
from loraplex.engine.loop import EngineLoop
from loraplex.engine.messages import EngineFailed
from loraplex.execution.adapter_loader import FileAdapterLoader
from loraplex.execution.host_adapters import HostAdapters
from loraplex.execution.loading import load_runner
from loraplex.execution.sizing import RunnerSettings
from loraplex.scheduling.settings import SchedulerSettings
from loraplex.serving.engine_link import (
    EngineLink,
    LinkFactory,
    ThreadLink,
    read_engine_start,
)

logger = logging.getLogger(__name__)


def build_engine(model: ModelConfig) -> Engine:
    """Load the weights and take the memory. Raises ConfigError."""
    if model.num_threads is not None:
        torch.set_num_threads(model.num_threads)
    host_adapters = HostAdapters()
    return engine_of(
        load_runner(Path(model.path), _runner_settings(model), host_adapters),
        FileAdapterLoader(host_adapters),
        SystemClock(),
        _scheduler_settings(model),
        adapter_host_bytes=model.lora_host_bytes,
    )


def run_engine(model: ModelConfig, channel: EngineChannel) -> None:
    """Build the engine and serve the channel; what prevents it is the channel's last event."""
    try:
        engine = build_engine(model)
    except LoraplexError as error:
        channel.send(EngineFailed(error.to_info()))
        return
    except (MemoryError, RuntimeError) as error:  # torch says out of memory by RuntimeError
        logger.exception("the engine cannot start")
        problem = ConfigError(f"the engine cannot start: {error}")
        channel.send(EngineFailed(problem.to_info()))
        return
    try:
        EngineLoop(engine, channel, SystemClock()).run()
    finally:
        engine.close()


def engine_thread(model: ModelConfig) -> LinkFactory:
    """The engine runs in a thread of this process."""

    async def start(_epoch: int) -> EngineLink:
        return ThreadLink(lambda channel: run_engine(model, channel))

    return start


def _runner_settings(model: ModelConfig) -> RunnerSettings:
    return RunnerSettings(
        dtype=model.dtype,
        device=model.device,
        max_model_len=model.max_model_len,
        max_num_seqs=model.max_num_seqs,
        block_size=model.block_size,
        kv_cache_bytes=model.kv_cache_bytes,
        max_lora_rank=model.max_lora_rank,
        lora_device_bytes=model.lora_device_bytes,
    )


def _scheduler_settings(model: ModelConfig) -> SchedulerSettings:
    return SchedulerSettings(
        max_num_batched_tokens=model.max_num_batched_tokens,
        max_queue_size=model.max_queue_size,
        max_queue_delay_ns=model.max_queue_delay_microseconds * 1000,
        enable_prefix_cache=model.enable_prefix_cache,
    )


def main() -> None:
    """Be an engine process."""
    logging.basicConfig(level=logging.INFO, format="%(levelname).1s engine: %(message)s")
    # A Ctrl-C in the terminal reaches the whole group: serving decides when the engine stops.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Unbuffered: a thread that waits in a buffered read would hold its lock at the exit.
    pipe = open(sys.stdin.fileno(), "rb", buffering=0, closefd=False)  # noqa: SIM115
    start = read_engine_start(pipe)
    threading.Thread(target=_end_with_serving, args=(pipe,), daemon=True).start()
    channel = SocketChannel(start.endpoint, start.epoch)
    run_engine(msgspec.msgpack.decode(start.settings, type=ModelConfig), channel)
    channel.close()


def _end_with_serving(pipe: RawIOBase) -> None:
    pipe.read()
    os._exit(0)


if __name__ == "__main__":
    main()
