"""`loraplex compat convert-checkpoint`: a Hugging Face folder as a checkpoint folder.

The weights keep their Hugging Face names and are one file, whatever --tp_size is: they are not
split here.
"""

import dataclasses
import logging
from pathlib import Path
from typing import Any

from loraplex.compat.convert.model_files import find_model, write_json, write_model
from loraplex.compat.flags import Flags, check_at_least
from loraplex.core.errors import ConfigError, UnsupportedModelError
from loraplex.core.version import __version__
from loraplex.execution.weights.stored_head import read_model
from loraplex.models.engine_folder import (
    CONFIG_NAME,
    FORMAT,
    OUR_TABLE,
    BuildLimits,
    source_model,
)
from loraplex.models.spec import ModelSpec
from loraplex.models.specs.attention import AttentionSpec
from loraplex.models.specs.part import RopeConfig

logger = logging.getLogger(__name__)

_DEFAULT_OUTPUT = "tllm_checkpoint"
_QUANT_ALGOS = {"none": None, "int8": "W8A16", "int4": "W4A16", "fp8": "FP8"}
_INT4_GROUP = 128


@dataclasses.dataclass(frozen=True, slots=True)
class ModelChoices:
    """Choices of convert-checkpoint about a model, or of build by the older scripts' flags."""

    dtype: str
    """The type of the weights."""
    limits: BuildLimits
    """Types and sizes only."""

    def pretrained(self, config: ModelSpec) -> dict[str, Any]:
        """Return TensorRT-LLM's description of a model, as its convert_checkpoint.py writes it.

        The product never reads it back: people and scripts do.
        """
        limits = self.limits
        # TensorRT-LLM describes one attention and one feed-forward part for all layers.
        mixers = [mixer for layer in config.layers for mixer in layer.mixers]
        attention = next((each for each in mixers if isinstance(each, AttentionSpec)), None)
        parts = (layer.feed_forward for layer in config.layers)
        feed_forward = next((part for part in parts if part is not None), None)
        of_others = not all(isinstance(each, AttentionSpec) for each in mixers)
        if attention is None or feed_forward is None or of_others:
            raise UnsupportedModelError(
                f"{config.architecture}: TensorRT-LLM's config.json has no words for a model "
                "without attention, with layers of another kind, or without feed-forward parts"
            )
        return {
            "architecture": config.architecture,
            "dtype": self.dtype,
            "logits_dtype": "float32",
            "vocab_size": config.vocab_size,
            "max_position_embeddings": config.max_position_embeddings,
            "hidden_size": config.hidden_size,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": attention.num_heads,
            "num_key_value_heads": attention.num_kv_heads,
            "head_size": attention.head_dim,
            "hidden_act": config.hidden_act,
            "intermediate_size": feed_forward.inner_size,
            "norm_epsilon": config.final_norm.eps,
            **_positions(attention.rope),
            "use_parallel_embedding": False,
            "embedding_sharding_dim": 0,
            "mapping": {
                "world_size": limits.world_size,
                "tp_size": limits.tp_size,
                "pp_size": limits.pp_size,
            },
            "quantization": {
                "quant_algo": _QUANT_ALGOS[limits.quantization],
                "kv_cache_quant_algo": "INT8" if limits.kv_dtype == "int8" else None,
                "group_size": _INT4_GROUP if limits.quantization == "int4" else None,
                "exclude_modules": None,
            },
        }

    def own_table(self, source: Path) -> dict[str, Any]:
        """Return the table `loraplex` of config.json."""
        return {
            "format": FORMAT,
            "version": __version__,
            "source": str(source_model(source).resolve()),
            "quantization": self.limits.quantization,
            "kv_dtype": self.limits.kv_dtype,
        }


def convert_checkpoint(flags: Flags) -> Path:
    """Write the folder and return its path. Raises ConfigError, UnsupportedModelError."""
    model_dir = flags.get("model_dir")
    if model_dir is None:
        raise ConfigError("--model_dir is missing: the Hugging Face folder to convert")
    source = find_model(model_dir)
    config = read_model(source)
    choices = model_choices(flags, config)
    described = choices.pretrained(config)
    output, has_weights = (
        flags.get("output_dir", _DEFAULT_OUTPUT),
        not flags.get("save_config_only"),
    )
    folder = write_model(source, output, config, choices.dtype, has_weights=has_weights)
    own_table = choices.own_table(source) | {"flags": dict(flags.values)}
    write_json(folder / CONFIG_NAME, described | {OUR_TABLE: own_table})
    return folder


def model_choices(flags: Flags, config: ModelSpec) -> ModelChoices:
    """Read the choices. Raises ConfigError for flags that contradict each other."""
    dtype = flags.get("dtype", "float16")
    tp_size, pp_size = flags.get("tp_size", 1), flags.get("pp_size", 1)
    for name, size in (("tp_size", tp_size), ("pp_size", pp_size)):
        check_at_least(f"--{name}", size, 1)
    if tp_size * pp_size > 1:
        logger.warning(
            "--tp_size %d --pp_size %d: it runs as one process, unless tensor_parallel_size is set",
            *(tp_size, pp_size),
        )
    limits = BuildLimits(
        quantization=_quantization(flags),
        kv_dtype="int8" if flags.get("int8_kv_cache") else "auto",
        tp_size=tp_size,
        pp_size=pp_size,
    )
    return ModelChoices((config.dtype or "float32") if dtype == "auto" else dtype, limits)


def log_without_effect(flags: Flags) -> None:
    """Log the flags that have no effect, at info level."""
    if flags.without_effect:
        rows = ", ".join(f"{row.spelling} ({row.reason})" for row in flags.without_effect)
        logger.info("no effect here: %s", rows)


def _quantization(flags: Flags) -> str:
    if flags.get("use_fp8") or flags.get("use_fp8_rowwise"):
        return "fp8"
    if not flags.get("use_weight_only"):
        return "none"
    precision = str(flags.get("weight_only_precision", "int8"))
    if precision not in ("int8", "int4"):
        raise ConfigError(
            f"--weight_only_precision {precision} needs a calibrated checkpoint, which is not "
            "read: use int8 or int4"
        )
    return precision


def _positions(rope: RopeConfig | None) -> dict[str, Any]:
    if rope is None:
        return {"position_embedding_type": "learned_absolute"}
    scaling = {"type": rope.rope_type, "factor": rope.factor}
    return {
        "position_embedding_type": "rope_gpt_neox",
        "rotary_base": rope.theta,
        "rotary_scaling": None if rope.rope_type == "default" else scaling,
    }
