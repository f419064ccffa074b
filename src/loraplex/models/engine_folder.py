"""The folders that `loraplex compat convert-checkpoint` and `build` write, and build's limits.

Both hold a config.json with TensorRT-LLM's keys and a table `loraplex`, the Hugging Face
configuration as hf_config.json, and the weights under their Hugging Face names in
rank0.safetensors. A folder of build has a build_config, and rank0.engine: the same weights as this
kind of machine computes with them. They are taken wherever a Hugging Face folder is. Free of torch.
"""

import dataclasses
from pathlib import Path
from typing import Final

from loraplex.core.errors import ConfigError, UnsupportedModelError
from loraplex.models.config_fields import ConfigFields, read_fields
from loraplex.models.trtllm_checkpoint import (
    hugging_face_values,
    is_trtllm_checkpoint,
    read_mapping,
)

CONFIG_NAME: Final = "config.json"
HF_CONFIG_NAME: Final = "hf_config.json"
WEIGHTS_NAME: Final = "rank0.safetensors"
PACKED_NAME: Final = "rank0.engine"
LORA_FOLDER: Final = "lora"
"""Folder in an engine folder; each folder in it is an adapter that is served by that name."""
OUR_TABLE: Final = "loraplex"
"""Table in config.json that only folders of loraplex have."""
FORMAT: Final = 1
"""Version of both folders."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BuildLimits:
    """Limits that were set when an engine folder was built; None: no limit."""

    max_batch_size: int | None = None
    """Maximum number of sequences in one step."""
    max_input_len: int | None = None
    """Maximum number of tokens of a prompt."""
    max_seq_len: int | None = None
    """Maximum number of tokens of a prompt and its output."""
    max_beam_width: int | None = None
    max_num_tokens: int | None = None
    """Maximum number of tokens in one step."""
    allows_lora: bool = True
    max_lora_rank: int | None = None
    lora_target_modules: tuple[str, ...] = ()
    """TensorRT-LLM's names of modules; empty: any."""
    quantization: str = "none"
    """The setting of core.engine_settings: none, int8, int4 or fp8."""
    kv_dtype: str = "auto"
    """The setting of core.engine_settings."""
    tp_size: int = 1
    pp_size: int = 1

    @property
    def world_size(self) -> int:
        return self.tp_size * self.pp_size


def model_fields(folder: Path) -> ConfigFields:
    """Read the Hugging Face configuration of a model folder of any kind.

    Raises ConfigError if there is none, UnsupportedModelError for an engine of TensorRT, and for a
    checkpoint of TensorRT-LLM that is not read.
    """
    path = folder / CONFIG_NAME
    if not path.is_file():
        raise ConfigError(f"{folder} is not a model folder: it has no {CONFIG_NAME}")
    fields = read_fields(path)
    if OUR_TABLE in fields:
        _our_table(fields)
        return read_fields(folder / HF_CONFIG_NAME)
    if is_trtllm_checkpoint(fields):
        return ConfigFields(hugging_face_values(fields), str(path))
    if "build_config" in fields or "builder_config" in fields:
        raise UnsupportedModelError(
            f"{path}: an engine of TensorRT, which runs nowhere else: build it again from the "
            "Hugging Face folder, with loraplex compat build"
        )
    return fields


def read_build_limits(folder: Path) -> BuildLimits | None:
    """Read the limits; None for a Hugging Face folder. Raises ConfigError for a broken config.json.

    A checkpoint folder, ours or TensorRT-LLM's, limits only types.
    """
    path = folder / CONFIG_NAME
    if not path.is_file():
        return None
    fields = read_fields(path)
    if OUR_TABLE not in fields:
        return _foreign_limits(fields) if is_trtllm_checkpoint(fields) else None
    ours = _our_table(fields)
    model = fields.table("pretrained_config") or fields
    tp_size, pp_size = read_mapping(model)
    types = BuildLimits(
        quantization=ours.text("quantization", "none"),
        kv_dtype=ours.text("kv_dtype", "auto"),
        tp_size=tp_size,
        pp_size=pp_size,
    )
    build = fields.table("build_config")
    return types if build is None else _with_build(types, build)


def weights_digest(folder: Path) -> str | None:
    """Return the SHA-256 of the source of rank0.engine; None: there is no such file."""
    if not (folder / PACKED_NAME).is_file():
        return None
    fields = read_fields(folder / CONFIG_NAME)
    if OUR_TABLE not in fields:
        return None
    return _our_table(fields).text("weights_digest", "") or None


def source_model(folder: Path) -> Path:
    """Return the model folder that a folder of ours was made from; else `folder`.

    Adapters name the base that they were trained on by it. It may have moved since.
    """
    path = folder / CONFIG_NAME
    if not path.is_file():
        return folder
    fields = read_fields(path)
    source = _our_table(fields).text("source", "") if OUR_TABLE in fields else ""
    return Path(source) if source else folder


def is_foreign_checkpoint(folder: Path) -> bool:
    """Whether TensorRT-LLM's own tools wrote the checkpoint: its weights have other names."""
    path = folder / CONFIG_NAME
    if not path.is_file():
        return False
    fields = read_fields(path)
    return OUR_TABLE not in fields and is_trtllm_checkpoint(fields)


def _foreign_limits(fields: ConfigFields) -> BuildLimits:
    quantization = fields.table("quantization")
    cache = "" if quantization is None else quantization.text("kv_cache_quant_algo", "")
    tp_size, pp_size = read_mapping(fields)
    kv_dtype = "int8" if cache == "INT8" else "auto"
    return BuildLimits(kv_dtype=kv_dtype, tp_size=tp_size, pp_size=pp_size)


def _with_build(types: BuildLimits, build: ConfigFields) -> BuildLimits:
    lora = build.table("lora_config")
    plugins = build.table("plugin_config")
    return dataclasses.replace(
        types,
        max_batch_size=_limit(build, "max_batch_size"),
        max_input_len=_limit(build, "max_input_len"),
        max_seq_len=_limit(build, "max_seq_len"),
        max_beam_width=_limit(build, "max_beam_width"),
        max_num_tokens=_limit(build, "max_num_tokens"),
        allows_lora=plugins is not None and plugins.text("lora_plugin", "") != "",
        max_lora_rank=None if lora is None else _limit(lora, "max_lora_rank"),
        lora_target_modules=() if lora is None else lora.texts("lora_target_modules"),
    )


def _limit(fields: ConfigFields, name: str) -> int | None:
    return fields.integer(name) if name in fields else None


def _our_table(fields: ConfigFields) -> ConfigFields:
    table = fields.table(OUR_TABLE)
    if table is None:
        raise ConfigError(f"{fields.source}: {OUR_TABLE} is empty: build the folder again")
    version = table.integer("format")
    if version != FORMAT:
        raise ConfigError(
            f"{fields.source}: the folder has format {version}, this version reads {FORMAT}: "
            "build it again"
        )
    return table
