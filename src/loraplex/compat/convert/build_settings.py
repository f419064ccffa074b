"""The build_config of an engine folder's config.json, from the flags of build.

A limit without a flag is not enforced, because memory is divided when the folder is served.
config.json records trtllm-build's default for it, or the model's own length.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from loraplex.adapters.formats.export import holding_module, with_separate_halves
from loraplex.adapters.formats.modules import LORA_MODULES, module_of
from loraplex.app.builder import base_shapes
from loraplex.compat.convert.adapters import read_peft
from loraplex.compat.convert.flag_tables import BUILD_FLAGS
from loraplex.compat.flags import Flags, check_values
from loraplex.core.errors import ConfigError
from loraplex.models.config_fields import read_object
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
        if flags.get(name, 1) < 1:
            raise ConfigError(f"--{name} must be at least 1, got {flags.get(name)}")
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
