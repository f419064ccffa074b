"""llama.cpp's server: the one to beat on a CPU without adapters.

Slots join in a batch only if their LoRA lists are equal, so requests of different adapters are
served correctly, but one after another. It knows no adapter but those that it started with.
"""

import asyncio
import hashlib
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from comparison.peers.conversion import made_once
from comparison.peers.http_server import HttpServer
from comparison.processes import Launch
from comparison.systems import Adapter, Setup, System
from loraplex.bench.completions import Exchange, StreamedCompletion, lines
from loraplex.core.errors import ConfigError, UnsupportedFeatureError

_START_SECONDS = 300.0
_VERSION_SECONDS = 10.0
_DATA = b"data:"
_MAX_ERROR_LENGTH = 300
_CONVERT_LORAS = Path(__file__).with_name("workers") / "convert_loras.py"
_SERVER_PLACES = ("build/bin/llama-server", "bin/llama-server", "llama-server")
_SERVER_WITHOUT_OPENMP = "build-no-openmp/bin/llama-server"
_QUANTIZE_PLACES = ("build/bin/llama-quantize", "bin/llama-quantize", "llama-quantize")
# The width in bits and its name, what converts the model to it, and what the adapters are kept in.
_WIDTHS = {
    "32-bit": (32, "F32", "f32", "f32"),
    "16-bit": (16, "F16", "f16", "f16"),
    "8-bit": (8, "Q8_0", "q8_0", "f16"),
    # Where the processor multiplies bfloat16 this type is multiplied as it is; F16 is widened.
    "gguf:BF16": (16, "gguf:BF16", "bf16", "f16"),
}
_GGUF_TYPE = re.compile(r"gguf:(I?Q(\d)_\w+)")


class ThreadSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of threads and weights that llama.cpp documents: tools/server/README.md (--threads,
    --threads-batch, --poll, --no-repack), docs/build.md (GGML_OPENMP) and
    docs/development/token_generation_performance_tips.md (fewer threads than processors, which may
    be halves of cores)."""

    poll: int = 50
    """Its default. Only threads that are not OpenMP's poll."""
    threads_divisor: int = 1
    """Number of threads for prompts over that for decoding."""
    has_openmp: bool = True
    """The default of a build; without it: cmake -B build-no-openmp -DGGML_OPENMP=OFF."""
    repacks: bool = True
    """Its default. Without it quantised weights stay as they are in the file, and AMX is not used:
    some builds for AMX end with an illegal instruction in a virtual machine."""

    @property
    def name(self) -> str:
        build = "as built" if self.has_openmp else "OpenMP off"
        part = f", --threads / {self.threads_divisor}" if self.threads_divisor > 1 else ""
        return f"{build}, --poll {self.poll}{part}{'' if self.repacks else ', --no-repack'}"

    def flags(self, num_threads: int) -> list[str]:
        decoding = max(1, num_threads // self.threads_divisor)
        threads = ["--threads", str(decoding), "--threads-batch", str(num_threads)]
        return [*threads, "--poll", str(self.poll), *([] if self.repacks else ["--no-repack"])]


_THREADS = (
    ThreadSettings(),
    ThreadSettings(poll=0),
    ThreadSettings(threads_divisor=2),
    ThreadSettings(has_openmp=False),
    ThreadSettings(has_openmp=False, poll=0),
    ThreadSettings(has_openmp=False, poll=100),
    ThreadSettings(repacks=False),
    ThreadSettings(has_openmp=False, poll=100, repacks=False),
)


class LlamaCpp:
    """Implements `System`. Needs a folder with llama.cpp's sources and its built server.

    The converters run with this Python: they need torch, transformers and sentencepiece, of which
    loraplex's `dev` extra has those that loraplex itself has not.
    """

    is_http = True
    mixes_adapters = False

    def __init__(self, folder: Path, weights: str, threads: ThreadSettings = _THREADS[0]) -> None:
        """weights: "32-bit", "16-bit" (F16), "8-bit", "gguf:BF16" or, for a file that
        llama-quantize makes of the 16-bit one, "gguf:TYPE" with one of its types: gguf:Q4_K_M.

        Raises ConfigError for others, and if the folder lacks the server or the converters.
        """
        self.weights = weights
        self._quantized_type = ""
        if match := _GGUF_TYPE.fullmatch(weights):
            self._quantized_type, self.weight_bits, width = match[1], int(match[2]), weights
            self._model_type = self._adapter_type = "f16"
        elif weights in _WIDTHS:
            self.weight_bits, width, self._model_type, self._adapter_type = _WIDTHS[weights]
        else:
            raise ConfigError(
                f"llama.cpp's weights are {', '.join(_WIDTHS)} and gguf:TYPE, such as gguf:Q4_K_M; "
                f"{weights!r} is none"
            )
        self.name = f"llama.cpp {width}"
        self._folder = folder.absolute()
        self._threads = threads
        self._server = _find(self._folder, _SERVER_PLACES)
        for script in ("convert_hf_to_gguf.py", "convert_lora_to_gguf.py"):
            if not (self._folder / script).is_file():
                raise ConfigError(f"llama.cpp: {folder} has no {script}; give its source folder")

    @property
    def variants(self) -> dict[str, System]:
        return {each.name: LlamaCpp(self._folder, self.weights, each) for each in _THREADS}

    async def prepare(self, setup: Setup) -> None:
        await self.model_file(setup)
        await self._converted_adapters(setup)

    async def start(self, setup: Setup) -> "RunningLlamaCpp":
        model = await self.model_file(setup)
        adapters = await self._converted_adapters(setup)

        server = self._server
        if not self._threads.has_openmp:
            server = _find(self._folder, (_SERVER_WITHOUT_OPENMP,))

        def command(host: str, port: int) -> list[str]:
            address = ["--host", host, "--port", str(port)]
            threads = self._threads.flags(setup.num_threads)
            return [str(server), *address, *threads, *_flags(setup, model, adapters)]

        started = await HttpServer.start(
            command,
            setup.log,
            {},
            ready_path="/health",
            seconds=_START_SECONDS,
            # It closes some of them after a stream.
            reuses_connections=False,
        )
        return RunningLlamaCpp(started, setup)

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

    async def model_file(self, setup: Setup) -> Path:
        """Return the GGUF file that it serves, which is made once. Raises ConfigError."""
        if setup.gguf_file is not None:
            gguf_type = self._quantized_type or self._model_type.upper()
            return await asyncio.to_thread(setup.gguf_file, gguf_type)
        source = await self._converted_model(setup)
        if not self._quantized_type:
            return source
        quantize = _find(self._folder, _QUANTIZE_PLACES)

        def convert(target: Path) -> list[str]:
            return [str(quantize), str(source), str(target), self._quantized_type]

        target = source.with_name(f"quantized-{self._quantized_type}.gguf")
        return await made_once(target, convert, setup.log)

    async def _converted_model(self, setup: Setup) -> Path:
        def convert(target: Path) -> list[str]:
            script = str(self._folder / "convert_hf_to_gguf.py")
            what = ["--outtype", self._model_type, "--outfile", str(target), str(setup.model)]
            return [sys.executable, script, *what]

        target = setup.cache / "llama.cpp" / f"model-{self._model_type.upper()}.gguf"
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


def _find(folder: Path, places: Sequence[str]) -> Path:
    for place in places:
        if (folder / place).is_file():
            return folder / place
    raise ConfigError(
        f"llama.cpp: {folder} has no {' or '.join(places)}; give the source folder with it built "
        "there"
    )


def _flags(setup: Setup, model: Path, adapters: Sequence[Path]) -> list[str]:
    return [
        *("--model", str(model)),
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

    def read(self, exchange: Exchange) -> StreamedCompletion:
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
        return StreamedCompletion(
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
