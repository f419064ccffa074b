"""The engine of one model: built from its settings, run in a thread or as a process of its own.

`python -m loraplex.app.engine LOG_LEVEL` is the engine process (engine.process says how it
starts).
"""

import logging
import sys
from pathlib import Path

import msgspec
import torch

from loraplex.core.clock import SystemClock
from loraplex.core.config import NO_CACHE, ModelConfig
from loraplex.core.errors import ConfigError, LoraplexError
from loraplex.core.weight_precision import WeightPrecision
from loraplex.engine.channel import EngineChannel
from loraplex.engine.engine import Engine
from loraplex.engine.engine import build_engine as engine_of
from loraplex.engine.loop import EngineLoop
from loraplex.engine.messages import EngineFailed
from loraplex.engine.process import be_engine_process
from loraplex.execution.adapter_loader import FileAdapterLoader
from loraplex.execution.host_adapters import HostAdapters
from loraplex.execution.loading import load_runner
from loraplex.execution.sizing import RunnerSettings
from loraplex.memory.eviction import EVICTION_POLICIES
from loraplex.scheduling.settings import SchedulerSettings
from loraplex.serving.engine_link import EngineLink, LinkFactory, ThreadLink

logger = logging.getLogger(__name__)


def build_engine(model: ModelConfig) -> Engine:
    """Load the weights and take the memory. Raises ConfigError."""
    if model.num_threads is not None:
        torch.set_num_threads(model.num_threads)
    host_adapters = HostAdapters()
    runner = load_runner(Path(model.path), runner_settings(model), host_adapters)
    loader = FileAdapterLoader(host_adapters, runner.prepare_adapter)
    try:
        return engine_of(
            runner,
            loader,
            SystemClock(),
            _scheduler_settings(model),
            adapter_host_bytes=model.lora_host_bytes,
            eviction_policy=EVICTION_POLICIES[model.lora_eviction_policy],
        )
    except ConfigError:
        loader.close()
        runner.close()
        raise


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


def runner_settings(model: ModelConfig) -> RunnerSettings:
    """What a configuration means for the engine's runner."""
    return RunnerSettings(
        dtype=model.dtype,
        kv_dtype=model.kv_dtype,
        device=model.device,
        quantization=WeightPrecision(model.quantization),
        weights_cache_dir=_weights_cache(model),
        weights_cache_bytes=model.weights_cache_bytes,
        max_model_len=model.max_model_len,
        max_num_seqs=model.max_num_seqs,
        block_size=model.block_size,
        kv_cache_bytes=model.kv_cache_bytes,
        max_lora_rank=model.max_lora_rank,
        optimal_lora_rank=model.optimal_lora_rank,
        lora_device_bytes=model.lora_device_bytes,
        lora_device_fraction=model.lora_device_fraction,
        memory_bytes=model.memory_bytes,
        kv_cache_fraction=model.kv_cache_fraction,
    )


def _weights_cache(model: ModelConfig) -> Path | None:
    """The builder has put a folder in, or none; a bare ModelConfig means no cache."""
    folder = model.weights_cache_dir or NO_CACHE
    return None if folder == NO_CACHE else Path(folder)


def _scheduler_settings(model: ModelConfig) -> SchedulerSettings:
    return SchedulerSettings(
        max_num_batched_tokens=model.max_num_batched_tokens,
        max_queue_size=model.max_queue_size,
        max_queue_delay_ns=model.max_queue_delay_microseconds * 1000,
        enable_prefix_cache=model.enable_prefix_cache,
        adapter_ttl_ns=_nanoseconds(model.lora_ttl_seconds),
    )


def _nanoseconds(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds * 1e9)


def main() -> None:
    """Be an engine process."""
    (log_level,) = sys.argv[1:]
    logging.basicConfig(level=log_level.upper(), format="%(levelname).1s engine: %(message)s")
    be_engine_process(
        lambda settings, channel: run_engine(
            msgspec.msgpack.decode(settings, type=ModelConfig), channel
        )
    )


if __name__ == "__main__":
    main()
