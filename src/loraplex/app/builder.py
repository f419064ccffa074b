"""Builds serving from a Config: which classes, with which arguments. It starts nothing."""

import tempfile
import time
from pathlib import Path

import msgspec

from loraplex.adapters.formats.modules import hf_modules
from loraplex.adapters.shapes import BaseShapes
from loraplex.adapters.sources.policy import client_policy
from loraplex.adapters.staging import StagingWorker
from loraplex.adapters.store import AdapterStore
from loraplex.app.launch import EngineLauncher
from loraplex.core.clock import Clock, SystemClock
from loraplex.core.config import Config, ModelConfig
from loraplex.core.environment import state_directory
from loraplex.core.errors import ConfigError
from loraplex.models.config import DecoderConfig
from loraplex.models.layer_linears import biased_modules, module_shapes
from loraplex.models.registry import read_config
from loraplex.serving.backend import ModelCard
from loraplex.serving.engines.async_engine import AsyncEngine
from loraplex.serving.engines.request_fates import Patience
from loraplex.serving.request_metrics import RequestMetrics
from loraplex.serving.served_model import ServedModel
from loraplex.serving.service import Service
from loraplex.serving.text.chat_template import ChatTemplate
from loraplex.text.tokenizer import Tokenizer, load_tokenizer


def build_service(config: Config, launch: EngineLauncher, metrics: RequestMetrics) -> Service:
    """Everything but what is running, from a configuration with local paths. Raises ConfigError.

    It holds the state directory until the service is closed.
    """
    clock, policy = SystemClock(), client_policy(config)
    state_dir = _made(state_directory(config.server.state_dir))
    persists = config.server.persist_adapters
    store = AdapterStore.open(state_dir) if persists else AdapterStore.in_memory(state_dir)
    try:
        models = [
            _served_model(name, model, store, _engine(name, model, launch, clock))
            for name, model in config.models.items()
        ]
    except BaseException:
        store.close()
        raise
    worker = StagingWorker(state_dir, policy=policy)
    return Service(models, worker, metrics, clock, config.server.adapter_watch_seconds)


def _served_model(
    name: str, model: ModelConfig, store: AdapterStore, engine: AsyncEngine
) -> ServedModel:
    folder = Path(model.path)
    decoder = read_config(folder)
    tokenizer_folder = Path(model.tokenizer or folder)
    tokenizer = load_tokenizer(tokenizer_folder)
    eos_token_ids = decoder.eos_token_ids
    if not eos_token_ids and tokenizer.eos_token_id is not None:
        eos_token_ids = (tokenizer.eos_token_id,)
    dtype = (decoder.dtype or "float32") if model.dtype == "auto" else model.dtype
    card = ModelCard(
        name=name,
        path=str(folder),
        created=int(time.time()),
        max_model_len=_max_model_len(name, model, decoder),
        max_input_len=model.max_input_len,
        vocab_size=decoder.vocab_size,
        eos_token_id=eos_token_ids[0] if eos_token_ids else None,
        pad_token_id=tokenizer.pad_token_id,
        dtype=dtype,
        kv_dtype=dtype if model.kv_dtype == "auto" else model.kv_dtype,
        kv_block_size=model.block_size,
    )
    return ServedModel(
        card=card,
        tokenizer=tokenizer,
        chat_template=_chat_template(tokenizer_folder, model.chat_template, tokenizer),
        eos_token_ids=eos_token_ids,
        shapes=served_shapes(decoder, model),
        config=model,
        store=store,
        engine=engine,
    )


def _engine(name: str, model: ModelConfig, launch: EngineLauncher, clock: Clock) -> AsyncEngine:
    return AsyncEngine(
        name,
        launch(model),
        clock,
        num_steps_kept=model.iter_stats_max_iterations,
        patience=Patience(model.engine_restart_seconds, model.engine_wait_seconds),
    )


def served_shapes(config: DecoderConfig, model: ModelConfig) -> BaseShapes:
    """With what the operator lets adapters change. Raises ConfigError for an unknown module."""
    shapes = base_shapes(config)
    if not model.enable_lora:
        return msgspec.structs.replace(shapes, enabled_modules=())
    if not model.lora_target_modules:
        return shapes
    enabled = hf_modules(model.lora_target_modules, shapes.modules)
    return msgspec.structs.replace(shapes, enabled_modules=enabled)


def base_shapes(config: DecoderConfig) -> BaseShapes:
    return BaseShapes(
        config.num_layers,
        dict(module_shapes(config)),
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        biased_modules=biased_modules(config),
        ties_embeddings=config.tie_word_embeddings,
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
