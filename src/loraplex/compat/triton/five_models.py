"""The five models of a TensorRT-LLM repository as config.pbtxt files, with `${name}` to fill in.

Names, types, dimensions and order of the tensors are the tables of frontends.kserve.models; the
names to fill in are those of the TensorRT-LLM backend's templates (versions of 2024 and 2025).
"""

import string
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from loraplex.compat.triton.model_folder import CONFIG_FILE
from loraplex.compat.triton.roles import KINDS, Role
from loraplex.core.errors import ConfigError
from loraplex.frontends.kserve.models.kinds import (
    ENSEMBLE,
    POSTPROCESSING,
    PREPROCESSING,
    TENSORRT_LLM,
    InputSpec,
    ModelKind,
)
from loraplex.frontends.kserve.tensors import DATATYPES

_PREPROCESSING_INPUTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "QUERY": "text_input",
        "DECODER_QUERY": "decoder_text_input",
        "REQUEST_OUTPUT_LEN": "max_tokens",
        "BAD_WORDS_DICT": "bad_words",
        "STOP_WORDS_DICT": "stop_words",
        "EMBEDDING_BIAS_WORDS": "embedding_bias_words",
        "EMBEDDING_BIAS_WEIGHTS": "embedding_bias_weights",
        "END_ID": "end_id",
        "PAD_ID": "pad_id",
        "PROMPT_TABLE_EXTRA_ID": "prompt_table_extra_id",
    }
)
"""Inputs of the step that are inputs of the ensemble."""
_PREPARED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "input_ids": "INPUT_ID",
        "input_lengths": "REQUEST_INPUT_LEN",
        "decoder_input_ids": "DECODER_INPUT_ID",
        "decoder_input_lengths": "REQUEST_DECODER_INPUT_LEN",
        "request_output_len": "REQUEST_OUTPUT_LEN",
        "end_id": "OUT_END_ID",
        "pad_id": "OUT_PAD_ID",
        "stop_words_list": "STOP_WORDS_IDS",
        "bad_words_list": "BAD_WORDS_IDS",
        "embedding_bias": "EMBEDDING_BIAS",
        "prompt_table_extra_ids": "OUT_PROMPT_TABLE_EXTRA_IDS",
    }
)
"""Inputs of tensorrt_llm that are outputs of preprocessing; the others are the ensemble's own."""
_TOKENS: Final[Mapping[str, str]] = MappingProxyType(
    {"output_ids": "TOKENS_BATCH", "sequence_length": "SEQUENCE_LENGTH"}
)
"""Outputs of tensorrt_llm that are inputs of postprocessing."""


def scheduling_text() -> str:
    """The field ensemble_scheduling of the ensemble's config.pbtxt."""
    prepared = {name: f"_{name}" for name in _PREPARED.values()}
    shown = {n.name: n.name for n in TENSORRT_LLM.declared_outputs if n in ENSEMBLE.outputs}
    tokens = {name: f"_{inner}" for name, inner in _TOKENS.items()}
    decoded = {inner: f"_{inner}" for inner in _TOKENS.values()}
    steps = (
        _step(PREPROCESSING, _PREPROCESSING_INPUTS, prepared),
        _step(TENSORRT_LLM, _tensorrt_llm_inputs(), {**tokens, **shown}),
        _step(POSTPROCESSING, decoded, {"OUTPUT": "text_output"}),
    )
    joined = ",\n".join(steps)
    return f"ensemble_scheduling {{\n  step [\n{joined}\n  ]\n}}"


def _tensorrt_llm_inputs() -> dict[str, str]:
    """Prepared ones, and those that mean the same field as one of the ensemble."""
    inputs = {name: f"_{output}" for name, output in _PREPARED.items()}
    taken = set(_PREPROCESSING_INPUTS.values())
    of_field = {row.field or row.name: row.name for row in ENSEMBLE.declared_inputs}
    for row in TENSORRT_LLM.declared_inputs:
        outer = of_field.get(row.field or row.name)
        if row.name not in inputs and outer is not None and outer not in taken:
            inputs[row.name] = outer
    return inputs


def _step(kind: ModelKind, inputs: Mapping[str, str], outputs: Mapping[str, str]) -> str:
    lines = [f'      model_name: "{kind.name}"', "      model_version: -1"]
    lines += [*_entries("input_map", inputs), *_entries("output_map", outputs)]
    body = "\n".join(lines)
    return f"    {{\n{body}\n    }}"


