"""llama.cpp's server: the one to beat on a CPU without adapters.

Slots join in a batch only if their LoRA lists are equal, so requests of different adapters are
served correctly, but one after another. It knows no adapter but those that it started with.
"""

import hashlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from comparison.peers.conversion import made_once
from comparison.peers.http_server import HttpServer
from comparison.processes import Launch
from comparison.systems import Adapter, Setup
from loraplex.bench.exchange import Completion, Exchange
from loraplex.bench.streaming import lines
from loraplex.core.errors import ConfigError, UnsupportedFeatureError

_START_SECONDS = 300.0
_VERSION_SECONDS = 10.0
_DATA = b"data:"
_MAX_ERROR_LENGTH = 300
_CONVERT_LORAS = Path(__file__).with_name("workers") / "convert_loras.py"
_SERVER_PLACES = ("build/bin/llama-server", "bin/llama-server", "llama-server")
# The width, what converts the model to it, and what the adapters are kept in.
_WIDTHS = {32: ("F32", "f32", "f32"), 16: ("F16", "f16", "f16"), 8: ("Q8_0", "q8_0", "f16")}


class LlamaCpp:
    """Implements `System`. Needs a folder with llama.cpp's sources and its built server.

    The converters run with this Python: they need torch, transformers and sentencepiece, of which
    loraplex's `dev` extra has those that loraplex itself has not.
    """

    is_http = True
    mixes_adapters = False

    def __init__(self, folder: Path, weight_bits: int) -> None:
        """Raises ConfigError if the folder lacks the server or the converters."""
        if weight_bits not in _WIDTHS:
            raise ConfigError(f"the widths are {sorted(_WIDTHS)} bits; {weight_bits} is none")
        self.weight_bits = weight_bits
        self._width, self._model_type, self._adapter_type = _WIDTHS[weight_bits]
        self.name = f"llama.cpp {self._width}"
        self._folder = folder.absolute()
        self._server = _find_server(self._folder)
        for script in ("convert_hf_to_gguf.py", "convert_lora_to_gguf.py"):
            if not (self._folder / script).is_file():
                raise ConfigError(f"llama.cpp: {folder} has no {script}; give its source folder")

    async def prepare(self, setup: Setup) -> None:
        await self._converted_model(setup)
        await self._converted_adapters(setup)

    async def start(self, setup: Setup) -> "RunningLlamaCpp":
        model = await self._converted_model(setup)
        adapters = await self._converted_adapters(setup)

        def command(host: str, port: int) -> list[str]:
            address = ["--host", host, "--port", str(port)]
            return [str(self._server), *address, *_flags(setup, model, adapters)]

        server = await HttpServer.start(
            command,
            setup.log,
            {},
            ready_path="/health",
            seconds=_START_SECONDS,
            # It closes some of them after a stream.
            reuses_connections=False,
        )
        return RunningLlamaCpp(server, setup)

    def version(self) -> str:
        """The line of --version that names the build."""
        try:
            done = subprocess.run(
                [str(self._server), "--version"],
                capture_output=True,
                text=True,
                timeout=_VERSION_SECONDS,
                check=True,
            )
        except (OSError, subprocess.SubprocessError):
            return ""
        printed = (done.stdout + done.stderr).splitlines()
        return next((line for line in printed if line.startswith("version")), "")

    async def _converted_model(self, setup: Setup) -> Path:
        def convert(target: Path) -> list[str]:
            script = str(self._folder / "convert_hf_to_gguf.py")
            what = ["--outtype", self._model_type, "--outfile", str(target), str(setup.model)]
            return [sys.executable, script, *what]

        target = setup.cache / "llama.cpp" / f"model-{self._width}.gguf"
        return await made_once(target, convert, setup.log)

    async def _converted_adapters(self, setup: Setup) -> list[Path]:
        """A folder of files for this very set of adapters."""
        if not setup.adapters:
            return []
        jobs = [(str(a.path), f"{number}.gguf") for number, a in enumerate(setup.adapters)]
        encoded = msgspec.json.encode(jobs)

        def convert(target: Path) -> list[str]:
            script = str(self._folder / "convert_lora_to_gguf.py")
            what = [script, str(setup.model), self._adapter_type, str(target)]
            return [sys.executable, str(_CONVERT_LORAS), *what, encoded.decode()]

        set_name = hashlib.sha256(encoded).hexdigest()[:16]
        target = setup.cache / "llama.cpp" / f"adapters-{self._adapter_type}-{set_name}"
        folder = await made_once(target, convert, setup.log)
        return [folder / name for _, name in jobs]


