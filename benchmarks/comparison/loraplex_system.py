"""loraplex itself as a system of a comparison: `loraplex serve` over HTTP, and the library.

A peer over HTTP is compared with the first, a library with the second.
"""

import asyncio
import re
import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Self

import httpx

from comparison.adapter_bytes import AdapterBytes, adapter_bytes
from comparison.gguf_model import GGUF_PREFIX, gguf_bits
from comparison.peers.in_process import RunningWorker
from comparison.peers.llama_cpp import LlamaCpp
from comparison.peers.worker_process import WorkerProcess
from comparison.processes import Launch, ServerProcess
from comparison.systems import Adapter, Running, Setup, System
from loraplex.bench.completions import (
    PATH,
    Exchange,
    StreamedCompletion,
    StreamingClient,
    completion_body,
    read_completion,
)
from loraplex.bench.session import HTTP_LINE, LAST_LINE, serve_command
from loraplex.core.errors import ConfigError
from loraplex.core.version import __version__

_START_SECONDS = 600.0
_ModelFile = Callable[[Setup], Awaitable[Path]]
_Settings = Mapping[str, str | int]
"""Settings of a served model by name, as the library takes them; flags have the same names."""
# The width in bits, its name and the settings.
_WIDTHS: dict[str, tuple[int, str, _Settings]] = {
    "32-bit": (32, "fp32", {"dtype": "float32"}),
    "16-bit": (16, "bf16", {"dtype": "bfloat16"}),
    "8-bit": (8, "int8", {"dtype": "bfloat16", "quantization": "int8"}),
}


async def _folder(setup: Setup) -> Path:
    return setup.model


def _written_file(gguf_type: str) -> _ModelFile:
    async def file(setup: Setup) -> Path:
        assert setup.gguf_file is not None, "the setup has such files"
        return await asyncio.to_thread(setup.gguf_file, gguf_type)

    return file


