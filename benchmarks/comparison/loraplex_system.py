"""loraplex itself as a system of a comparison: `loraplex serve`, spoken to as OpenAI's is."""

import re
import shutil
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import httpx

from comparison.adapter_bytes import AdapterBytes, adapter_bytes
from comparison.peers.llama_cpp import LlamaCpp
from comparison.processes import Launch, ServerProcess
from comparison.systems import Adapter, Setup, System
from loraplex.bench.completions import PATH, completion_body, read_completion
from loraplex.bench.exchange import Completion, Exchange
from loraplex.bench.server import HTTP_LINE, LAST_LINE, serve_command
from loraplex.bench.streaming import StreamingClient
from loraplex.core.errors import ConfigError
from loraplex.core.version import __version__

_START_SECONDS = 600.0
_ModelFile = Callable[[Setup], Awaitable[Path]]
# The width in bits, its name and the flags.
_WIDTHS = {
    "32-bit": (32, "fp32", ("--dtype", "float32")),
    "16-bit": (16, "bf16", ("--dtype", "bfloat16")),
    "8-bit": (8, "int8", ("--dtype", "bfloat16", "--quantization", "int8")),
}


async def _folder(setup: Setup) -> Path:
    return setup.model


_METRICS_LINE = re.compile(r"Started Metrics Service at (\S+:\d+)")
_LOADS_METRIC = re.compile(r"^\w*adapter_loads(?:_total)?(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


class LoraplexSystem:
    """Implements bench.systems.System."""

    is_http = True
    mixes_adapters = True

    def __init__(
        self,
        weights: str,
        weight_bits: int,
        name: str,
        flags: Sequence[str] = (),
        model_file: _ModelFile = _folder,
    ) -> None:
        """model_file: the folder or file that is served, of the setup's model."""
        self.weights = weights
        self.weight_bits = weight_bits
        self.name = f"loraplex {name}"
        self._flags = flags
        self.file = model_file
        self._sizes: dict[tuple[Path, Path, int], AdapterBytes] = {}

    @classmethod
    def with_weights(cls, weights: str, peers: Sequence[System]) -> "LoraplexSystem":
        """weights: "32-bit", "16-bit", "8-bit" of the model's folder, or "gguf:TYPE": the very file
        that one of the peers serves. Raises ConfigError.
        """
        if weights in _WIDTHS:
            return cls(weights, *_WIDTHS[weights])
        for peer in peers:
            if isinstance(peer, LlamaCpp) and peer.weights == weights:
                return cls(weights, peer.weight_bits, weights, (), peer.model_file)
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
        await self._tier_flags(setup)

    async def start(self, setup: Setup) -> "RunningLoraplex":
        adapter_dir, state_dir = setup.work / "adapters", setup.work / "state"
        adapter_dir.mkdir()
        for adapter in setup.adapters:
            _link(adapter.path, adapter_dir / adapter.name)
        flags = [
            *self._flags,
            "--no-prefix-cache",
            *("--max-num-seqs", str(setup.max_num_seqs)),
            *("--max-model-len", str(setup.max_model_len)),
            *("--num-threads", str(setup.num_threads)),
            *("--max-lora-rank", str(setup.max_lora_rank)),
            *await self._tier_flags(setup),
        ]
        model = await self.file(setup)
        command = serve_command(model, setup.model.name, adapter_dir, state_dir, flags)
        process = await ServerProcess.start(command, setup.log)

        async def is_ready() -> bool:
            return LAST_LINE in _read(setup.log)

        try:
            await process.wait_until(is_ready, _START_SECONDS)
        except BaseException:
            await process.stop()
            raise
        return RunningLoraplex(process, setup, _read(setup.log))

    async def _tier_flags(self, setup: Setup) -> list[str]:
        """Return the flags of tiers that each hold the resident adapters."""
        if not setup.adapters:
            return []
        largest = max(setup.adapters, key=lambda adapter: adapter.rank)
        model = await self.file(setup)
        key = (model, largest.path, setup.max_lora_rank)
        if key not in self._sizes:
            flags = [*self._flags, "--max-lora-rank", str(setup.max_lora_rank)]
            self._sizes[key] = await adapter_bytes(model, largest.path, flags, setup.log)
        return self._sizes[key].flags(setup.num_resident_adapters)


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

    def read(self, exchange: Exchange) -> Completion:
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
