"""Builds serving from a Config: which classes, with which arguments. It starts nothing."""

import logging
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

import msgspec

from loraplex.adapters.declaration_places import open_place
from loraplex.adapters.earlier_state import adopt_state
from loraplex.adapters.formats.modules import hf_modules
from loraplex.adapters.shapes import BaseShapes, LayerShapes
from loraplex.adapters.shared_declarations import SharedDeclarations
from loraplex.adapters.sources.policy import client_policy
from loraplex.adapters.staging import StagingWorker
from loraplex.adapters.state_models import note_models, states_elsewhere
from loraplex.adapters.store import AdapterStore
from loraplex.adapters.uploads import UploadLimits, Uploads
from loraplex.core.adapter import EMBEDDING, LM_HEAD, ExpertLoraLayout
from loraplex.core.clock import Clock, SystemClock
from loraplex.core.config import Config, ModelConfig
from loraplex.core.errors import ConfigError
from loraplex.core.server_config import ServerConfig
from loraplex.core.state_places import state_place, state_root
from loraplex.core.weight_precision import WeightPrecision
from loraplex.execution.weights.stored_head import read_model
from loraplex.models.class_format import read_class_format
from loraplex.models.engine_folder import model_fields
from loraplex.models.family_config import QKV_PARTS
from loraplex.models.score_config import read_score_format
from loraplex.models.sentence_transformers import read_vector_format
from loraplex.models.spec import LayerSpec, ModelSpec
from loraplex.serving.backend import EncoderFormat, ModelCard
from loraplex.serving.engines.async_engine import AsyncEngine
from loraplex.serving.engines.engine_watchdog import EngineWatchdog, StepLimits
from loraplex.serving.engines.link import EngineLauncher
from loraplex.serving.engines.restart_limits import RestartLimits
from loraplex.serving.local_texts import ChatRenderer, LocalTexts
from loraplex.serving.request_metrics import RequestMetrics
from loraplex.serving.response_memory import ResponseMemory
from loraplex.serving.served_model import ServedModel
from loraplex.serving.service import Service
from loraplex.serving.text.chat_format import chat_format
from loraplex.serving.text.chat_template_files import find_templates
from loraplex.text.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)

_CPU_STEP_SECONDS: Final = 10.0
_GPU_STEP_SECONDS: Final = 120.0
"""Least derived limits of a step: on a GPU the first step of a new shape compiles kernels."""
_TEMPLATE: Final = "chat_template"
_JSON_INDENTS: Final = MappingProxyType({"llgtrt_compat": 4})
"""Indent of `tojson` in chat templates that set none, by dialect."""


def build_service(
    config: Config, launch: EngineLauncher, metrics: RequestMetrics, *, has_keys: bool = False
) -> Service:
    """Build the service without starting it, from a configuration with local paths.

    has_keys: API keys distinguish clients. The service locks the state directory until it is
    closed. Raises ConfigError.
    """
    root, state_dir = state_root(config), _made(state_place(config))
    clock, policy = SystemClock(), client_policy(config, root, has_keys=has_keys)
    declarations = _declarations(config.server)
    persists = config.server.persist_adapters
    if persists and state_dir != root:
        adopt_state(root, state_dir)
    store = AdapterStore.open(state_dir) if persists else AdapterStore.in_memory(state_dir)
    json_indent = _JSON_INDENTS.get(config.server.dialect)

    def build(name: str, model: ModelConfig) -> ServedModel:
        return _served_model(name, model, store, _engine(name, model, launch, clock), json_indent)

    if persists:
        note_state(state_dir, store, {name: model.path for name, model in config.models.items()})
    try:
        models = [build(name, model) for name, model in config.models.items()]
        uploads = _uploads(config.server, state_dir, clock)
    except BaseException:
        store.close()
        raise
    worker = StagingWorker(
        state_dir,
        policy=policy,
        timeout_seconds=config.server.adapter_load_seconds,
        num_workers=config.server.staging_workers,
        has_tenants=has_keys,
    )
    return Service(
        models,
        worker,
        metrics,
        clock,
        config.server.adapter_watch_seconds,
        build,
        declarations,
        uploads,
        ResponseMemory.of(config.server, has_keys=has_keys),
    )


