"""The parameters of a tensorrt_llm model as settings of the served base model."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from loraplex.compat.triton.devices import device_layer
from loraplex.compat.triton.model_folder import ModelFolder
from loraplex.compat.triton.notes import Notes
from loraplex.compat.triton.parameters import TENSORRT_LLM_PARAMETERS
from loraplex.compat.triton.part_parameters import check_known, check_served
from loraplex.compat.triton.setting_rows import SettingRow
from loraplex.core.config_layers import Layer
from loraplex.core.scheduler_settings import BATCHING_ALIASES, Batching

DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {"batch_scheduler_policy": "guaranteed_no_evict", "enable_prefix_cache": False}
)
"""Defaults of a TensorRT-LLM repository (version of January 2024) that differ from ours."""
_PREFETCH = "lora_prefetch_dir"
_BATCHING = "gpt_model_type"
_ZERO_IS_UNSAID = ("iter_stats_max_iterations", "max_tokens_in_paged_kv_cache")
_QUEUE_FIELDS = ("max_queue_size", "max_queue_delay_microseconds")


def setting_layers(folder: ModelFolder, engine: Path, notes: Notes) -> Iterator[Layer]:
    """Lowest first, each with the place of its value. Raises ConfigError."""
    yield _layer(folder, "default of a TensorRT-LLM model repository", dict(DEFAULTS))
    yield from device_layer(folder, notes)
    yield _layer(folder, folder.parameters.place("gpt_model_path"), {"path": str(engine)})
    yield from _queue_layers(folder)
    check_known(folder, TENSORRT_LLM_PARAMETERS, notes)
    check_served(folder, TENSORRT_LLM_PARAMETERS, notes)
    for row in TENSORRT_LLM_PARAMETERS:
        yield from _parameter_layer(folder, row, notes)


def _layer(folder: ModelFolder, source: str, settings: Mapping[str, Any]) -> Layer:
    return Layer(source, {"models": {folder.name: settings}})


def _parameter_layer(folder: ModelFolder, row: SettingRow, notes: Notes) -> Iterator[Layer]:
    parameters = folder.parameters
    value = parameters.read(row)
    if value is None:
        return
    if row.key == _BATCHING and value not in {*Batching, *BATCHING_ALIASES}:
        # The original's words, which its tests look for in the log.
        raise parameters.error(
            row.key,
            "Invalid gpt_model_type. Must be v1/inflight_batching/inflight_fused_batching, got "
            f"{value!r}",
        )
    if row.key == _PREFETCH:
        yield from _prefetch_layer(folder, value, notes)
    elif row.setting and (value or row.key not in _ZERO_IS_UNSAID):
        yield _layer(folder, f"{parameters.place(row.key)}: {row.key}", {row.setting: value})


def _prefetch_layer(folder: ModelFolder, written: str, notes: Notes) -> Iterator[Layer]:
    found = folder.find_folder(written)
    if found is None:
        notes.warning(
            f"{folder.name}: {_PREFETCH}: there is no folder {written}: nothing is loaded"
        )
    else:
        place = folder.parameters.place(_PREFETCH)
        yield _layer(folder, place, {"adapter_dirs": [str(found)]})


def _queue_layers(folder: ModelFolder) -> Iterator[Layer]:
    """Top-level fields: of the wait for company, and of how many may wait."""
    batching = folder.config.dynamic_batching
    values = (batching.default_queue_policy.max_queue_size, batching.max_queue_delay_microseconds)
    for field, value in zip(_QUEUE_FIELDS, values, strict=True):
        if value:
            yield _layer(folder, folder.line_of(field), {field: value})
