"""Settings of models as they are served: with every path in a local folder, where hub ids are
downloaded, a device, the limits of a built engine folder, and a fair share.

A setting below the limit of the build stays. One above it is lowered, and the log reports it; where
a client would notice the difference, it is an error instead.
"""

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from loraplex.core.config import Config, ModelConfig
from loraplex.core.devices import find_device
from loraplex.core.engine_settings import AUTO_DEVICE, NO_CACHE
from loraplex.core.environment import (
    kernel_check_directory,
    server_api_keys,
    weights_cache_directory,
)
from loraplex.core.errors import ConfigError
from loraplex.core.gpus import num_gpus
from loraplex.core.scheduler_settings import FairShare
from loraplex.core.state_places import state_name
from loraplex.core.step_sizes import wanted_step_sizes
from loraplex.execution.weights.hub import resolve_model, resolve_tokenizer
from loraplex.models.engine_folder import LORA_FOLDER, BuildLimits, read_build_limits

logger = logging.getLogger(__name__)


def with_local_paths(config: Config) -> Config:
    """Return the configuration with every model in a local folder. Raises ConfigError."""
    state_dir = config.server.state_dir
    models = {
        name: with_local_path(name, model, state_dir) for name, model in config.models.items()
    }
    # The state belongs to the model as the operator names it, not to one commit of it.
    return msgspec.structs.replace(config, models=models, state_name=state_name(config))


def with_local_path(name: str, model: ModelConfig, state_dir: str) -> ModelConfig:
    """Return the settings of a model in a local folder. Raises ConfigError.

    Its weights cache is then a folder, too, or none, and so is that of kernel checks; its device is
    chosen, and the limits of a built engine folder are applied.
    """
    folder = resolve_model(model.path, model.revision, state_dir)
    cache = weights_cache_directory(model.weights_cache_dir, state_dir)
    checks = kernel_check_directory(model.kernel_check_dir, state_dir)
    return msgspec.structs.replace(
        within_build(name, with_device(name, model), folder),
        path=str(folder),
        tokenizer=model.tokenizer and str(resolve_tokenizer(model.tokenizer)),
        weights_cache_dir=NO_CACHE if cache is None else os.path.abspath(cache),
        kernel_check_dir=os.path.abspath(checks),
    )


def with_device(name: str, model: ModelConfig) -> ModelConfig:
    """Return the settings of a model with a device in place of `auto`, and log the reason."""
    if model.device != AUTO_DEVICE:
        return model
    found = find_device()
    logger.info("model %r: device %s: %s", name, found.name, found.reason)
    return msgspec.structs.replace(model, device=found.name)


def within_build(name: str, model: ModelConfig, folder: Path) -> ModelConfig:
    """Return the settings of a model within the limits of its folder; unchanged for a folder that
    was not built.

    name: the model's name, for errors. Raises ConfigError for max_model_len,
    max_input_len or quantization that the build does not allow.
    """
    limits = read_build_limits(folder)
    if limits is None:
        return model
    return msgspec.structs.replace(
        model,
        max_model_len=_at_most(name, "max_model_len", model.max_model_len, limits.max_seq_len),
        max_input_len=_at_most(name, "max_input_len", model.max_input_len, limits.max_input_len),
        **_step_sizes(name, model, limits),
        quantization=_quantization(name, model, limits),
        kv_dtype=limits.kv_dtype if model.kv_dtype == "auto" else model.kv_dtype,
        tensor_parallel_size=_num_ranks(name, model, limits),
        **_adapters(name, model, limits, folder),
    )


def _step_sizes(name: str, model: ModelConfig, limits: BuildLimits) -> dict[str, int | None]:
    """Return the sizes of a step. One that is not set stays so, unless the build allows less."""
    usual = wanted_step_sizes(
        model.device, model.num_threads, model.max_num_seqs, model.max_num_batched_tokens
    )
    built = {
        "max_num_seqs": (limits.max_batch_size, "max_batch_size"),
        "max_num_batched_tokens": (limits.max_num_tokens, "max_num_tokens"),
    }
    found: dict[str, int | None] = {}
    for setting, wanted in usual._asdict().items():
        size = _lowered(name, setting, wanted, *built[setting])
        found[setting] = getattr(model, setting) if size == wanted else size
    return found