def note_state(state_dir: Path, store: AdapterStore, models: Mapping[str, str]) -> None:
    """Note the models of a state directory. Log where the state of a moved model is, if this one
    has no adapters. models: local folders by name."""
    try:
        noted = note_models(state_dir, models)
        if any(store.present(name) for name in models):
            return
        for other in states_elsewhere(state_dir, noted):
            name = "" if other.model.name in models else f" --name {other.model.name}"
            logger.warning(
                "no adapters are stored for %s, but the state %s has adapters of %s, which was at "
                "%s; to take them over, start the server with --state-dir %s%s",
                *(", ".join(model.path for model in noted), other.folder),
                "the same model" if other.is_same_content else "another model of this place",
                *(other.model.path, other.folder, name),
            )
    except OSError as error:
        logger.warning("the models of the state %s are not noted: %s", state_dir, error.strerror)


def _uploads(server: ServerConfig, state_dir: Path, clock: Clock) -> Uploads | None:
    if not server.uploads:
        return None
    if server.adapter_declarations:
        raise ConfigError(
            "uploads and adapter_declarations exclude each other: other servers cannot read what "
            "one of them received"
        )
    limits = UploadLimits(
        max_bytes=server.max_adapter_bytes,
        max_tenant_bytes=server.upload_bytes,
        max_uploads=server.max_uploads,
        max_seconds=server.upload_seconds,
    )
    return Uploads(state_dir / "uploads", limits, clock)


def _declarations(server: ServerConfig) -> SharedDeclarations | None:
    url = server.adapter_declarations
    if not url:
        return None
    return SharedDeclarations(open_place(url), url, server.max_adapter_declarations)


def build_texts(config: Config) -> dict[str, LocalTexts]:
    """Build the texts of all models, for a process without engines. Raises ConfigError."""
    json_indent = _JSON_INDENTS.get(config.server.dialect)
    return {
        name: _texts(name, model, read_model(Path(model.path)), json_indent)
        for name, model in config.models.items()
    }


def _served_model(
    name: str,
    model: ModelConfig,
    store: AdapterStore,
    engine: AsyncEngine,
    json_indent: int | None,
) -> ServedModel:
    decoder = read_model(Path(model.path))
    texts = _texts(name, model, decoder, json_indent)
    ends = _eos_token_ids(decoder, texts.tokenizer, model.tokenizer_config)
    shown = ", ".join(f"{texts.tokenizer.token_text(end)!r} ({end})" for end in ends)
    logger.info("outputs of model %r end at: %s", name, shown or "no token")
    return ServedModel(
        card=texts.card,
        tokenizer=texts.tokenizer,
        chats=texts.chats,
        eos_token_ids=ends,
        shapes=served_shapes(decoder, model),
        config=model,
        store=store,
        engine=engine,
    )


def _texts(
    name: str, model: ModelConfig, decoder: ModelSpec, json_indent: int | None
) -> LocalTexts:
    folder = Path(model.path)
    tokenizer_folder = Path(model.tokenizer or folder)
    tokenizer = load_tokenizer(tokenizer_folder, model.tokenizer_config)
    eos_token_ids = _eos_token_ids(decoder, tokenizer, model.tokenizer_config)
    dtype = (decoder.dtype or "float32") if model.dtype == "auto" else model.dtype
    chats = _chat_renderer(tokenizer_folder, model, tokenizer, json_indent)
    classes = read_class_format(folder, model_fields(folder), decoder)
    card = ModelCard(
        name=name,
        served_names=tuple(other for other in dict.fromkeys(model.served_names) if other != name),
        path=str(folder),
        created=int(time.time()),
        max_model_len=_max_model_len(name, model, decoder),
        max_input_len=model.max_input_len,
        vocab_size=decoder.vocab_size,
        eos_token_id=eos_token_ids[0] if eos_token_ids else None,
        pad_token_id=tokenizer.pad_token_id,
        dtype=dtype,
        kv_dtype=dtype if model.kv_dtype == "auto" else model.kv_dtype,
        device=model.device,
        quantization=_quantization(model, decoder),
        kv_block_size=model.block_size,
        has_chat_template=chats.has_templates,
        chat=chat_format(
            chats.text,
            tokenizer,
            tool_calls=model.tool_call_parser,
            reasoning=model.reasoning_parser,
        ),
        generates=decoder.has_lm_head,
        vectors=read_vector_format(folder),
        classes=classes,
        encoder=None
        if decoder.encoder is None
        else EncoderFormat(
            decoder.encoder.longest_input, decoder.encoder.first_ids, decoder.encoder.never_ids
        ),
        scores=read_score_format(
            folder,
            model.score_config,
            lambda text: tokenizer.encode(text, False),
            num_labels=classes.num_labels,
            generates=decoder.has_lm_head,
            renders=model.chat_template is not None,
        ),
    )
    return LocalTexts(card, tokenizer, chats)


