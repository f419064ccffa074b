"""What the log reports to an operator: the summary of a server that is ready (addresses, models,
memory, and a first request to copy), loading, draining and throughput.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from loraplex.app.serving_process import alongside
from loraplex.core.byte_sizes import readable_bytes
from loraplex.core.config import ModelConfig
from loraplex.core.counts import counted
from loraplex.core.server_config import ServerConfig
from loraplex.core.stats import EngineStats
from loraplex.core.version import __version__
from loraplex.serving.access.tenant_adapters import LeftOut
from loraplex.serving.draining import DrainReport
from loraplex.serving.model_memory import ModelMemory
from loraplex.serving.served_model import ServedModel

logger = logging.getLogger(__name__)


_MAX_NAMES: Final = 5
"""Maximum number of adapters that are named."""
_EVERY_ADDRESS: Final = ("0.0.0.0", "::", "")
_WIDTH: Final = 9


def banner(
    models: Sequence[ServedModel],
    settings: ServerConfig,
    ports: Mapping[str, int],
    *,
    has_keys: bool,
) -> str:
    """Return the lines. ports: numbers of the open ports by kind: http, grpc, metrics."""
    rows = [
        *_addresses(settings, ports, has_keys=has_keys),
        *(row for model in models for row in _model(model)),
        *([] if models else [("model", "none is loaded yet: clients load them")]),
    ]
    lines = [f"  {title:{_WIDTH}} {text}" for title, text in rows]
    if models and "http" in ports:
        url = _url(settings, ports["http"])
        lines.append(f"  {'try':{_WIDTH}} {_request(models[0], url, settings, has_keys=has_keys)}")
    return "\n".join([f"loraplex {__version__} is ready", *lines])


def _addresses(
    settings: ServerConfig, ports: Mapping[str, int], *, has_keys: bool
) -> Iterator[tuple[str, str]]:
    if "http" in ports:
        url = _url(settings, ports["http"])
        yield "OpenAI", f"{url}/v1"
        yield "Triton", f"{url}/v2" + (f", gRPC on port {ports['grpc']}" if "grpc" in ports else "")
        if settings.has_console(has_keys=has_keys):
            yield "console", f"{url}/console/"
    elif "grpc" in ports:
        yield "Triton", f"gRPC on port {ports['grpc']}"
    if "metrics" in ports:
        yield "metrics", f"{_url(settings, ports['metrics'])}/metrics"


def _url(settings: ServerConfig, port: int) -> str:
    host = "127.0.0.1" if settings.host in _EVERY_ADDRESS else settings.host
    scheme = "https" if settings.tls_cert else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def _model(model: ServedModel) -> Iterator[tuple[str, str]]:
    memory, card = model.memory(), model.card
    yield (
        "model",
        f"{card.name} on {model.config.device}, {card.dtype}: weights "
        f"{readable_bytes(memory.weights_bytes)}, KV cache {readable_bytes(memory.kv.num_bytes)} "
        f"({memory.kv.tokens} tokens)",
    )
    yield "memory", _limit(model.config, memory)
    yield (
        "steps",
        f"at most {memory.max_num_seqs} sequences and {memory.max_num_batched_tokens} tokens",
    )
    if model.config.enable_lora:
        names = [name for name, _ in model.adapter_names()]
        fit = memory.device.fits[0]
        known = _named(names) + _left_out(model.left_out)
        yield "adapters", f"{known}; {fit.more} more of rank {fit.rank} fit on the device at once"


def _limit(config: ModelConfig, memory: ModelMemory) -> str:
    if config.memory_bytes is not None:
        return f"at most {readable_bytes(config.memory_bytes)}"
    if memory.accelerator is not None:
        return f"all {readable_bytes(memory.accelerator.total)} of the device; --memory limits it"
    return "no limit; --memory sets one"


def _named(names: Sequence[str]) -> str:
    if not names:
        return "none yet"
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return f"{len(names)}: {', '.join(names[:_MAX_NAMES])}{more}"


def _left_out(entries: Sequence[LeftOut]) -> str:
    """Return how many entries of folders are not served, by kind. The log has each reason."""
    if not entries:
        return ""
    num_links = sum(entry.is_link for entry in entries)
    kinds = [counted(num_links, "symbolic link")] if num_links else []
    if others := len(entries) - num_links:
        kinds.append(counted(others, "other entry", "other entries") if kinds else str(others))
    return f"; left out: {', '.join(kinds)} (see the warnings)"


def _request(model: ServedModel, url: str, settings: ServerConfig, *, has_keys: bool) -> str:
    """Return a curl command for the first adapter, or the base model without one."""
    name = next((name for name, _ in model.adapter_names()), model.card.name)
    body: dict[str, object] = {"model": name, "max_tokens": 32}
    if settings.dialect != "openai":  # llgtrt's clients name the adapter in a field of its own
        body["model"] = model.card.name
        if model.config.lora_root and name != model.card.name:
            body["lora_model"] = name
    text = "What is the capital of France?"
    if model.chats.text:
        route, body["messages"] = "chat/completions", [{"role": "user", "content": text}]
    else:
        route, body["prompt"] = "completions", text
    key = '-H "Authorization: Bearer $LORAPLEX_API_KEY" ' if has_keys else ""
    data = json.dumps(body, ensure_ascii=False).replace("'", "'\\''")
    return f"curl {url}/v1/{route} {key}-H 'Content-Type: application/json' -d '{data}'"


_PROGRESS_SECONDS: Final = 5.0
_THROUGHPUT_SECONDS: Final = 10.0

Stats = Callable[[], Mapping[str, EngineStats]]
"""Returns the present numbers of each model's engine."""


@alongside
async def logging_progress(seconds: float = _PROGRESS_SECONDS) -> None:
    """Log every few seconds that the server is still loading."""
    passed = 0.0
    while True:
        await asyncio.sleep(seconds)
        passed += seconds
        logger.info("still loading, %.0f s so far", passed)


@alongside
async def logging_throughput(stats: Stats, seconds: float = _THROUGHPUT_SECONDS) -> None:
    """Log the throughput of each model that had work, every few seconds."""
    before = stats()
    while True:
        await asyncio.sleep(seconds)
        now = stats()
        for model, present in now.items():
            if line := throughput(model, before.get(model, EngineStats()), present, seconds):
                logger.info("%s", line)
        before = now


@alongside
async def logging_drain(
    report: Callable[[], DrainReport], seconds: float = _PROGRESS_SECONDS
) -> None:
    """Log every few seconds what a server that stops waits for."""
    while True:
        await asyncio.sleep(seconds)
        now = report()
        logger.info(
            "still stopping: %s %.0f s left",
            counted(now.in_work, "in-flight prompt has", "in-flight prompts have"),
            now.seconds_left or 0.0,
        )


def throughput(model: str, before: EngineStats, now: EngineStats, seconds: float) -> str:
    """Return a line for the time between two snapshots; empty without work."""
    # The counters of an engine that was started again begin at 0.
    prompt = max(now.prompt_tokens - before.prompt_tokens, 0)
    output = max(now.generation_tokens - before.generation_tokens, 0)
    cached = max(now.cached_tokens - before.cached_tokens, 0)
    if not (prompt or output or now.num_running or now.num_waiting):
        return ""
    hits = f", {cached / prompt:.0%} of the prompt tokens cached" if prompt else ""
    return (
        f"{model}: {prompt / seconds:.1f} prompt and {output / seconds:.1f} output tokens/s; "
        f"{now.num_running} running, {now.num_waiting} waiting; KV cache {now.kv_usage:.0%} used"
        f"{hits}; {now.adapters.num_on_device} adapters on the device"
    )
