"""Numbers for the sizes of a step that the operator left open, by the device and its memory."""

import logging
from pathlib import Path

import msgspec

from loraplex.app.model_settings import with_device
from loraplex.core.config import ModelConfig
from loraplex.core.step_sizes import StepSizes, wanted_step_sizes
from loraplex.execution.sizing.capacity import choose_device, choose_dtype, free_bytes
from loraplex.execution.sizing.kv import windowed
from loraplex.execution.sizing.settings import RunnerSettings
from loraplex.execution.sizing.step_memory import fitting_step_sizes
from loraplex.execution.weights.size import weights_size
from loraplex.execution.weights.stored_head import read_model
from loraplex.models.linear_group import TensorShard
from loraplex.models.sharding import shard
from loraplex.models.spec import ModelSpec
from loraplex.models.stages import PipelineStage, stage

logger = logging.getLogger(__name__)

_SIZES = StepSizes._fields


def with_step_sizes(model: ModelConfig) -> ModelConfig:
    """Return the settings with a device and sizes of a step, and log those that were open.

    The model is in a local folder. Raises ConfigError.
    """
    model = with_device(model.path, model)
    is_open = [name for name in _SIZES if getattr(model, name) is None]
    if not is_open:
        return model
    wanted = wanted_step_sizes(
        model.device, model.num_threads, model.max_num_seqs, model.max_num_batched_tokens
    )
    sized = msgspec.structs.replace(model, **wanted._asdict())
    if model.device == "cpu":
        logger.info("steps of at most %d sequences and %d tokens, from the cores", *wanted)
        return sized
    settings = runner_settings(sized)
    spec = largest_rank(settings, windowed(settings, read_model(Path(model.path))))
    left = bytes_left(settings, weights_bytes(settings, spec))
    assert left is not None, "a GPU has a memory of its own"
    sizes = fitting_step_sizes(settings, spec, choose_dtype(settings, spec), left, is_open)
    logger.info(
        "steps of at most %d sequences and %d tokens%s",
        *sizes,
        f": the memory does not allow {wanted.max_num_seqs} and {wanted.max_num_batched_tokens}"
        if sizes != wanted
        else "",
    )
    return msgspec.structs.replace(sized, **sizes._asdict())


def runner_settings(model: ModelConfig) -> RunnerSettings:
    """Return the runner's part of a model's settings, which have a device and sizes of a step."""
    return msgspec.convert(model, RunnerSettings, from_attributes=True)


def largest_rank(settings: RunnerSettings, spec: ModelSpec) -> ModelSpec:
    """Return the share of a model that the rank with most weights has."""
    num_stages = settings.pipeline_parallel_size
    of_rank = shard(spec, TensorShard(0, settings.tensor_parallel_size))
    stages = [stage(of_rank, PipelineStage(index, num_stages)) for index in range(num_stages)]
    return max(stages, key=lambda one: weights_bytes(settings, one))


def weights_bytes(settings: RunnerSettings, spec: ModelSpec) -> int:
    dtype = choose_dtype(settings, spec)
    return weights_size(spec, dtype, settings.precision)


def bytes_left(settings: RunnerSettings, weights_bytes: int) -> int | None:
    """Return the device's memory without the weights; None: it is the host's.

    With memory_bytes the device need not be in this machine.
    """
    if settings.device == "cpu":
        return None
    if settings.memory_bytes is not None:
        return settings.memory_bytes - weights_bytes
    free = free_bytes(choose_device(settings))
    return None if free is None else free - weights_bytes