_METRICS_LINE = re.compile(r"Started Metrics Service at (\S+:\d+)")
_LOADS_METRIC = re.compile(r"^\w*adapter_loads(?:_total)?(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


class LoraplexSystem(ABC):
    """Implements bench.systems.System but for `start`."""

    is_http: ClassVar[bool]
    mixes_adapters = True
    _suffix: ClassVar[str]
    """End of the name, for the way it is called."""

    def __init__(
        self,
        weights: str,
        weight_bits: int,
        name: str,
        settings: _Settings,
        model_file: _ModelFile = _folder,
    ) -> None:
        """model_file: the folder or file that is served, of the setup's model."""
        self.weights = weights
        self.weight_bits = weight_bits
        self.name = f"loraplex {name}{self._suffix}"
        self._settings = settings
        self.file = model_file
        self._sizes: dict[tuple[Path, Path, int], AdapterBytes] = {}

    @classmethod
    def with_weights(
        cls, weights: str, peers: Sequence[System], *, has_gguf_files: bool = False
    ) -> Self:
        """weights: "32-bit", "16-bit", "8-bit" of the model's folder, or "gguf:TYPE": the very file
        that one of the peers serves, or that of the setup (has_gguf_files). Raises ConfigError.
        """
        if weights in _WIDTHS:
            return cls(weights, *_WIDTHS[weights])
        if has_gguf_files:
            gguf_type = weights.removeprefix(GGUF_PREFIX)
            return cls(weights, gguf_bits(gguf_type), weights, {}, _written_file(gguf_type))
        for peer in peers:
            if isinstance(peer, LlamaCpp) and peer.weights == weights:
                return cls(weights, peer.weight_bits, weights, {}, peer.model_file)
        raise ConfigError(
            f"{weights} needs --peer llama.cpp=FOLDER: its llama-quantize makes the file"
        )

    @property
    def variants(self) -> dict[str, System]:
        """Its own defaults alone."""
        return {"default": self}

    def version(self) -> str:
        return __version__

    async def prepare(self, setup: Setup) -> None:
        await self._tiers(setup)

    @abstractmethod
    async def start(self, setup: Setup) -> Running: ...

    async def _settings_for(self, setup: Setup) -> _Settings:
        """Return all settings but the switch of the prefix cache, which is a flag by another name,
        and the folder of adapters.
        """
        return {
            **self._settings,
            "max_num_seqs": setup.max_num_seqs,
            "max_model_len": setup.max_model_len,
            "num_threads": setup.num_threads,
            "max_lora_rank": setup.max_lora_rank,
            # Kept for the next start, as in the user's cache: a folder of this start is removed.
            "weights_cache_dir": str(setup.cache / "loraplex"),
            **await self._tiers(setup),
        }

    async def _tiers(self, setup: Setup) -> _Settings:
        """Return the settings of tiers that each hold the resident adapters."""
        if not setup.adapters:
            return {}
        largest = max(setup.adapters, key=lambda adapter: adapter.rank)
        model = await self.file(setup)
        key = (model, largest.path, setup.max_lora_rank)
        if key not in self._sizes:
            flags = _flags({**self._settings, "max_lora_rank": setup.max_lora_rank})
            self._sizes[key] = await adapter_bytes(model, largest.path, flags, setup.log)
        return self._sizes[key].settings(setup.num_resident_adapters)


class LoraplexServer(LoraplexSystem):
    """`loraplex serve`, over HTTP."""

    is_http = True
    _suffix = ""

    async def start(self, setup: Setup) -> "RunningLoraplex":
        flags = ["--no-prefix-cache", *_flags(await self._settings_for(setup))]
        command = serve_command(
            await self.file(setup),
            setup.model.name,
            _adapter_folder(setup),
            setup.work / "state",
            flags,
        )
        process = await ServerProcess.start(command, setup.log)

        async def is_ready() -> bool:
            return LAST_LINE in _read(setup.log)

        try:
            await process.wait_until(is_ready, _START_SECONDS)
        except BaseException:
            await process.stop()
            raise
        return RunningLoraplex(process, setup, _read(setup.log))


class LoraplexLibrary(LoraplexSystem):
    """`loraplex.app.llm.LLM`, without a server: compared with other libraries."""

    is_http = False
    _suffix = ", library"

    async def start(self, setup: Setup) -> RunningWorker:
        options = {
            "model": str(await self.file(setup)),
            # As a server runs its engine: apart from the threads that read the streams.
            "engine": "process",
            "state_dir": str(setup.work / "state"),
            "adapter_dirs": [str(_adapter_folder(setup))],
            "enable_prefix_cache": False,
            **await self._settings_for(setup),
        }
        worker = await WorkerProcess.start(
            Path(sys.executable),
            "loraplex_worker",
            options,
            log=setup.log,
            variables={},
            seconds=_START_SECONDS,
        )
        return RunningWorker(worker, setup)


def _flags(settings: _Settings) -> list[str]:
    flags = ((f"--{name.replace('_', '-')}", str(value)) for name, value in settings.items())
    return [part for flag in flags for part in flag]


def _adapter_folder(setup: Setup) -> Path:
    """Make the folder of adapters; a list of thousands would be too long for a command line."""
    folder = setup.work / "adapters"
    folder.mkdir()
    for adapter in setup.adapters:
        _link(adapter.path, folder / adapter.name)
    return folder


def _link(folder: Path, place: Path) -> None:
    """The same files under another folder's name; copies, across file systems.

    No symbolic link: a server does not follow one out of its folder of adapters.
    """
    place.mkdir()
    for file in folder.iterdir():
        try:
            (place / file.name).hardlink_to(file)
        except OSError:
            shutil.copyfile(file, place / file.name)


class RunningLoraplex:
    """Implements bench.systems.Running."""

    def __init__(self, process: ServerProcess, setup: Setup, log: str) -> None:
        http, metrics = HTTP_LINE.search(log), _METRICS_LINE.search(log)
        assert http is not None, "the server has started"
        assert metrics is not None, "the server has started"
        self._process = process
        self._base = setup.model.name
        self._models: list[str | None] = [adapter.name for adapter in setup.adapters]
        self._client = StreamingClient(f"http://{http[1]}")
        self._metrics_url = f"http://{metrics[1]}/metrics"

    @property
    def launch(self) -> Launch:
        return self._process.launch

    @property
    def process_ids(self) -> tuple[int, ...]:
        return (self._process.pid,)

    async def send(self, exchange: Exchange) -> None:
        request = exchange.request
        body = completion_body(self._model(request.adapter), request)
        await self._client.stream(PATH, body, exchange)

    def _model(self, adapter: int | None) -> str:
        if adapter is None:
            return self._base
        name = self._models[adapter]
        assert name is not None, "the adapter was removed"
        return name

    def read(self, exchange: Exchange) -> StreamedCompletion:
        return read_completion(exchange)

    async def add_adapter(self, adapter: Adapter) -> int:
        body = {"lora_name": adapter.name, "lora_path": str(adapter.path)}
        await self._client.call("POST", "/v1/load_lora_adapter", body)
        self._models.append(adapter.name)
        return len(self._models) - 1

    async def remove_adapter(self, index: int) -> None:
        await self._client.call(
            "POST", "/v1/unload_lora_adapter", {"lora_name": self._model(index)}
        )
        self._models[index] = None

    async def counters(self) -> dict[str, float]:
        async with httpx.AsyncClient(trust_env=False) as http:
            text = (await http.get(self._metrics_url)).text
        return {"adapter_loads": sum(float(value) for value in _LOADS_METRIC.findall(text))}

    async def stop(self) -> None:
        await self._client.close()
        await self._process.stop()


def _read(log: Path) -> str:
    return log.read_text(errors="replace") if log.exists() else ""
