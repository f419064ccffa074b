"""Checks before anything is loaded: a mistake in the configuration is reported within a second.

Each of them is made again where the checked thing is used. This file must stay light: it imports
neither torch nor the web stack.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from loraplex.adapters.sources.reference import SourceKind, parse
from loraplex.adapters.state_files import StateLock
from loraplex.app.serving_process import bind
from loraplex.core.byte_sizes import readable_bytes
from loraplex.core.config import Config, ModelConfig
from loraplex.core.devices import check_cuda, has_gpu, torch_version_file
from loraplex.core.errors import ConfigError, InvalidAdapterError
from loraplex.core.server_config import ServerConfig
from loraplex.core.state_places import state_place
from loraplex.core.weight_precision import WeightPrecision
from loraplex.execution.weights.hub import model_here
from loraplex.execution.weights.near_paths import check_exists
from loraplex.models.registry import read_config
from loraplex.models.spec import ModelSpec
from loraplex.models.stored_format import refuse_second_quantization

_BITS: Final = {"float32": 32, "float16": 16, "bfloat16": 16}
_QUANTIZED_BITS: Final = {
    WeightPrecision.INT8: 8,
    WeightPrecision.INT4: 4,
    WeightPrecision.FP8: 8,
}


def check_start(config: Config) -> None:
    """Check what needs no model: ports, the state directory, devices, paths. Raises ConfigError."""
    for model in config.models.values():
        _check_paths(model)
        _check_device(model)
    _check_ports(config.server)
    place = state_place(config)
    # A default place that does not exist is in use by no server: it is made once the model is
    # found, so that a mistyped model creates no state folder.
    if config.server.persist_adapters and (config.server.state_dir or place.exists()):
        StateLock.own(place).close()


def _check_paths(model: ModelConfig) -> None:
    model_here(model.path)
    for folder in (*model.adapter_dirs, model.lora_root or ""):
        if folder:
            check_exists(folder, "folder of adapters")
    for file, what in ((model.multi_lora, "multi_lora"), (model.chat_template, "chat_template")):
        if file:
            check_exists(file, what)
    for name, adapter in model.adapters.items():
        if adapter.optional:
            continue
        try:
            reference = parse(adapter.path)
            if reference.kind is SourceKind.LOCAL:
                check_exists(reference.location, "adapter")
        except (ConfigError, InvalidAdapterError) as error:
            raise ConfigError(f"adapter {name!r}: {error.message}") from error


def _check_device(model: ModelConfig) -> None:
    """Raise ConfigError for a GPU that is certainly not here; Ray may take one elsewhere."""
    if model.device.startswith("cuda") and model.executor != "ray":
        check_cuda(model.device, torch_version_file(), has_gpu=has_gpu())


def _check_ports(server: ServerConfig) -> None:
    ports = [
        (server.http, server.http_port),
        (server.metrics, server.metrics_port),
        (server.grpc, server.grpc_port),
    ]
    with contextlib.ExitStack() as stack:
        # All at once, so that two of the settings cannot name the same port.
        for is_used, port in ports:
            if is_used and port:
                stack.enter_context(contextlib.closing(bind(server.host, port)))


def check_memory(config: Config) -> None:
    """Check that memory_bytes holds the weights, by config.json. Raises ConfigError.

    config: with local paths. Models on several ranks are left to the ranks.
    """
    for model in config.models.values():
        is_alone = model.tensor_parallel_size * model.pipeline_parallel_size == 1
        if model.memory_bytes is not None and is_alone:
            check_weights_fit(model, read_config(Path(model.path)), model.memory_bytes)


def check_weights_fit(model: ModelConfig, spec: ModelSpec, memory_bytes: int) -> None:
    """Raise ConfigError with a remedy if the weights certainly take more than memory_bytes."""
    refuse_second_quantization(spec.stored_format, WeightPrecision(model.quantization))
    sizes = dict(_sizes(model, spec))
    present = sizes.pop(WeightPrecision(model.quantization))
    if present < memory_bytes:
        return
    raise ConfigError(
        f"the weights take {readable_bytes(present)}, and memory_bytes is "
        f"{readable_bytes(memory_bytes)}: raise --memory{_smaller(sizes, present)}",
        param="memory_bytes",
    )


def _smaller(sizes: dict[WeightPrecision, int], present: int) -> str:
    choices = " or ".join(
        f"{precision} (about {readable_bytes(size)})"
        for precision, size in sizes.items()
        if precision is not WeightPrecision.FP8 and size < present
    )
    return f", or use --quantization {choices}" if choices else ""


def _sizes(model: ModelConfig, spec: ModelSpec) -> Iterator[tuple[WeightPrecision, int]]:
    """Yield the least size of the weights by precision: linear layers and embedding alone."""
    dtype = (spec.dtype or "float32") if model.dtype == "auto" else model.dtype
    num_linear = sum(
        inputs * outputs * layer.num_experts.get(module, 1)
        for layer in spec.adapted_layers
        for module, (inputs, outputs) in layer.module_shapes.items()
    )
    num_ends = spec.vocab_size * (spec.embedding_size or spec.hidden_size)
    for precision in WeightPrecision if spec.stored_format is None else [WeightPrecision.NATIVE]:
        bits = _stored_bits(model, spec, dtype) or _QUANTIZED_BITS.get(precision, _BITS[dtype])
        has_own_head = spec.has_lm_head and not spec.tie_word_embeddings
        head_bits = min(max(bits, 8), _BITS[dtype]) if has_own_head else 0
        yield precision, int(num_linear * bits + num_ends * (_BITS[dtype] + head_bits)) // 8


def _stored_bits(model: ModelConfig, spec: ModelSpec, dtype: str) -> float | None:
    """Return the bits of a weight that is kept as it is stored, as only a CPU does; or None."""
    stored = spec.stored_format
    return None if stored is None or model.device.startswith("cuda") else stored.bits_in(dtype)
