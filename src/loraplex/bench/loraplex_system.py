"""loraplex itself as a system of a comparison: `loraplex serve`, spoken to as OpenAI's is."""

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import httpx
import msgspec

from loraplex.bench.processes import ServerProcess
from loraplex.bench.random_adapters import linear_shapes
from loraplex.bench.server import HTTP_LINE, LAST_LINE, serve_command
from loraplex.bench.streaming import StreamingClient, lines
from loraplex.bench.systems import Adapter, Answer, Exchange, Setup
from loraplex.core.errors import ConfigError
from loraplex.core.version import __version__

_START_SECONDS = 600.0
_FLAGS = {
    32: ("--dtype", "float32"),
    16: ("--dtype", "bfloat16"),
    8: ("--dtype", "bfloat16", "--quantization", "int8"),
}
_WIDTH_NAMES = {32: "fp32", 16: "bf16", 8: "int8"}
_METRICS_LINE = re.compile(r"Started Metrics Service at (\S+:\d+)")
_LOADS_METRIC = re.compile(r"^\w*adapter_loads(?:_total)?(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
_DATA = b"data:"
_DONE = b"[DONE]"
_PAGE_RANK = 8
_SPARE_PAGES = 2


class LoraplexSystem:
    """Implements bench.systems.System."""

    is_http = True
    mixes_adapters = True

    def __init__(self, weight_bits: int, serve_flags: Sequence[str] = ()) -> None:
        if weight_bits not in _FLAGS:
            raise ConfigError(f"the widths are {sorted(_FLAGS)} bits; {weight_bits} is none")
        self.weight_bits = weight_bits
        self.name = f"loraplex {_WIDTH_NAMES[weight_bits]}"
        self._serve_flags = serve_flags

    def version(self) -> str:
        return __version__

    async def start(self, setup: Setup) -> "RunningLoraplex":
        adapter_dir, state_dir = setup.work / "adapters", setup.work / "state"
        adapter_dir.mkdir()
        for adapter in setup.adapters:
            _link(adapter.path, adapter_dir / adapter.name)
        flags = [
            *_FLAGS[self.weight_bits],
            "--no-prefix-cache",
            *("--max-num-seqs", str(setup.max_num_seqs)),
            *("--max-model-len", str(setup.max_model_len)),
            *("--num-threads", str(setup.num_threads)),
            *("--max-lora-rank", str(setup.max_lora_rank)),
            *_memory_flags(setup, self.weight_bits),
            *self._serve_flags,
        ]
        command = serve_command(setup.model, setup.model.name, adapter_dir, state_dir, flags)
        process = await ServerProcess.start(command, setup.log)

        async def is_ready() -> bool:
            return LAST_LINE in _read(setup.log)

        await process.wait_until(is_ready, _START_SECONDS)
        return RunningLoraplex(process, setup, _read(setup.log))


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


def _memory_flags(setup: Setup, weight_bits: int) -> list[str]:
    """Room for as many adapters as are to be resident, on the device and in as many bytes again
    on the host.

    A page of the pool holds an adapter of rank 8 on all linear layers in the model's dtype, and an
    adapter has pages of its own.
    """
    if not setup.adapters:
        return []
    shapes = linear_shapes(setup.model).values()
    element_bytes = 4 if weight_bits == 32 else 2
    page_bytes = sum(map(sum, shapes)) * _PAGE_RANK * element_bytes
    pages = sorted((-(-adapter.rank // _PAGE_RANK) for adapter in setup.adapters), reverse=True)
    largest = -(-setup.max_lora_rank // _PAGE_RANK) + 1
    num_pages = max(sum(pages[: setup.num_resident_adapters]), largest) + _SPARE_PAGES
    num_bytes = str(num_pages * page_bytes)
    return ["--lora-device-bytes", num_bytes, "--lora-host-bytes", num_bytes]


class RunningLoraplex:
    """Implements bench.systems.Running."""

    def __init__(self, process: ServerProcess, setup: Setup, log: str) -> None:
        http, metrics = HTTP_LINE.search(log), _METRICS_LINE.search(log)
        assert http is not None, "it says that it has started"
        assert metrics is not None, "it says that it has started"
        self._process = process
        self._base = setup.model.name
        self._models: list[str | None] = [adapter.name for adapter in setup.adapters]
        self._client = StreamingClient(f"http://{http[1]}")
        self._metrics_url = f"http://{metrics[1]}/metrics"

    @property
    def process_ids(self) -> tuple[int, ...]:
        return (self._process.pid,)

    async def send(self, exchange: Exchange) -> None:
        request = exchange.request
        body = {
            "model": self._model(request.adapter),
            "prompt": request.prompt_token_ids,
            "max_tokens": request.num_output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "skip_special_tokens": False,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        await self._client.stream("/v1/completions", msgspec.json.encode(body), exchange)

    def _model(self, adapter: int | None) -> str:
        if adapter is None:
            return self._base
        name = self._models[adapter]
        assert name is not None, "the adapter was removed"
        return name

    def read(self, exchange: Exchange) -> Answer:
        return read_openai(exchange)

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


def read_openai(exchange: Exchange) -> Answer:
    """What a stream of /v1/completions says, with its usage at the end."""
    chunk_ns: list[int] = []
    text: list[str] = []
    usage = _Usage()
    error = exchange.error
    for arrived_ns, line in lines(exchange):
        data = line.removeprefix(_DATA).strip()
        if data == _DONE or not line.startswith(_DATA):
            continue
        chunk = _parse(data)
        if chunk.error is not None:
            error = f"the stream broke: {str(chunk.error)[:300]}"
        if chunk.choices:
            chunk_ns.append(arrived_ns)
            text.extend(choice.text for choice in chunk.choices)
        usage = chunk.usage or usage
    return Answer(
        chunk_ns=tuple(chunk_ns),
        num_prompt_tokens=usage.prompt_tokens,
        num_cached_tokens=usage.prompt_tokens_details.cached_tokens,
        num_output_tokens=usage.completion_tokens,
        text="".join(text),
        error=error,
    )


class _Details(msgspec.Struct):
    cached_tokens: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details = msgspec.field(default_factory=_Details)


class _Choice(msgspec.Struct):
    text: str = ""


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: object = None


def _parse(data: bytes) -> _Chunk:
    try:
        return msgspec.json.decode(data, type=_Chunk)
    except msgspec.DecodeError as error:
        return _Chunk(error=f"{data!r} is not a chunk: {error}")


def _read(log: Path) -> str:
    return log.read_text(errors="replace") if log.exists() else ""
