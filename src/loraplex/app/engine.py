"""The engine of one model: built from its settings, run in a thread or as a process of its own.

`python -m loraplex.app.engine LOG_LEVEL` is the engine process (engine.process describes its
start).
"""

import dataclasses
import functools
import gc
import logging
import sys
from pathlib import Path

import msgspec
import torch

from loraplex.core.clock import SystemClock
from loraplex.core.config import ModelConfig
from loraplex.core.errors import ConfigError, LoraplexError
from loraplex.core.log_lines import log_to_standard_error
from loraplex.core.scheduler_settings import SchedulerSettings
from loraplex.engine.channel import EngineChannel
from loraplex.engine.engine import Engine
from loraplex.engine.engine import build_engine as engine_of
from loraplex.engine.journal import Journal
from loraplex.engine.journal_file import JournalFile
from loraplex.engine.loop import EngineLoop
from loraplex.engine.messages import EngineFailed
from loraplex.engine.process import be_engine_process
from loraplex.execution.adapters.host_adapters import HostAdapters
from loraplex.execution.adapters.loader import FileAdapterLoader
from loraplex.execution.grammar.vocabulary import GrammarVocabulary, VocabularySource
from loraplex.execution.loading import load_parts, start_runner
from loraplex.execution.sizing.settings import RunnerSettings
from loraplex.execution.steps.threaded_runner import ThreadedRunner
from loraplex.serving.engines.link import EngineLink, LinkFactory, ThreadLink
from loraplex.text.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)


def build_engine(model: ModelConfig, logits_dir: Path | None = None) -> Engine:
    """Load the weights and allocate the memory. Raises ConfigError.

    logits_dir: a private folder for the logits that requests return.
    """
    if model.num_threads is not None:
        torch.set_num_threads(model.num_threads)
    host_adapters = HostAdapters()
    folder = Path(model.path)
    settings = msgspec.structs.replace(runner_settings(model), logits_dir=logits_dir)
    vocabulary = vocabulary_source(model)
    parts = load_parts(folder, settings, host_adapters, vocabulary)
    runner, overlap = start_runner(parts, settings), overlaps(model)
    loader = FileAdapterLoader(host_adapters, runner.prepare_adapter)
    # A step on an accelerator runs by itself; one on a CPU needs a thread.
    steps = ThreadedRunner(runner) if overlap and parts.accelerator is None else runner
    try:
        return engine_of(
            steps,
            loader,
            SystemClock(),
            scheduler_settings(model),
            adapter_host_bytes=model.lora_host_bytes,
            eviction_policy=model.lora_eviction_policy,
            journal=_journal(model),
            overlap=overlap,
        )
    except ConfigError:
        loader.close()
        steps.close()
        raise


def run_engine(model: ModelConfig, channel: EngineChannel, *, is_alone: bool = False) -> None:
    """Build the engine and serve the channel; a failed start is the channel's last event.

    is_alone: the engine has a process of its own.
    """
    try:
        engine = build_engine(model, channel.logits_dir)
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
        EngineLoop(engine, channel, SystemClock()).run()
    finally:
        engine.close()


def engine_thread(model: ModelConfig) -> LinkFactory:
    """Return the factory of an engine in a thread of this process."""

    async def start(_epoch: int) -> EngineLink:
        return ThreadLink(lambda channel: run_engine(model, channel))

    return start


def overlaps(model: ModelConfig) -> bool:
    """Return whether the next step is planned while one runs."""
    if model.overlap is None:
        return not model.device.startswith("cpu")
    return model.overlap


def runner_settings(model: ModelConfig) -> RunnerSettings:
    """Return the runner's part of a model's settings."""
    return msgspec.convert(model, RunnerSettings, from_attributes=True)


def scheduler_settings(model: ModelConfig) -> SchedulerSettings:
    """Return the scheduler's part of a model's settings."""
    return msgspec.convert(model, SchedulerSettings, from_attributes=True)


def vocabulary_source(model: ModelConfig) -> VocabularySource:
    """Return a function that reads the model's tokenizer for grammars. It raises ConfigError."""

    def read() -> GrammarVocabulary:
        tokenizer = load_tokenizer(Path(model.tokenizer or model.path), model.tokenizer_config)
        return dataclasses.replace(vocabulary_of(tokenizer), limits=model.grammar_limits)

    return read


def vocabulary_of(tokenizer: Tokenizer) -> GrammarVocabulary:
    """Return the bytes of each token, the same ones that serving makes text of."""
    ids = range(tokenizer.vocab_size)
    return GrammarVocabulary(
        tokens=tuple(tokenizer.token_bytes(token_id) for token_id in ids),
        special_ids=frozenset(token_id for token_id in ids if tokenizer.is_special(token_id)),
        encode=functools.partial(tokenizer.encode, add_special_tokens=False),
    )


def _journal(model: ModelConfig) -> Journal | None:
    if not model.iteration_log:
        return None
    return JournalFile(Path(model.iteration_log).expanduser(), model.iteration_log_bytes)


def main() -> None:
    """Run an engine process."""
    (log_level,) = sys.argv[1:]
    log_to_standard_error(log_level, "engine")
    be_engine_process(
        lambda settings, channel: run_engine(
            msgspec.msgpack.decode(settings, type=ModelConfig), channel, is_alone=True
        )
    )


if __name__ == "__main__":
    main()
