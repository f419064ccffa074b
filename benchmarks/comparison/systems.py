"""Interface of a server under comparison, ours or another's: start, send, stop.

A `System` is a kind of server with its weight format; `start` gives a `Running` one. The comparison
sends every request through `Running.send`, so all systems are loaded by one load generator, and
reads what came back when the run is over (`Running.read`), so that parsing takes no time from it.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from comparison.processes import Launch
from loraplex.bench.client import exchange_all, record_of
from loraplex.bench.completions import Exchange, StreamedCompletion
from loraplex.bench.statistics import RunStatistics, summarize
from loraplex.bench.workload import PlannedRequest


class Adapter(msgspec.Struct, frozen=True, kw_only=True):
    """A LoRA adapter as a PEFT folder: adapter_config.json and adapter_model.safetensors."""

    name: str
    path: Path
    rank: int
    alpha: int
    """The adapter's change is scaled by alpha / rank."""


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What to serve, and how. The same for every system of a comparison."""

    model: Path
    """A Hugging Face folder in bfloat16; a 32-bit system widens it, which is exact. Of a model that
    exists only as `gguf_file`, it has no weights."""
    tokens: tuple[str, ...]
    """The text of each token id; every token that is ever generated has a text of its own."""
    adapters: tuple[Adapter, ...]
    """Known before `start` returns; a request's `adapter` is an index into them."""
    num_resident_adapters: int
    """How many of them memory shall hold at once; a system without such a setting ignores it."""
    max_lora_rank: int
    """Largest rank of these adapters, and of those that `add_adapter` brings."""
    max_num_seqs: int
    """Requests in one step; a system may take fewer, never more."""
    max_model_len: int
    """Prompt and output together, of one request."""
    num_threads: int
    cache: Path
    """Files made from the model or the adapters may be kept here for the next time. The folder is
    the fixture's; a system makes a folder of its own name in it."""
    work: Path
    """An empty folder for this one start; removed after `stop`. For logs, see `log`."""
    log: Path
    """The file for what the system prints."""
    gguf_file: Callable[[str], Path] | None = None
    """Gives the model as a GGUF file of a type, such as Q4_K_M, written at the first call; for
    systems that read such files, in place of a conversion. None: they convert the folder."""


class Running(Protocol):
    """A started system."""

    @property
    def launch(self) -> Launch:
        """How its first process was started."""
        ...

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Ids of its processes. Memory is counted over them and their children."""
        ...

    async def send(self, exchange: Exchange) -> None:
        """Send `exchange.request`, greedy, with no end token and no prefix reuse; returns when the
        response is complete. Many run at once. A failure goes into `exchange.error`, not up.
        """
        ...

    def read(self, exchange: Exchange) -> StreamedCompletion:
        """Parse what `send` kept."""
        ...

    async def add_adapter(self, adapter: Adapter) -> int:
        """Make one more adapter known, by its path, while the system runs; gives the index that
        requests use. Returns as soon as requests for it may be sent; whether its weights are
        loaded here or by the first request is the system's choice: the first response is timed from
        the call. Raises UnsupportedFeatureError.
        """
        ...

    async def remove_adapter(self, index: int) -> None:
        """Forget an adapter of `add_adapter`. Raises UnsupportedFeatureError."""
        ...

    async def counters(self) -> dict[str, float]:
        """Its own counts so far that matter here: "adapter_loads" if it counts them, or {}."""
        ...

    async def stop(self) -> None:
        """End all its processes. Idempotent, and right after a crash, too."""
        ...


class System(Protocol):
    """A kind of server."""

    @property
    def name(self) -> str:
        """Unique in a comparison, as the tables show it: "llama.cpp F16"."""
        ...

    @property
    def weights(self) -> str:
        """Format of the linear layers' weights: "32-bit", "16-bit", "8-bit", or "gguf:TYPE" for one
        GGUF file. Systems with the same weights are compared.
        """
        ...

    @property
    def weight_bits(self) -> int:
        """Width of these weights. In 32 bits, outputs must be those of the reference."""
        ...

    @property
    def variants(self) -> "Mapping[str, System]":
        """This system by its settings of threads, as its documentation gives them, the default
        first. The fastest is measured.
        """
        ...

    @property
    def is_http(self) -> bool:
        """Whether requests reach it over HTTP; else it is a library, called in a worker process."""
        ...

    @property
    def mixes_adapters(self) -> bool:
        """Whether one of its batches holds requests of different adapters. One that does not still
        serves them, one after another.
        """
        ...

    async def prepare(self, setup: Setup) -> None:
        """Make or find out what is no part of a start: files for `setup.cache`, sizes. Called
        before `start`, which does it itself otherwise. Raises ConfigError.
        """
        ...

    async def start(self, setup: Setup) -> Running:
        """Returns when it is ready for requests. Raises ConfigError with the end of its log."""
        ...

    def version(self) -> str:
        """Version of its package or build; "" if it is not installed. Blocks for up to a second."""
        ...


async def run_load(
    running: Running, requests: Sequence[PlannedRequest], concurrency: int | None
) -> RunStatistics:
    """Send all requests, at most `concurrency` at a time; None: each when it is due."""
    exchanges, start_ns = await exchange_all(running.send, requests, concurrency)
    return summarize([record_of(each, running.read(each)) for each in exchanges], start_ns)
