"""A model of Triton's vLLM backend: model.json with the engine's arguments, multi_lora.json."""

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from loraplex.compat.triton.config_json import completed_config
from loraplex.compat.triton.model_folder import ModelFolder, Notes, has_gpu, place_of
from loraplex.compat.triton.roles import KINDS, Role
from loraplex.compat.triton.setting_rows import (
    PARALLEL,
    RANK_SIZES,
    is_neutral,
    read_value,
    row_of,
)
from loraplex.core.config_layers import Layer
from loraplex.core.errors import ConfigError
from loraplex.core.gpus import num_gpus
from loraplex.core.support import Support
from loraplex.frontends.kserve.models.kinds import ENSEMBLE, VLLM, InputSpec, ModelKind, OutputSpec
from loraplex.frontends.kserve.models.triton_model import ModelDeclaration, ModelOptions
from loraplex.models.config_fields import read_object

_MODEL_FILE = "model.json"
_LORA_FILE = "multi_lora.json"
_GIB = 1 << 30
_TENSOR = "tensor_parallel_size"
_ZERO_IS_UNSAID = ("long_prefill_token_threshold",)


def read_vllm_model(folder: ModelFolder, notes: Notes) -> tuple[list[Layer], ModelDeclaration]:
    """Raises ConfigError."""
    path = folder.version_path / _MODEL_FILE
    if not path.is_file():
        raise ConfigError(
            f"'{_MODEL_FILE}' containing vllm engine args must be provided in "
            f"'{folder.version_path}'"
        )
    args = _Arguments(folder, path, notes)
    has_lora = bool(args.value("enable_lora"))
    adapters = _read_adapters(folder, notes) if has_lora else {}
    layers = [*args.layers()]
    if adapters:
        lora_file = str(folder.version_path / _LORA_FILE)
        layers.append(Layer(lora_file, {"models": {folder.name: {"adapters": adapters}}}))
    kind = KINDS[Role.VLLM]
    declaration = ModelDeclaration(
        name=folder.name,
        kind=kind,
        base_model=folder.name,
        version=folder.version,
        max_batch_size=0,
        is_decoupled=True,
        config=completed_config(
            folder, kind, notes, max_batch_size=0, is_decoupled=True, adds_tensors=True
        ),
        options=ModelOptions(
            lora_enabled=has_lora,
            checks_health=_is_true(folder, "ENABLE_VLLM_HEALTH_CHECK"),
            reports_metrics=_is_true(folder, "REPORT_CUSTOM_METRICS")
            and not args.value("disable_log_stats"),
        ),
    )
    return layers, declaration


class _Arguments:
    """Settings of one model.json, read by the table `ENGINE_ARGS` (setting_rows)."""

    def __init__(self, folder: ModelFolder, path: Path, notes: Notes) -> None:
        """Raises ConfigError for an unknown key, and for a value that cannot be."""
        self._folder = folder
        self._path = path
        self._notes = notes
        self._values: dict[str, Any] = {}
        for key, value in read_object(path).items():
            try:
                row = row_of(key)
                self._values[key] = read_value(row, value)
            except ValueError as error:
                raise self._error(key, str(error)) from None
            if row.support is Support.NO_EFFECT:
                notes.info(f"{folder.name}: {key} has no effect: {row.reason}")
            if row.support is Support.REFUSED and not is_neutral(row, value):
                raise self._error(key, f"{key}: {row.reason}, is not served; leave it out")

    def value(self, key: str) -> Any:
        return self._values.get(key)

    def layers(self) -> Iterator[Layer]:
        """Lowest first. Raises ConfigError."""
        if not self.value("model"):
            raise ConfigError(f"{self._path}: 'model' is missing: the folder or hub id of a model")
        yield from self._device()
        for key in ("model", "tokenizer"):
            if self.value(key):
                setting = "path" if key == "model" else key
                yield self._layer(key, setting, self._here(self.value(key)))
        for key, value in self._values.items():
            row = row_of(key)
            is_unsaid = value is None or (key in _ZERO_IS_UNSAID and value == 0)
            if row.setting and not is_unsaid:
                yield self._layer(key, row.setting, value)
        yield from self._converted()
        yield from self._ranks()

    def _converted(self) -> Iterator[Layer]:
        """What has another form here."""
        if self.value("enforce_eager"):
            yield self._layer("enforce_eager", "cuda_graphs", False)
        if self.value("swap_space"):
            num_bytes = int(self.value("swap_space") * _GIB)
            yield self._layer("swap_space", "kv_cache_host_memory_bytes", num_bytes)
        yield self._layer("enable_lora", "enable_lora", bool(self.value("enable_lora")))
        speculative = self.value("speculative_config")
        if speculative:
            yield from self._speculation(speculative)

    def _speculation(self, written: Any) -> Iterator[Layer]:
        """Speculative decoding by prompt lookup, which vLLM calls the method ngram."""
        key = "speculative_config"
        config = written
        if isinstance(written, str):
            try:
                config = json.loads(written)
            except ValueError as error:
                raise self._error(key, f"{key} is not JSON: {error}") from None
        if not isinstance(config, dict) or config.get("method") not in ("ngram", "[ngram]"):
            raise self._error(
                key, f"{key}: only the method ngram is served, without a second model"
            )
        sizes = {
            "num_speculative_tokens": "num_draft_tokens",
            "prompt_lookup_max": "max_draft_ngram",
        }
        for name, setting in sizes.items():
            if name in config:
                yield self._layer(key, setting, config[name])

    def _device(self) -> Iterator[Layer]:
        device = str(self.value("device") or "auto")
        if device == "cpu" or device.startswith("cuda"):
            yield self._layer("device", "device", device)
        elif device != "auto":
            raise self._error("device", f"device: {device!r} is not auto, cuda or cpu")
        elif has_gpu():
            groups = self._folder.config.instance_group
            if gpus := [gpu for group in groups for gpu in group.gpus]:
                settings = {"device": f"cuda:{gpus[0]}"}
                yield Layer("instance_group", {"models": {self._folder.name: settings}})

    def _ranks(self) -> Iterator[Layer]:
        """tensor_parallel_size is used if there are as many GPUs, and none is named."""
        sizes = {key: self.value(key) for key in PARALLEL if (self.value(key) or 1) > 1}
        is_named = any(group.gpus for group in self._folder.config.instance_group)
        any_gpu = not is_named and self.value("device") in (None, "", "auto", "cuda")
        if [*sizes] == [_TENSOR] and any_gpu and num_gpus() >= sizes[_TENSOR]:
            yield self._layer(_TENSOR, _TENSOR, sizes.pop(_TENSOR))
        for key, size in sizes.items():
            how = "" if key not in RANK_SIZES else f", unless {key} is set for loraplex, too"
            self._notes.warning(f"{self._place(key)}: {key} {size} is served as 1{how}")

    def _here(self, written: str) -> str:
        """Resolve a path from the working directory or the model's folder; else it is a hub id."""
        if Path(written).expanduser().exists():
            return written
        found = self._folder.find_folder(written)
        return written if found is None else str(found)

    def _layer(self, key: str, setting: str, value: Any) -> Layer:
        source = f"{self._place(key)}: {key}"
        return Layer(source, {"models": {self._folder.name: {setting: value}}})

    def _place(self, key: str) -> str:
        return place_of(self._path, rf'"{re.escape(key)}"\s*:')

    def _error(self, key: str, reason: str) -> ConfigError:
        return ConfigError(f"{self._place(key)}: {reason}")