def _find_server(folder: Path) -> Path:
    for place in _SERVER_PLACES:
        if (folder / place).is_file():
            return folder / place
    raise ConfigError(
        f"llama.cpp: {folder} has no {' or '.join(_SERVER_PLACES)}; give the source folder with "
        "the server built in it"
    )


def _flags(setup: Setup, model: Path, adapters: Sequence[Path]) -> list[str]:
    threads = str(setup.num_threads)
    return [
        *("--model", str(model), "--threads", threads, "--threads-batch", threads),
        *("--parallel", str(setup.max_num_seqs)),
        *("--ctx-size", str(setup.max_num_seqs * setup.max_model_len)),
        # No reuse of an earlier prompt, in a slot or in other memory.
        *("--no-cache-prompt", "--cache-ram", "0", "--slot-prompt-similarity", "0"),
        *("--cont-batching", "--offline", "--no-ui"),
        *(("--lora", ",".join(map(str, adapters))) if adapters else ()),
        *(("--lora-init-without-apply",) if adapters else ()),
    ]


class RunningLlamaCpp:
    """Implements `Running`."""

    def __init__(self, server: HttpServer, setup: Setup) -> None:
        self._server = server
        self._tokens = setup.tokens
        self._num_adapters = len(setup.adapters)

    @property
    def launch(self) -> Launch:
        return self._server.launch

    @property
    def process_ids(self) -> tuple[int, ...]:
        return (self._server.pid,)

    async def send(self, exchange: Exchange) -> None:
        request = exchange.request
        body: dict[str, Any] = {
            "prompt": request.prompt_token_ids,
            "n_predict": request.num_output_tokens,
            # Greedy, by the one sampler that needs no sorted vocabulary.
            "temperature": 0,
            "top_k": 1,
            "samplers": ["top_k"],
            "ignore_eos": True,
            "cache_prompt": False,
            "return_tokens": True,
            "stream": True,
        }
        if self._num_adapters:
            body["lora"] = _lora(request.adapter)
        await self._server.client.stream("/completion", msgspec.json.encode(body), exchange)

    def read(self, exchange: Exchange) -> Completion:
        chunk_ns: list[int] = []
        tokens: list[int] = []
        last = _Chunk()
        error = exchange.error
        for arrived_ns, line in lines(exchange):
            chunk = _parse(line)
            if chunk.error is not None:
                error = f"the stream broke: {str(chunk.error)[:_MAX_ERROR_LENGTH]}"
            if chunk.tokens:
                chunk_ns.append(arrived_ns)
                tokens += chunk.tokens
            if chunk.stop:
                last = chunk
        return Completion(
            chunk_ns=tuple(chunk_ns),
            num_prompt_tokens=last.tokens_evaluated,
            num_cached_tokens=last.timings.cache_n,
            num_output_tokens=last.tokens_predicted,
            text="".join(self._tokens[token] for token in tokens),
            error=error,
        )

    async def add_adapter(self, adapter: Adapter) -> int:
        raise UnsupportedFeatureError(
            f"llama.cpp's server takes adapters at its start only; {adapter.name} comes too late"
        )

    async def remove_adapter(self, index: int) -> None:
        raise UnsupportedFeatureError(
            f"llama.cpp's server keeps the adapters of its start; {index} stays"
        )

    async def counters(self) -> dict[str, float]:
        return {}

    async def stop(self) -> None:
        await self._server.stop()


def _lora(adapter: int | None) -> list[dict[str, float]]:
    """Which adapters a request runs with. None given, or an empty list, would be all of them."""
    return [{"id": 0, "scale": 0.0} if adapter is None else {"id": adapter, "scale": 1.0}]


class _Timings(msgspec.Struct):
    cache_n: int = 0


class _Chunk(msgspec.Struct):
    """What matters of a line of the stream; the numbers are in the last one."""

    tokens: list[int] = []
    stop: bool = False
    tokens_evaluated: int = 0
    tokens_predicted: int = 0
    timings: _Timings = msgspec.field(default_factory=_Timings)
    error: Any = None


def _parse(line: bytes) -> _Chunk:
    data = line.removeprefix(_DATA).strip()
    try:
        return msgspec.json.decode(data, type=_Chunk)
    except msgspec.DecodeError as error:
        return _Chunk(error=f"{data!r} is not a chunk: {error}")
