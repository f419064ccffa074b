"""Builds serving from a Config: which classes, with which arguments. It starts nothing."""

import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from loraplex.adapters.shapes import BaseShapes
from loraplex.adapters.staging import StagingWorker
from loraplex.adapters.store import AdapterStore
from loraplex.core.clock import SystemClock
from loraplex.core.config import Config, ModelConfig, state_directory
from loraplex.core.errors import ConfigError
from loraplex.execution.checkpoint import resolve_model
from loraplex.models.config import DecoderConfig, module_shapes
from loraplex.models.registry import read_config
from loraplex.serving.adapter_loading import AdapterLoading
from loraplex.serving.async_engine import AsyncEngine
from loraplex.serving.backend import ModelCard
from loraplex.serving.chat_template import ChatTemplate
from loraplex.serving.engine_link import EngineLink, LinkFactory, ProcessLink
from loraplex.serving.request_metrics import RequestMetrics
from loraplex.serving.served_model import ServedModel
from loraplex.serving.service import Service
from loraplex.serving.tokenizer import Tokenizer, load_tokenizer

EngineLauncher = Callable[[ModelConfig], LinkFactory]
"""Where a model's engine runs: in a process of its own, or in a thread."""


def engine_process(model: ModelConfig) -> LinkFactory:
    """The engine runs in its own process."""
    command = [sys.executable, "-m", "loraplex.app.engine"]
    settings = msgspec.msgpack.encode(model)

    def start(epoch: int) -> Awaitable[EngineLink]:
        return ProcessLink.start(command, settings, epoch)

    return start


def with_local_paths(config: Config) -> Config:
    """The same, with every model in a folder here; a hub id is downloaded. Raises ConfigError."""
    models = {
        name: msgspec.structs.replace(model, path=str(resolve_model(model.path, model.revision)))
        for name, model in config.models.items()
    }
    return msgspec.structs.replace(config, models=models)


def build_service(config: Config, launch: EngineLauncher, metrics: RequestMetrics) -> Service:
    """Everything but what is running, from a configuration with local paths. Raises ConfigError."""
    clock = SystemClock()
    store = AdapterStore()
    models = [
        _served_model(name, model, store, AsyncEngine(name, launch(model), clock))
        for name, model in config.models.items()
    ]
    worker = StagingWorker(_made(state_directory(config.server.state_dir)))
    return Service(models, AdapterLoading(worker), metrics, clock)


def _served_model(
    name: str, model: ModelConfig, store: AdapterStore, engine: AsyncEngine
) -> ServedModel:
    folder = Path(model.path)
    decoder = read_config(folder)
    tokenizer = load_tokenizer(folder)
    eos_token_ids = decoder.eos_token_ids
    if not eos_token_ids and tokenizer.eos_token_id is not None:
        eos_token_ids = (tokenizer.eos_token_id,)
    card = ModelCard(
        name=name,
        path=str(folder),
        created=int(time.time()),
        max_model_len=_max_model_len(name, model, decoder),
        vocab_size=decoder.vocab_size,
        eos_token_id=eos_token_ids[0] if eos_token_ids else None,
        pad_token_id=tokenizer.pad_token_id,
        dtype=(decoder.dtype or "float32") if model.dtype == "auto" else model.dtype,
    )
    return ServedModel(
        card=card,
        tokenizer=tokenizer,
        chat_template=_chat_template(folder, model.chat_template, tokenizer),
        eos_token_ids=eos_token_ids,
        shapes=BaseShapes(decoder.num_layers, dict(module_shapes(decoder))),
        config=model,
        store=store,
        engine=engine,
    )


def _made(folder: Path) -> Path:
    """The state directory, there and writable. Raises ConfigError: better now than at a load."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise ConfigError(f"cannot write to state_dir {folder}: {error.strerror}") from error


def _chat_template(folder: Path, replacement: str | None, tokenizer: Tokenizer) -> ChatTemplate:
    if replacement is None:
        return ChatTemplate.load(folder, tokenizer.special_tokens)
    try:
        text = Path(replacement).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read chat_template {replacement}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"chat_template {replacement} is not UTF-8: {error.reason}") from error
    return ChatTemplate({"default": text}, tokenizer.special_tokens, source=replacement)


def _max_model_len(name: str, model: ModelConfig, decoder: DecoderConfig) -> int:
    longest = decoder.default_max_model_len
    if model.max_model_len is None:
        return longest
    if model.max_model_len > longest:
        raise ConfigError(
            f"max_model_len {model.max_model_len} is more than the {longest} that model {name!r} "
            "was made for"
        )
    return model.max_model_len
