"""`loraplex build`: write an engine folder, which is served as it is.

It has the weights twice: in their own format, for GPUs and other processors, and packed for the
kernels of this kind of CPU; a start maps the packed weights. Adapters of --lora_dir are
copied, and served by their folders' names.
"""

import dataclasses
import logging
import shutil
from pathlib import Path
from typing import Any

import torch

from loraplex.adapters.formats.inputs import PeftFolder, open_input
from loraplex.adapters.staged import StagingLimits
from loraplex.compat.convert.adapters import read_peft
from loraplex.compat.convert.build_settings import build_config, with_build_config
from loraplex.compat.convert.checkpoint import ModelChoices, model_choices
from loraplex.compat.convert.model_files import (
    TORCH_DTYPES,
    copy_text_files,
    find_model,
    open_output,
    write_hf_config,
    write_json,
    write_weights,
)
from loraplex.compat.flags import Flags
from loraplex.core.errors import ConfigError
from loraplex.core.version import __version__
from loraplex.core.weight_precision import WeightPrecision
from loraplex.execution.weights.built import build_weights
from loraplex.execution.weights.packing import WeightFormat
from loraplex.kernels.dispatch import select_kernels
from loraplex.models.config_fields import read_fields
from loraplex.models.engine_folder import (
    CONFIG_NAME,
    LORA_FOLDER,
    OUR_TABLE,
    WEIGHTS_NAME,
    BuildLimits,
    is_foreign_checkpoint,
    read_build_limits,
)
from loraplex.models.registry import read_config
from loraplex.models.spec import ModelSpec

logger = logging.getLogger(__name__)

_DEFAULT_OUTPUT = "engine_outputs"
_CPU = torch.device("cpu")
_OF_CHECKPOINT = (
    *("dtype", "tp_size", "pp_size", "use_weight_only", "weight_only_precision"),
    *("int8_kv_cache", "use_fp8", "use_fp8_rowwise"),
)
"""Decided when the checkpoint was converted."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Build:
    """Checked input of a build."""

    source: Path
    config: ModelSpec
    choices: ModelChoices
    build_config: dict[str, Any]
    adapters: dict[str, Path]
    """The folders of --lora_dir by the names they are served under."""


def build_engine_folder(flags: Flags) -> Path | None:
    """Write the folder and give its path; None with --dry_run, which only checks.

    Raises ConfigError, UnsupportedModelError, InvalidAdapterError.
    """
    flags = with_build_config(flags)
    build = _prepare(flags)
    output = flags.get("output_dir", _DEFAULT_OUTPUT)
    if flags.get("dry_run"):
        return None
    folder = open_output(output, build.source)
    if (build.source / WEIGHTS_NAME).is_file() and not is_foreign_checkpoint(build.source):
        _copy(build.source / WEIGHTS_NAME, folder / WEIGHTS_NAME)
    else:
        write_weights(build.source, folder, build.config, build.choices.dtype)
    copy_text_files(build.source, folder)
    write_hf_config(build.source, folder, build.choices.dtype)
    for name, adapter in build.adapters.items():
        _copy_adapter(adapter, folder / LORA_FOLDER / name)
    digest = _pack(folder, build)
    write_json(folder / CONFIG_NAME, _described(build, digest))
    return folder


def _prepare(flags: Flags) -> _Build:
    source, choices = _source(flags)
    config = read_config(source)
    settings = build_config(flags, config)
    adapters = _adapters(flags) if settings["plugin_config"]["lora_plugin"] else {}
    settings["lora_config"]["lora_dir"] = [f"{LORA_FOLDER}/{name}" for name in adapters]
    return _Build(source, config, choices, settings, adapters)


def _source(flags: Flags) -> tuple[Path, ModelChoices]:
    """Return the folder to read, and the choices of its conversion or of these flags."""
    checkpoint, model = flags.get("checkpoint_dir"), flags.get("model_dir")
    if (checkpoint is None) == (model is None):
        raise ConfigError(
            "give either --checkpoint_dir (a folder of convert-checkpoint) or --model_dir (a "
            "Hugging Face folder)"
        )
    if checkpoint is None:
        source = find_model(model)
        return source, model_choices(flags, read_config(source))
    source = Path(checkpoint).expanduser()
    converted = read_build_limits(source)
    if converted is None:
        # Raises if the folder is no model at all; else it is a Hugging Face folder.
        read_config(source)
        raise ConfigError(
            f"--checkpoint_dir {checkpoint} is no folder of convert-checkpoint: for a Hugging "
            "Face folder give --model_dir"
        )
    if not (source / WEIGHTS_NAME).is_file():
        raise ConfigError(
            f"--checkpoint_dir {checkpoint} has no {WEIGHTS_NAME}: convert it without "
            "--save_config_only"
        )
    given = [f"--{name}" for name in _OF_CHECKPOINT if name in flags]
    if given:
        logger.warning(
            "%s: the checkpoint decides; give it to convert-checkpoint", ", ".join(given)
        )
    return source, _converted(source, converted)


def _converted(source: Path, limits: BuildLimits) -> ModelChoices:
    dtype = read_fields(source / CONFIG_NAME).text("dtype", "float32")
    return ModelChoices(
        dtype=dtype,
        quantization=limits.quantization,
        kv_dtype=limits.kv_dtype,
        tp_size=limits.tp_size,
        pp_size=limits.pp_size,
    )


def _adapters(flags: Flags) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for text in flags.get("lora_dir", []):
        read_peft(text)
        folder = Path(text).expanduser()
        name = folder.resolve().name
        if name in found:
            raise ConfigError(
                f"--lora_dir {text}: {found[name]} has the same name, by which it is served"
            )
        found[name] = folder
    return found


def _copy_adapter(source: Path, target: Path) -> None:
    opened = open_input(str(source), StagingLimits())
    assert isinstance(opened, PeftFolder)
    target.mkdir(parents=True)
    for file in opened.files:
        _copy(file, target / file.name)


def _pack(folder: Path, build: _Build) -> str:
    """The digest of the native weights; empty if none could be packed: fp8 is for GPUs."""
    precision = WeightPrecision(build.choices.quantization)
    if precision is WeightPrecision.FP8:
        return ""
    form = WeightFormat(dtype=TORCH_DTYPES[build.choices.dtype], precision=precision)
    return build_weights(folder, folder, build.config, select_kernels(_CPU), form)


def _described(build: _Build, digest: str) -> dict[str, Any]:
    ours = build.choices.own_table(build.source) | {"weights_digest": digest}
    return {
        "version": __version__,
        "pretrained_config": build.choices.pretrained(build.config),
        "build_config": build.build_config,
        OUR_TABLE: ours,
    }


def _copy(source: Path, target: Path) -> None:
    try:
        shutil.copyfile(source, target)
    except OSError as error:
        raise ConfigError(f"cannot copy {source} to {target}: {error.strerror}") from error
