"""Summary of a server that is ready: addresses, models, memory, and a first request to copy."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from loraplex.core.byte_sizes import readable_bytes
from loraplex.core.config import ModelConfig
from loraplex.core.server_config import ServerConfig
from loraplex.core.version import __version__
from loraplex.serving.model_memory import ModelMemory
from loraplex.serving.served_model import ServedModel

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
        yield (
            "adapters",
            f"{_named(names)}; {fit.more} more of rank {fit.rank} fit on the device at once",
        )


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


def _request(model: ServedModel, url: str, settings: ServerConfig, *, has_keys: bool) -> str:
    """Return a curl command for the first adapter, or the base model without one."""
    name = next((name for name, _ in model.adapter_names()), model.card.name)
    body: dict[str, object] = {"model": name, "max_tokens": 32}
    if settings.dialect != "openai":  # llgtrt's clients name the adapter in a field of its own
        body["model"] = model.card.name
        if model.config.lora_root and name != model.card.name:
            body["lora_model"] = name
    text = "Hello"
    if model.chats.text:
        route, body["messages"] = "chat/completions", [{"role": "user", "content": text}]
    else:
        route, body["prompt"] = "completions", text
    key = '-H "Authorization: Bearer $LORAPLEX_API_KEY" ' if has_keys else ""
    data = json.dumps(body, ensure_ascii=False).replace("'", "'\\''")
    return f"curl {url}/v1/{route} {key}-H 'Content-Type: application/json' -d '{data}'"
