"""How the ensemble of a TensorRT-LLM repository passes tensors from one of its models to the next.

A name with an underscore in front is of a tensor that only the steps see.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

from loraplex.frontends.kserve.models.kinds import (
    ENSEMBLE,
    POSTPROCESSING,
    PREPROCESSING,
    TENSORRT_LLM,
    ModelKind,
)

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
    shown = {row.name: row.name for row in ENSEMBLE.outputs if TENSORRT_LLM.output(row.name)}
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