def _num_ranks(name: str, model: ModelConfig, limits: BuildLimits) -> int:
    """Return the tensor parallel size of the build if no size is set and there are as many GPUs."""
    is_set = model.tensor_parallel_size * model.pipeline_parallel_size > 1
    if is_set or limits.world_size == 1:
        return model.tensor_parallel_size
    built_for = f"tensor parallel {limits.tp_size} x pipeline parallel {limits.pp_size}"
    if model.device == "cuda" and limits.pp_size == 1 and num_gpus() >= limits.tp_size:
        logger.info(
            "model %r uses %d GPUs, as it was built for %s", name, limits.tp_size, built_for
        )
        return limits.tp_size
    logger.warning(
        "model %r was built for %s: it runs as one process, unless tensor_parallel_size is set",
        *(name, built_for),
    )
    return 1


def _adapters(
    name: str, model: ModelConfig, limits: BuildLimits, folder: Path
) -> dict[str, object]:
    """Return the changed settings of adapters."""
    if not limits.allows_lora:
        return {"enable_lora": False}
    rank = _lowered(
        name, "max_lora_rank", model.max_lora_rank, limits.max_lora_rank, "max_lora_rank"
    )
    ranks = model.rank_limits.at_most(limits.max_lora_rank or model.rank_limits.largest).by_kind
    if ranks != model.max_lora_ranks:
        text = ",".join(f"{kind}={limit}" for kind, limit in ranks.items())
        logger.info("max_lora_ranks of model %r is %s, as its engine was built", name, text)
    built_in = folder / LORA_FOLDER
    brought = (str(built_in),) if built_in.is_dir() else ()
    return {
        "max_lora_rank": rank,
        "max_lora_ranks": ranks,
        "optimal_lora_rank": min(model.optimal_lora_rank, max((rank, *ranks.values()))),
        "lora_target_modules": model.lora_target_modules or limits.lora_target_modules,
        "adapter_dirs": tuple(dict.fromkeys((*model.adapter_dirs, *brought))),
    }


def _at_most(name: str, setting: str, wanted: int | None, built: int | None) -> int | None:
    if wanted is not None and built is not None and wanted > built:
        raise ConfigError(
            f"{setting} {wanted} is more than the {built} that the engine of model {name!r} was "
            "built for: lower it, or build again"
        )
    return built if wanted is None else wanted


def _lowered(name: str, setting: str, wanted: int, built: int | None, flag: str) -> int:
    if built is None or wanted <= built:
        return wanted
    logger.info("%s of model %r is %d, as its engine was built (--%s)", setting, name, built, flag)
    return built


def _quantization(name: str, model: ModelConfig, limits: BuildLimits) -> str:
    if model.quantization in ("none", limits.quantization):
        return limits.quantization
    if limits.quantization == "none":
        return model.quantization
    raise ConfigError(
        f"quantization {model.quantization} is not the {limits.quantization} that the engine of "
        f"model {name!r} was built with"
    )


def with_fair_shares(config: Config, given_keys: Sequence[str] = ()) -> Config:
    """Return the configuration with a share for each model. given_keys: keys of a flag."""
    has_keys = bool(config.server.api_keys_file or server_api_keys() or given_keys)
    models = {
        name: with_fair_share(model, has_keys=has_keys) for name, model in config.models.items()
    }
    return msgspec.structs.replace(config, models=models)


def with_fair_share(model: ModelConfig, *, has_keys: bool) -> ModelConfig:
    """Return the settings of one model; has_keys: API keys distinguish tenants."""
    if model.fair_share is not None:
        return model
    # A tenant could take all shares by naming many adapters, or one by many requests for a base.
    kind = FairShare.TENANT if has_keys else FairShare.ADAPTER
    return msgspec.structs.replace(model, fair_share=kind)