def _entries(field: str, names: Mapping[str, str]) -> Iterator[str]:
    for inner, outer in names.items():
        yield f'      {field} {{\n        key: "{inner}"\n        value: "{outer}"\n      }}'


_TYPES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "encoder_input_features": "${encoder_input_features_data_type}",
        "draft_logits": "${logits_datatype}",
        "context_logits": "${logits_datatype}",
        "generation_logits": "${logits_datatype}",
    }
)
"""Types of the tensors whose type is filled in."""

_TENSORRT_LLM_KEYS = (
    *("max_beam_width", "max_tokens_in_paged_kv_cache", "max_attention_window_size"),
    *("sink_token_length", "batch_scheduler_policy", "kv_cache_free_gpu_mem_fraction"),
    *("kv_cache_host_memory_bytes", "kv_cache_onboard_blocks", "cross_kv_cache_fraction"),
    *("enable_trt_overlap", "exclude_input_in_output", "cancellation_check_period_ms"),
    *("stats_check_period_ms", "iter_stats_max_iterations", "request_stats_max_iterations"),
    *("enable_kv_cache_reuse", "normalize_log_probs", "enable_chunked_context"),
    *("gpu_device_ids", "participant_ids", "num_nodes", "max_num_sequences"),
    *("lora_cache_optimal_adapter_size", "lora_cache_max_adapter_size"),
    *("lora_cache_gpu_memory_fraction", "lora_cache_host_memory_bytes", "lora_prefetch_dir"),
    *("decoding_mode", "lookahead_window_size", "lookahead_ngram_size"),
    *("lookahead_verification_set_size", "medusa_choices", "eagle_choices"),
    *("gpu_weights_percent", "enable_context_fmha_fp32_acc", "multi_block_mode"),
    *("cuda_graph_mode", "cuda_graph_cache_size", "speculative_decoding_fast_logits"),
    *("tokenizer_dir", "guided_decoding_backend", "xgrammar_tokenizer_info_path"),
)
"""Parameters that are filled in under their own name."""

_PARAMETERS: Final[Mapping[Role, Mapping[str, str]]] = MappingProxyType(
    {
        Role.PREPROCESSING: {
            "tokenizer_dir": "${tokenizer_dir}",
            "add_special_tokens": "${add_special_tokens}",
        },
        Role.TENSORRT_LLM: {
            "FORCE_CPU_ONLY_INPUT_TENSORS": "no",
            "gpt_model_type": "${batching_strategy}",
            "gpt_model_path": "${engine_dir}",
            "encoder_model_path": "${encoder_engine_dir}",
            **{key: f"${{{key}}}" for key in _TENSORRT_LLM_KEYS},
        },
        Role.POSTPROCESSING: {
            "tokenizer_dir": "${tokenizer_dir}",
            "skip_special_tokens": "${skip_special_tokens}",
        },
        Role.BLS: {
            "accumulate_tokens": "${accumulate_tokens}",
            "tensorrt_llm_model_name": "${tensorrt_llm_model_name}",
            "tensorrt_llm_draft_model_name": "${tensorrt_llm_draft_model_name}",
        },
        Role.ENSEMBLE: {},
    }
)
_COUNTS: Final[Mapping[Role, str]] = MappingProxyType(
    {
        Role.PREPROCESSING: "${preprocessing_instance_count}",
        Role.TENSORRT_LLM: "1",
        Role.POSTPROCESSING: "${postprocessing_instance_count}",
        Role.BLS: "${bls_instance_count}",
    }
)
_DECOUPLED = (Role.TENSORRT_LLM, Role.BLS)
_QUEUED = (Role.PREPROCESSING, Role.TENSORRT_LLM)

MODELS = tuple(_PARAMETERS)
FILLED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "triton_backend": "tensorrtllm",
        "triton_max_batch_size": "128",
        "decoupled_mode": "False",
        "max_queue_delay_microseconds": "0",
        "max_queue_size": "0",
        "preprocessing_instance_count": "1",
        "postprocessing_instance_count": "1",
        "bls_instance_count": "1",
        "logits_datatype": "TYPE_FP32",
        "encoder_input_features_data_type": "TYPE_FP16",
        "batching_strategy": "inflight_fused_batching",
    }
)
"""Default values of a repository that is ready; a parameter that is not here is empty."""