def _quantization(model: ModelConfig, decoder: ModelSpec) -> str | None:
    if decoder.stored_format is not None:
        return decoder.stored_format.method
    return None if model.quantization == WeightPrecision.NATIVE else model.quantization


def _engine(name: str, model: ModelConfig, launch: EngineLauncher, clock: Clock) -> AsyncEngine:
    is_cpu = model.device.startswith("cpu")
    limits = StepLimits(
        model.step_timeout_seconds,
        model.engine_start_seconds,
        _CPU_STEP_SECONDS if is_cpu else _GPU_STEP_SECONDS,
    )
    return AsyncEngine(
        name,
        launch(model),
        clock,
        num_steps_kept=model.iter_stats_max_iterations,
        patience=RestartLimits(model.engine_restart_seconds, model.engine_wait_seconds),
        watchdog=EngineWatchdog(clock, limits),
    )


def served_shapes(config: ModelSpec, model: ModelConfig) -> BaseShapes:
    """Return the shapes of the modules that adapters may change. Raises ConfigError for an unknown
    module."""
    layout = tuple(map(ExpertLoraLayout, model.expert_lora_layout))
    shapes = msgspec.structs.replace(base_shapes(config), expert_lora_layout=layout)
    if not model.enable_lora:
        return msgspec.structs.replace(shapes, enabled_modules=())
    if not model.lora_target_modules:
        return shapes
    # A name of a module that has another path in some layers means each of them.
    enabled = dict.fromkeys(
        module
        for form in shapes.layer_forms
        for module in hf_modules(model.lora_target_modules, shapes.modules, form.paths)
    )
    return msgspec.structs.replace(shapes, enabled_modules=tuple(enabled))


def base_shapes(config: ModelSpec) -> BaseShapes:
    layers = [
        _layer_shapes(config, index, layer) for index, layer in enumerate(config.adapted_layers)
    ]
    first: dict[str, LayerShapes] = {}
    for layer in layers:
        for module in layer.modules:
            first.setdefault(module, layer)
    usual = _joined(first)
    having = {
        module: tuple(index for index, layer in enumerate(layers) if module in layer.modules)
        for module in first
    }
    without_kv = tuple(
        index
        for index, layer in enumerate(config.layers)
        if any(mixer.kv_distance for mixer in layer.mixers)
    )
    return BaseShapes(
        len(layers),
        usual.modules,
        num_experts=usual.num_experts,
        module_layers={
            module: owners for module, owners in having.items() if len(owners) < len(layers)
        },
        unread_layers=dict.fromkeys(QKV_PARTS[1:], without_kv) if without_kv else {},
        own_layers={
            index: layer
            for index, layer in enumerate(layers)
            if layer != _joined({module: first[module] for module in layer.modules})
        },
        has_transposed_experts=any(one.is_transposed for one in config.names.experts.stacked),
        has_interleaved_experts=any(one.is_interleaved for one in config.names.experts.stacked),
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        biased_modules=usual.biased_modules + (LM_HEAD,) * config.has_lm_head_bias,
        adapts_ends=(
            config.embedding_size is None and config.has_lm_head and not config.has_unit_lm_head
        ),
        score_size=config.embedding_size or config.hidden_size,
        paths=usual.paths,
        end_paths={
            EMBEDDING: config.names.outer_paths(config.names.embedding),
            LM_HEAD: config.names.outer_paths(config.names.lm_head),
        },
        fused=usual.fused,
        ties_embeddings=config.tie_word_embeddings,
        architecture=config.architecture,
        head_dim=usual.head_dim,
        split_heads=usual.split_heads,
        num_key_heads=max(
            (group.num_key_heads for layer in config.layers for group in layer.linears.values()),
            default=0,
        ),
        stored_format="" if config.stored_format is None else config.stored_format.method,
    )


