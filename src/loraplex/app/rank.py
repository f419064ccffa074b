"""One rank of a model's engine: its share of the weights, its channels, and its traits.

`python -m loraplex.app.rank LOG_LEVEL RANK` is the process of a rank (parallel.rank_process
describes its start). Rank 0 is in the engine's own process.
"""

import dataclasses
import functools
import hashlib
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

import msgspec
import torch

from loraplex.app.open_step_sizes import runner_settings
from loraplex.core.config import ModelConfig
from loraplex.core.errors import ConfigError
from loraplex.core.log_lines import log_to_standard_error
from loraplex.core.python_process import module_command
from loraplex.core.version import __version__
from loraplex.engine.runner import AdapterLoader, Runner
from loraplex.execution.adapters.host_adapters import HostAdapters
from loraplex.execution.adapters.loader import FileAdapterLoader
from loraplex.execution.grammar.compiler import GrammarVocabulary, VocabularySource
from loraplex.execution.loading import load_parts, start_runner
from loraplex.execution.steps.socket_links import SocketLinks
from loraplex.execution.steps.threaded_runner import ThreadedRunner
from loraplex.execution.weights.weight_files import weight_files
from loraplex.kernels.channel import RankChannels
from loraplex.kernels.cuda.channel import ChannelStore, connect_channels
from loraplex.kernels.native.channel import Segment, SegmentAddress, SharedMemoryChannel
from loraplex.kernels.native.library import NativeLibrary, NativeLibraryError, load_library
from loraplex.models.engine_folder import CONFIG_NAME
from loraplex.models.linear_group import TensorShard
from loraplex.models.stages import PipelineStage
from loraplex.parallel.messages import RankStart
from loraplex.parallel.rank_process import be_rank_process
from loraplex.parallel.world import World
from loraplex.text.tokenizer import Tokenizer, load_tokenizer

_NUM_CHANNELS: Final = 2
"""One for the steps, and one for the thread that loads adapters."""


class StageChannels(Protocol):
    """The channels of one rank to those that share its layers."""

    connected: RankChannels | None
    """None before `connect`."""

    def open(self) -> bytes:
        """Return the address of the rank that leads the stage; it is empty of the others."""
        ...

    def connect(self, address: bytes) -> None:
        """address: what `open` returned to the leader."""
        ...

    def wait_ns(self) -> int:
        """Time that the steps' thread waited for other ranks."""
        ...


class MemoryChannels:
    """Implements StageChannels by shared memory."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._segments: list[Segment] = []
        """Kept open, since others may open them later."""
        self._steps: SharedMemoryChannel | None = None
        self.connected: RankChannels | None = None

    def open(self) -> bytes:
        world = self._world
        if world.rank == world.stage_leader:
            sizes = [world.tensor_parallel_size] * _NUM_CHANNELS
            self._segments = [Segment(native_library(), size) for size in sizes]
        return msgspec.msgpack.encode([segment.address for segment in self._segments])

    def connect(self, address: bytes) -> None:
        rank = self._world.tensor_rank
        segments = msgspec.msgpack.decode(address, type=tuple[SegmentAddress, ...])
        self._steps, loads = (
            SharedMemoryChannel(native_library(), segment, rank) for segment in segments
        )
        self.connected = RankChannels(self._steps, loads)

    def wait_ns(self) -> int:
        return 0 if self._steps is None else int(self._steps.wait_seconds * 1e9)


class GpuChannels:
    """Implements StageChannels by NCCL. A rank waits for others in its GPU's queue of work."""

    def __init__(self, world: World, device: torch.device) -> None:
        """device: this rank's own."""
        self._world = world
        self._device = device
        self._store: ChannelStore | None = None
        self.connected: RankChannels | None = None

    def open(self) -> bytes:
        world = self._world
        if world.rank != world.stage_leader:
            return b""
        self._store = ChannelStore.listen()
        return self._store.address.encode()

    def connect(self, address: bytes) -> None:
        world = self._world
        if self._store is None:
            self._store = ChannelStore.reach(address.decode())
        self.connected = connect_channels(
            self._store, world.tensor_rank, world.tensor_parallel_size, self._device
        )

    def wait_ns(self) -> int:
        return 0


def stage_channels(model: ModelConfig, world: World) -> StageChannels:
    """Return what connects a rank with others. Raises ConfigError if there is no GPU for it."""
    if model.device.startswith("cuda"):
        return GpuChannels(
            world, torch.device(rank_device(model, world, torch.cuda.device_count()))
        )
    return MemoryChannels(world)


def rank_device(model: ModelConfig, world: World, num_gpus: int) -> str:
    """Return the device of a rank; on one machine each has a GPU of its own, from `device` on.

    num_gpus: those that this process sees; Ray shows an actor its own. Raises ConfigError if there
    are too few.
    """
    if world.size == 1 or model.executor == "ray" or not model.device.startswith("cuda"):
        return model.device
    first = torch.device(model.device).index or 0
    if first + world.size > num_gpus:
        raise ConfigError(
            f"{world.size} ranks need as many GPUs from {model.device} on, and this machine has "
            f"{num_gpus}: tensor_parallel_size times pipeline_parallel_size must be at most "
            f"{max(num_gpus - first, 1)}",
            param="tensor_parallel_size",
        )
    return f"cuda:{first + world.rank}"


def native_library() -> NativeLibrary:
    """Return the library of the native kernels. Raises ConfigError if there is none."""
    try:
        return load_library()
    except NativeLibraryError as error:
        raise ConfigError(f"ranks on a CPU need the native kernels: {error}") from error


