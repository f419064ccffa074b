"""`loraplex compat build`: write an engine folder, which is served as it is.

It has the weights twice: in their own format, for GPUs and other processors, and packed for the
kernels of this kind of CPU; a start maps the packed weights. Adapters of --lora_dir are
copied, and served by their folders' names.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from loraplex.adapters.formats.export import holding_module, with_separate_halves
from loraplex.adapters.formats.inputs import PeftFolder, open_input
from loraplex.adapters.formats.modules import LORA_MODULES, module_of
from loraplex.adapters.tensor_file import StagingLimits
from loraplex.app.builder import base_shapes
from loraplex.compat.convert.adapters import read_peft
from loraplex.compat.convert.checkpoint import ModelChoices, model_choices
from loraplex.compat.convert.flag_tables import BUILD_FLAGS
from loraplex.compat.convert.model_files import (
    copy_file,
    find_model,
    torch_dtype,
    write_json,
    write_model,
)
from loraplex.compat.flags import Flags, check_at_least, check_values
from loraplex.core.errors import ConfigError
from loraplex.core.version import __version__
from loraplex.core.weight_precision import WeightPrecision
from loraplex.execution.weights.loading import build_weights
from loraplex.execution.weights.packing import WeightFormat
from loraplex.execution.weights.stored_head import read_model
from loraplex.kernels.dispatch import select_kernels
from loraplex.models.config_fields import read_fields, read_object
from loraplex.models.engine_folder import (
    CONFIG_NAME,
    LORA_FOLDER,
    OUR_TABLE,
    WEIGHTS_NAME,
    read_build_limits,
)
from loraplex.models.spec import ModelSpec

logger = logging.getLogger(__name__)

_DEFAULT_MAX_BATCH_SIZE: Final = 2048
_DEFAULT_MAX_NUM_TOKENS: Final = 8192
_DEFAULT_MAX_LORA_RANK: Final = 64
_SEPARATE_QKV = ("attn_q", "attn_k", "attn_v")
_NESTED = ("plugin_config", "lora_config")
_POSITIVE = (
    *("max_batch_size", "max_input_len", "max_seq_len", "max_output_len"),
    *("max_beam_width", "max_num_tokens", "max_lora_rank"),
)
_OF_LORA = ("lora_dir", "lora_ckpt_source", "lora_target_modules", "max_lora_rank")
_NOT_RECORDED = (
    *_OF_LORA,
    *("checkpoint_dir", "output_dir", "build_config", "model_dir", "dry_run", "log_level"),
)


def with_build_config(flags: Flags) -> Flags:
    """Add the settings of --build_config, which flags override. Raises ConfigError."""
    path = flags.get("build_config")
    if path is None:
        return flags
    found = check_values(_read_build_config(Path(path)), BUILD_FLAGS, f"{path}: ")
    rows = dict.fromkeys((*found.without_effect, *flags.without_effect))
    return Flags({**found.values, **flags.values}, tuple(rows))


def build_config(flags: Flags, config: ModelSpec) -> dict[str, Any]:
    """Return the table of that name. Raises ConfigError for values that contradict each other."""
    _check(flags)
    plugins = {row.name for row in BUILD_FLAGS if row.is_plugin}
    recorded = {n: v for n, v in flags.values.items() if n not in _NOT_RECORDED}
    max_seq_len = _max_seq_len(flags, config)
    lora_dirs = flags.get("lora_dir", [])
    return {
        **{name: value for name, value in recorded.items() if name not in plugins},
        "max_batch_size": flags.get("max_batch_size", _DEFAULT_MAX_BATCH_SIZE),
        "max_input_len": min(flags.get("max_input_len", max_seq_len), max_seq_len),
        "max_seq_len": max_seq_len,
        "max_beam_width": flags.get("max_beam_width", 1),
        "max_num_tokens": flags.get("max_num_tokens", _DEFAULT_MAX_NUM_TOKENS),
        "lora_config": {
            "lora_dir": lora_dirs,
            "lora_ckpt_source": flags.get("lora_ckpt_source", "hf"),
            "max_lora_rank": flags.get("max_lora_rank", _DEFAULT_MAX_LORA_RANK),
            "lora_target_modules": list(_target_modules(flags, config)),
            "trtllm_modules_to_hf_modules": _hf_names(config),
        },
        "plugin_config": {
            "lora_plugin": None,
            **{name: value for name, value in recorded.items() if name in plugins},
        },
    }


def _check(flags: Flags) -> None:
    for name in _POSITIVE:
        check_at_least(f"--{name}", flags.get(name, 1), 1)
    tp_size, pp_size = flags.get("tp_size", 1), flags.get("pp_size", 1)
    world_size = flags.get("world_size", tp_size * pp_size)
    if world_size != tp_size * pp_size:
        raise ConfigError(
            f"--world_size {world_size} is not --tp_size {tp_size} times --pp_size {pp_size}"
        )
    if flags.get("lora_ckpt_source", "hf") == "nemo":
        raise ConfigError("--lora_ckpt_source nemo: NeMo adapters are not read, only PEFT folders")
    given = [name for name in ("lora_dir", "lora_target_modules") if flags.get(name)]
    if given and flags.get("lora_plugin") is None:
        logger.warning(
            "--%s has no effect without --lora_plugin: the engine will refuse adapters",
            " and --".join(given),
        )


def _max_seq_len(flags: Flags, config: ModelSpec) -> int:
    longest = config.default_max_model_len
    wanted = flags.get("max_seq_len")
    if wanted is None and "max_input_len" in flags and "max_output_len" in flags:
        wanted = flags.get("max_input_len") + flags.get("max_output_len")
    if wanted is None:
        return longest
    if wanted > longest:
        logger.warning("--max_seq_len is %d: the model was made for %d tokens", wanted, longest)
    return min(int(wanted), longest)


def _target_modules(flags: Flags, config: ModelSpec) -> tuple[str, ...]:
    """Return the given modules, or those of the first adapter.

    The projections of attention come together.
    """
    named = flags.get("lora_target_modules") or _modules_of_first(flags.get("lora_dir", []), config)
    if any(name in _SEPARATE_QKV for name in named):
        named = [*named, *_SEPARATE_QKV]
    return tuple(dict.fromkeys(named))


def _modules_of_first(lora_dirs: list[str], config: ModelSpec) -> list[str]:
    """Return the modules that the first adapter changes."""
    if not lora_dirs:
        return []
    rows = with_separate_halves(read_peft(lora_dirs[0], base_shapes(config)).rows)
    changed = {module.id for module in map(holding_module, rows) if module is not None}
    return [module.name for module in LORA_MODULES if module.id in changed]


def _hf_names(config: ModelSpec) -> dict[str, str]:
    """Return Hugging Face's names, in this family, by TensorRT-LLM's."""
    names = {}
    for layer in config.layers:
        for module, path in layer.module_paths.items():
            *_, parent, name = path.split(".")
            holder = module_of(parent, module)
            if holder is not None:
                names[holder.name] = name
    return names


def _read_build_config(path: Path) -> dict[str, Any]:
    """Read the settings of the file, with nested tables flattened and null and false left out."""
    values = read_object(path)
    opened = {name: value for name, value in values.items() if name not in _NESTED}
    for name in _NESTED:
        table = values.get(name) or {}
        if not isinstance(table, Mapping):
            raise ConfigError(f"--build_config {path}: {name} must be an object")
        opened |= table
    opened.pop("trtllm_modules_to_hf_modules", None)
    return {name: value for name, value in opened.items() if value not in (None, False, [], {})}


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
