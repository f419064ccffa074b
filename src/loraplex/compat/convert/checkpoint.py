"""`loraplex convert-checkpoint`: a Hugging Face folder as a checkpoint folder for `loraplex build`.

The weights keep their Hugging Face names and are one file, whatever --tp_size says: nothing here
splits them.
"""

import dataclasses
import logging
from pathlib import Path
from typing import Any

from loraplex.compat.convert.model_files import (
    copy_text_files,
    find_model,
    open_output,
    write_hf_config,
    write_json,
    write_weights,
)
from loraplex.compat.convert.pretrained import pretrained_config
from loraplex.compat.flags import Flags
from loraplex.core.errors import ConfigError
from loraplex.core.version import __version__
from loraplex.models.engine_folder import CONFIG_NAME, FORMAT, OUR_TABLE, source_model
from loraplex.models.registry import read_config
from loraplex.models.spec import ModelSpec

logger = logging.getLogger(__name__)

_DEFAULT_OUTPUT = "tllm_checkpoint"
_PRECISIONS = ("int8", "int4")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelChoices:
    """What convert-checkpoint decides about a model, or build by the older scripts' flags."""

    dtype: str
    quantization: str
    kv_dtype: str
    tp_size: int
    pp_size: int

    def pretrained(self, config: ModelSpec) -> dict[str, Any]:
        return pretrained_config(
            config,
            dtype=self.dtype,
            quantization=self.quantization,
            kv_dtype=self.kv_dtype,
            tp_size=self.tp_size,
            pp_size=self.pp_size,
        )

    def ours(self, source: Path) -> dict[str, Any]:
        """The table `loraplex` of config.json."""
        return {
            "format": FORMAT,
            "version": __version__,
            "source": str(source_model(source).resolve()),
            "quantization": self.quantization,
            "kv_dtype": self.kv_dtype,
        }


def convert_checkpoint(flags: Flags) -> Path:
    """Write the folder and give its path. Raises ConfigError, UnsupportedModelError."""
    model_dir = flags.get("model_dir")
    if model_dir is None:
        raise ConfigError("--model_dir is missing: the Hugging Face folder to convert")
    source = find_model(model_dir)
    config = read_config(source)
    choices = model_choices(flags, config)
    folder = open_output(flags.get("output_dir", _DEFAULT_OUTPUT), source)
    if not flags.get("save_config_only"):
        write_weights(source, folder, config, choices.dtype)
    copy_text_files(source, folder)
    write_hf_config(source, folder, choices.dtype)
    told = {OUR_TABLE: choices.ours(source) | {"flags": dict(flags.values)}}
    write_json(folder / CONFIG_NAME, choices.pretrained(config) | told)
    return folder


def model_choices(flags: Flags, config: ModelSpec) -> ModelChoices:
    """Raises ConfigError for what does not go together."""
    dtype = flags.get("dtype", "float16")
    tp_size, pp_size = flags.get("tp_size", 1), flags.get("pp_size", 1)
    for name, size in (("tp_size", tp_size), ("pp_size", pp_size)):
        if size < 1:
            raise ConfigError(f"--{name} must be at least 1, got {size}")
    if tp_size * pp_size > 1:
        logger.warning("--tp_size %d --pp_size %d: it runs as one process", tp_size, pp_size)
    return ModelChoices(
        dtype=(config.dtype or "float32") if dtype == "auto" else dtype,
        quantization=_quantization(flags),
        kv_dtype="int8" if flags.get("int8_kv_cache") else "auto",
        tp_size=tp_size,
        pp_size=pp_size,
    )


def say_without_effect(flags: Flags) -> None:
    """Once, at info level."""
    if flags.without_effect:
        told = ", ".join(f"{row.spelling} ({row.reason})" for row in flags.without_effect)
        logger.info("no effect here: %s", told)


def _quantization(flags: Flags) -> str:
    if flags.get("use_fp8") or flags.get("use_fp8_rowwise"):
        return "fp8"
    if not flags.get("use_weight_only"):
        return "none"
    precision = str(flags.get("weight_only_precision", "int8"))
    if precision not in _PRECISIONS:
        raise ConfigError(
            f"--weight_only_precision {precision} needs a calibrated checkpoint, which is not "
            f"read: use {' or '.join(_PRECISIONS)}"
        )
    return precision