class _Addresses(msgspec.Struct, frozen=True):
    channels: bytes
    """What StageChannels.open returned."""
    links: str
    """Socket for the other stages."""


class ModelRank:
    """Implements parallel.rank_process.RankProgram."""

    def __init__(
        self,
        model: ModelConfig,
        world: World,
        logits_dir: Path | None = None,
        *,
        token: str = "",
        host: str = "",
    ) -> None:
        """logits_dir: a private folder for the logits that requests return; only rank 0 has one.

        token, host: as in RankStart.
        """
        self._model = model
        self._world = world
        self._token = token
        self._host = host
        self._links: SocketLinks | None = None
        self._logits_dir = logits_dir
        self._channels: StageChannels | None = None

    def traits(self) -> dict[str, str]:
        return {
            "loraplex version": __version__,
            "torch version": str(torch.__version__),
            "processor": self._processor(),
            "checkpoint": _checkpoint(Path(self._model.path)),
        }

    def open(self) -> bytes:
        world = self._world
        if world.tensor_parallel_size > 1:
            self._channels = stage_channels(self._model, world)
        if world.pipeline_parallel_size > 1:
            stage = PipelineStage(world.stage, world.pipeline_parallel_size)
            self._links = SocketLinks(stage, self._token, self._host)
        return msgspec.msgpack.encode(
            _Addresses(
                b"" if self._channels is None else self._channels.open(),
                "" if self._links is None else self._links.address,
            )
        )

    def connect(self, addresses: Mapping[int, bytes]) -> None:
        decoder = msgspec.msgpack.Decoder(_Addresses)
        decoded = {rank: decoder.decode(encoded) for rank, encoded in addresses.items()}
        world = self._world
        if self._channels is not None:
            self._channels.connect(decoded[world.stage_leader].channels)
        if self._links is not None:
            ranks = range(world.tensor_rank, world.size, world.tensor_parallel_size)
            self._links.connect([decoded[one].links for one in ranks])

    def load(self) -> tuple[Runner, AdapterLoader]:
        model = self._model
        self._limit_threads()
        host_adapters = HostAdapters()
        settings = msgspec.structs.replace(
            runner_settings(model), logits_dir=self._logits_dir, device=self._device
        )
        channels = None if self._channels is None else self._channels.connected
        parts = load_parts(
            Path(model.path),
            settings,
            host_adapters,
            vocabulary_source(model),
            place=TensorShard(self._world.tensor_rank, self._world.tensor_parallel_size),
            channels=channels,
            links=self._links,
        )
        runner = start_runner(parts, settings)
        loads = None if channels is None else channels.loads
        loader = FileAdapterLoader(host_adapters, runner.prepare_adapter, loads)
        # A step on an accelerator runs by itself; one on a CPU needs a thread. In a pipeline such a
        # thread would wait for the results of a step before it computes the next one.
        needs_thread = overlaps(model) and parts.accelerator is None and self._links is None
        return ThreadedRunner(runner) if needs_thread else runner, loader

    def abort(self, reason: str) -> None:
        if self._channels is not None:
            for channel in self._channels.connected or ():
                channel.abort(reason)
        if self._links is not None:
            self._links.abort(reason)

    def wait_ns(self) -> int:
        of_links = 0 if self._links is None else self._links.wait_ns
        return of_links + (0 if self._channels is None else self._channels.wait_ns())

    def _limit_threads(self) -> None:
        num_threads, world = self._model.num_threads, self._world
        if num_threads is None and world.size > 1:
            # With Ray each stage may have a machine of its own.
            is_local = self._model.executor == "multiprocess"
            num_ranks = world.size if is_local else world.tensor_parallel_size
            num_threads = max(1, torch.get_num_threads() // num_ranks)
        if num_threads is not None:
            torch.set_num_threads(num_threads)

    def _processor(self) -> str:
        if self._model.device.startswith("cuda"):
            return torch.cuda.get_device_name(self._device)
        return native_library().arithmetic

    @property
    def _device(self) -> str:
        return rank_device(self._model, self._world, torch.cuda.device_count())


def _checkpoint(folder: Path) -> str:
    """Return a digest of the model's configuration, and of the names and sizes of its weights."""
    described = [(file.name, file.stat().st_size) for file in weight_files(folder)]
    content = (folder / CONFIG_NAME).read_bytes() + msgspec.msgpack.encode(described)
    return hashlib.sha256(content).hexdigest()


def world_of(model: ModelConfig) -> World:
    """Return the place of rank 0."""
    return World(0, model.tensor_parallel_size, model.pipeline_parallel_size)


def rank_command(rank: int) -> Sequence[str]:
    """Return the command of a rank's process, which logs as this one does."""
    level = logging.getLevelName(logging.getLogger().level).lower()
    return module_command("loraplex.app.rank", level, str(rank))


def overlaps(model: ModelConfig) -> bool:
    """Return whether the next step is planned while one runs."""
    if model.overlap is None:
        return not model.device.startswith("cpu")
    return model.overlap


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


def main() -> None:
    """Run the process of a rank."""
    log_level, rank = sys.argv[1:]
    log_to_standard_error(log_level, f"rank {rank}")
    be_rank_process(rank_of)


def rank_of(start: RankStart) -> ModelRank:
    """Return the program of a rank that is not rank 0."""
    model = msgspec.msgpack.decode(start.settings, type=ModelConfig)
    return ModelRank(model, start.world, token=start.token, host=start.host)


if __name__ == "__main__":
    main()