def config_text(role: Role) -> str:
    """The config.pbtxt of one of the five models."""
    kind = KINDS[role]
    blocks = [f'name: "{kind.name}"', _system(role), "max_batch_size: ${triton_max_batch_size}"]
    if role in _DECOUPLED:
        blocks.append("model_transaction_policy {\n  decoupled: ${decoupled_mode}\n}")
    if role in _QUEUED:
        blocks.append(_QUEUE)
    elif role is Role.POSTPROCESSING:
        blocks.append("dynamic_batching {}")
    blocks.append(_rows("input", (_input(row) for row in kind.declared_inputs)))
    outputs = (_tensor(r.name, r.datatype, r.dims) for r in kind.outputs if not r.note)
    blocks.append(_rows("output", outputs))
    if role is Role.ENSEMBLE:
        blocks.append(scheduling_text())
    else:
        count = f"    count: {_COUNTS[role]}\n    kind: KIND_CPU"
        blocks.append(f"instance_group [\n  {{\n{count}\n  }}\n]")
    blocks += [_parameter(key, value) for key, value in _PARAMETERS[role].items()]
    return "\n".join(blocks) + "\n"


def write_five_models(folder: Path, values: Mapping[str, str] | None = None) -> None:
    """Write the five models below a folder; values: fill them in, and leave nothing open.

    Raises ConfigError if one of them is there already, or cannot be written.
    """
    for role in MODELS:
        model = folder / KINDS[role].name
        if model.exists():
            raise ConfigError(f"{model} exists already: a repository is written to a new folder")
    try:
        for role in MODELS:
            text = config_text(role)
            version = folder / KINDS[role].name / "1"
            version.mkdir(parents=True)
            (version / ".gitkeep").touch()
            (version.parent / CONFIG_FILE).write_text(
                text if values is None else _filled(text, values), encoding="utf-8"
            )
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}") from error


def write_filled_models(
    folder: Path, model: str, *, lora_dir: str | None = None, is_decoupled: bool = False
) -> None:
    """Write a repository for a model and its adapters.

    Raises ConfigError if there is no such folder.
    """
    values = {"engine_dir": _absolute(model), "decoupled_mode": str(is_decoupled)}
    if lora_dir is not None:
        values["lora_prefetch_dir"] = _absolute(lora_dir)
    write_five_models(folder, values)


def _absolute(folder: str) -> str:
    """Raises ConfigError if there is no such folder."""
    path = Path(folder).expanduser().absolute()
    if not path.is_dir():
        raise ConfigError(f"there is no folder {folder}")
    return str(path)


def _filled(text: str, values: Mapping[str, str]) -> str:
    """Values stand in quotes: what would end them is escaped."""
    template = string.Template(text)
    escaped = {
        name: value.replace("\\", "\\\\").replace('"', '\\"') for name, value in values.items()
    }
    unsaid = dict.fromkeys(template.get_identifiers(), "")
    return template.substitute({**unsaid, **FILLED, **escaped})


def _system(role: Role) -> str:
    if role is Role.ENSEMBLE:
        return 'platform: "ensemble"'
    backend = "${triton_backend}" if role is Role.TENSORRT_LLM else KINDS[role].backend
    return f'backend: "{backend}"'


_QUEUE = """dynamic_batching {
  preferred_batch_size: [ ${triton_max_batch_size} ]
  max_queue_delay_microseconds: ${max_queue_delay_microseconds}
  default_queue_policy: { max_queue_size: ${max_queue_size} }
}"""


def _rows(field: str, rows: Iterable[str]) -> str:
    body = ",\n".join(f"  {{\n{row}\n  }}" for row in rows)
    return f"{field} [\n{body}\n]"


def _tensor(name: str, datatype: str, dims: tuple[int, ...]) -> str:
    written = _TYPES.get(name, DATATYPES[datatype].config_name)
    sizes = ", ".join(str(dim) for dim in dims)
    return f'    name: "{name}"\n    data_type: {written}\n    dims: [ {sizes} ]'


def _input(row: InputSpec) -> str:
    lines = [_tensor(row.name, row.datatype, row.dims)]
    if row.has_scalar_reshape:
        lines.append("    reshape: { shape: [ ] }")
    if not row.required:
        lines.append("    optional: true")
    if row.is_ragged:
        lines.append("    allow_ragged_batch: true")
    return "\n".join(lines)


def _parameter(key: str, value: str) -> str:
    return f'parameters: {{\n  key: "{key}"\n  value: {{\n    string_value: "{value}"\n  }}\n}}'