def _read_adapters(folder: ModelFolder, notes: Notes) -> dict[str, dict[str, Any]]:
    """The configured adapters, also those whose files are missing: they may come later.

    Raises ConfigError, without the file in the words of the original.
    """
    path = folder.version_path / _LORA_FILE
    if not path.is_file():
        raise ConfigError(
            f"Triton backend cannot find {path}. It maps the names of adapters to their folders; "
            "without adapters set enable_lora to false"
        )
    adapters: dict[str, dict[str, Any]] = {}
    for name, written in read_object(path).items():
        if not isinstance(written, str) or not written:
            raise ConfigError(f"{path}: {name}: {written!r} must be the path of an adapter")
        places = _places(folder, written)
        found = next((place for place in places if place.exists()), None)
        if found is None:
            found = next((place for place in places if place.parent.exists()), places[0])
            notes.warning(
                f"{path} names {written}, which does not exist: adapter {name!r} is served once it "
                f"is at {found}"
            )
        adapters[name] = {"path": str(found), "optional": True}
    return adapters


def _places(folder: ModelFolder, written: str) -> list[Path]:
    """Where a path of multi_lora.json may lead: from the working directory, then the repository."""
    path = Path(written).expanduser()
    return [path, folder.path.parent / path, folder.path / path, folder.version_path / path]


def _is_true(folder: ModelFolder, key: str) -> bool:
    return (folder.parameters.text(key) or "").lower() == "true"


_Row = TypeVar("_Row", InputSpec, OutputSpec)

_MAX_BATCH_SIZE = 1
"""The step has no batch dimension, so that a batch of several cannot be passed to it."""


def vllm_ensemble(
    folder: ModelFolder, base: str, options: ModelOptions, notes: Notes
) -> ModelDeclaration:
    """Return what clients see of an ensemble of the vLLM model `base`. Raises ConfigError.

    options: those of that model.
    """
    steps = folder.config.ensemble_scheduling.step
    if len(steps) != 1:
        others = ", ".join(f"'{step.model_name}'" for step in steps if step.model_name != base)
        raise ConfigError(
            f"{folder.pbtxt}: ensemble '{folder.name}' passes tensors of the vLLM model '{base}' "
            f"through {others}; an ensemble of a vLLM model has that one step"
        )
    kind = _kind(folder, dict(steps[0].input_map), dict(steps[0].output_map))
    max_batch_size = folder.config.max_batch_size
    return ModelDeclaration(
        name=folder.name,
        kind=kind,
        base_model=base,
        version=folder.version,
        max_batch_size=min(max_batch_size, _MAX_BATCH_SIZE),
        is_decoupled=True,
        config=completed_config(
            folder, kind, notes, max_batch_size=max_batch_size, is_decoupled=True
        ),
        options=options,
    )


def _kind(folder: ModelFolder, inputs: dict[str, str], outputs: dict[str, str]) -> ModelKind:
    """Return the tensors of the ensemble. inputs, outputs: its names by the step's own."""
    for field, names, known in (
        ("input_map", inputs, VLLM.inputs_by_name),
        ("output_map", outputs, VLLM.outputs_by_name),
    ):
        for name in names:
            if name not in known:
                raise ConfigError(
                    f"{folder.line_of(field)}: {field}: a vLLM model has no tensor '{name}'"
                )
    for required in VLLM.required_inputs:
        if required not in inputs:
            raise ConfigError(
                f"{folder.line_of('input_map')}: input_map: '{required}' is missing, which a vLLM "
                "model needs"
            )
    return dataclasses.replace(
        ENSEMBLE,
        dialect=VLLM.dialect,
        inputs=tuple(_renamed(row, inputs) for row in VLLM.inputs if row.name in inputs),
        outputs=tuple(_renamed(row, outputs) for row in VLLM.outputs if row.name in outputs),
        output_names=outputs,
    )


def _renamed(row: _Row, names: dict[str, str]) -> _Row:
    return dataclasses.replace(row, name=names[row.name])
