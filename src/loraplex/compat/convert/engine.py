"""`loraplex compat build`: write an engine folder, which is served as it is.

It has the weights twice: in their own format, for GPUs and other processors, and packed for the
kernels of this kind of CPU; a start maps the packed weights. Adapters of --lora_dir are
copied, and served by their folders' names.
"""

import logging
from pathlib import Path

import torch

from loraplex.adapters.formats.inputs import PeftFolder, open_input
from loraplex.adapters.tensor_file import StagingLimits
from loraplex.app.builder import base_shapes
from loraplex.compat.convert.adapters import read_peft
from loraplex.compat.convert.build_settings import build_config, with_build_config
from loraplex.compat.convert.checkpoint import ModelChoices, model_choices
from loraplex.compat.convert.model_files import (
    copy_file,
    find_model,
    torch_dtype,
    write_json,
    write_model,
)
from loraplex.compat.flags import Flags
from loraplex.core.errors import ConfigError
from loraplex.core.version import __version__
from loraplex.core.weight_precision import WeightPrecision
from loraplex.execution.weights.loading import build_weights
from loraplex.execution.weights.packing import WeightFormat
from loraplex.execution.weights.stored_head import read_model
from loraplex.kernels.dispatch import select_kernels
from loraplex.models.config_fields import read_fields
from loraplex.models.engine_folder import (
    CONFIG_NAME,
    LORA_FOLDER,
    OUR_TABLE,
    WEIGHTS_NAME,
    read_build_limits,
)
from loraplex.models.spec import ModelSpec

logger = logging.getLogger(__name__)

_DEFAULT_OUTPUT = "engine_outputs"
_OF_CHECKPOINT = (
    *("dtype", "tp_size", "pp_size", "use_weight_only", "weight_only_precision"),
    *("int8_kv_cache", "use_fp8", "use_fp8_rowwise"),
)
"""Decided when the checkpoint was converted."""


def build_engine_folder(flags: Flags) -> Path | None:
    """Write the folder and give its path; None with --dry_run, which only checks.

    Raises ConfigError, UnsupportedModelError, InvalidAdapterError.
    """
    flags = with_build_config(flags)
    source, choices = _source(flags)
    config = read_model(source)
    settings = build_config(flags, config)
    adapters = _adapters(flags, config) if settings["plugin_config"]["lora_plugin"] else {}
    settings["lora_config"]["lora_dir"] = [f"{LORA_FOLDER}/{name}" for name in adapters]
    if flags.get("dry_run"):
        return None
    output = flags.get("output_dir", _DEFAULT_OUTPUT)
    pretrained = choices.pretrained(config)
    folder = write_model(source, output, config, choices.dtype)
    for name, adapter in adapters.items():
        opened = open_input(str(adapter), StagingLimits())
        assert isinstance(opened, PeftFolder)
        for file in opened.files:
            copy_file(file, folder / LORA_FOLDER / name / file.name)
    digest = _pack(folder, config, choices)
    described = {
        "version": __version__,
        "pretrained_config": pretrained,
        "build_config": settings,
        OUR_TABLE: choices.own_table(source) | {"weights_digest": digest},
    }
    write_json(folder / CONFIG_NAME, described)
    return folder


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
        return source, model_choices(flags, read_model(source))
    source = Path(checkpoint).expanduser()
    limits = read_build_limits(source)
    if limits is None:
        # Raises if the folder is no model at all; else it is a Hugging Face folder.
        read_model(source)
        raise ConfigError(
            f"--checkpoint_dir {checkpoint} was not written by convert-checkpoint: for a Hugging "
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
    return source, ModelChoices(read_fields(source / CONFIG_NAME).text("dtype", "float32"), limits)


def _adapters(flags: Flags, config: ModelSpec) -> dict[str, Path]:
    """Return the folders of --lora_dir by the names they are served under."""
    found: dict[str, Path] = {}
    for text in flags.get("lora_dir", []):
        read_peft(text, base_shapes(config))
        folder = Path(text).expanduser()
        name = folder.resolve().name
        if name in found:
            raise ConfigError(
                f"--lora_dir {text}: {found[name]} has the same name, by which it is served"
            )
        found[name] = folder
    return found


def _pack(folder: Path, config: ModelSpec, choices: ModelChoices) -> str:
    """Return the digest of the native weights; empty if none could be packed: fp8 is for GPUs."""
    precision = WeightPrecision(choices.limits.quantization)
    if precision is WeightPrecision.FP8:
        return ""
    form = WeightFormat(dtype=torch_dtype(choices.dtype), precision=precision)
    return build_weights(folder, folder, config, select_kernels(torch.device("cpu")), form)