def _layer_shapes(config: ModelSpec, index: int, layer: LayerSpec) -> LayerShapes:
    prefixes = {config.names.layer(index): config.names.layer("{}")}
    if config.encoder is not None:
        prefix = config.encoder.layer_prefix
        prefixes[prefix.format(index)] = prefix
    groups = layer.linears.values()
    head_dims = (group.head_dim or 1 for group in groups if not group.num_key_heads)
    return LayerShapes(
        modules=dict(layer.module_shapes),
        num_experts=dict(layer.num_experts),
        biased_modules=layer.biased_modules,
        paths={
            module: next(
                (
                    other + path[len(own) :]
                    for own, other in prefixes.items()
                    if path.startswith(own)
                ),
                path,
            )
            for module, path in layer.module_paths.items()
        },
        fused={module: dict(parts) for module, parts in layer.fused_modules.items()},
        head_dim=max(head_dims, default=1),
        split_heads={
            module: group.num_split_heads
            for group in groups
            if group.num_split_heads
            for module in group.modules
        },
    )


def _joined(owners: Mapping[str, LayerShapes]) -> LayerShapes:
    """Return each module as the layer has it that is given for it."""
    return LayerShapes(
        modules={module: layer.modules[module] for module, layer in owners.items()},
        num_experts={
            module: layer.num_experts[module]
            for module, layer in owners.items()
            if module in layer.num_experts
        },
        biased_modules=tuple(
            module for module, layer in owners.items() if module in layer.biased_modules
        ),
        paths={module: layer.paths[module] for module, layer in owners.items()},
        fused={
            module: layer.fused[module] for module, layer in owners.items() if module in layer.fused
        },
        head_dim=max((layer.head_dim for layer in owners.values()), default=1),
        split_heads={
            module: layer.split_heads[module]
            for module, layer in owners.items()
            if module in layer.split_heads
        },
    )


def _made(folder: Path) -> Path:
    """Create the state directory, and check that it is writable. Raises ConfigError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise ConfigError(f"cannot write to state_dir {folder}: {error.strerror}") from error


def _eos_token_ids(
    decoder: ModelSpec, tokenizer: Tokenizer, overrides: Mapping[str, object]
) -> tuple[int, ...]:
    """Return the model's end tokens and the tokenizer's; one in tokenizer_config wins."""
    named, own = overrides.get("eos_token"), tokenizer.eos_token_id
    if named is not None:
        if own is None:
            raise ConfigError(f"tokenizer_config.eos_token must be one token, got {named!r}")
        return (own,)
    # A fine-tune may name its end of turn in the tokenizer's files alone. One that a model without
    # its embedding cannot write counts for nothing.
    of_tokenizer = () if own is None or own >= decoder.vocab_size else (own,)
    return tuple(dict.fromkeys((*decoder.eos_token_ids, *of_tokenizer)))


def _chat_renderer(
    folder: Path, model: ModelConfig, tokenizer: Tokenizer, json_indent: int | None
) -> ChatRenderer:
    templates, source = _templates(folder, model)
    return ChatRenderer(templates, tokenizer.special_tokens, source=source, json_indent=json_indent)


def _templates(folder: Path, model: ModelConfig) -> tuple[Mapping[str, str], str]:
    """Return templates by name, and their source: a file of the settings, the settings, or the
    folder."""
    if model.chat_template is not None:
        return {"default": _text_of(model.chat_template)}, model.chat_template
    if _TEMPLATE not in model.tokenizer_config:
        return find_templates(folder), f"the chat template of {folder}"
    text = model.tokenizer_config[_TEMPLATE]
    if not isinstance(text, str | None):
        raise ConfigError(f"tokenizer_config.{_TEMPLATE} must be a text or null, got {text!r}")
    return {} if text is None else {"default": text}, f"tokenizer_config.{_TEMPLATE}"


def _text_of(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read chat_template {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"chat_template {path} is not UTF-8: {error.reason}") from error


def _max_model_len(name: str, model: ModelConfig, decoder: ModelSpec) -> int:
    longest = decoder.default_max_model_len
    if model.max_model_len is None:
        return longest
    if model.max_model_len > longest:
        raise ConfigError(
            f"max_model_len {model.max_model_len} is more than the {longest} that model {name!r} "
            f"was made for{': ' + decoder.length_reason if decoder.length_reason else ''}"
        )
    return model.max_model_len
