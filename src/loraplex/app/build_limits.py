"""Limits of a built engine folder, applied to the settings of its model.

A setting below the build's limit stays. One above it is lowered, and the log reports it; where a
client would notice the difference, it is an error instead.
"""

import logging
from pathlib import Path

import msgspec

from loraplex.core.config import ModelConfig
from loraplex.core.errors import ConfigError
from loraplex.core.gpus import num_gpus
from loraplex.core.step_sizes import wanted_step_sizes
from loraplex.models.engine_folder import LORA_FOLDER, BuildLimits, read_build_limits

logger = logging.getLogger(__name__)


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
