"""The tensors of `ensemble`: text in, text out.

Names, types, dimensions and order are those of the TensorRT-LLM backend's repository (version of
May 2025); `min_length` and `random_seed` are its names of January 2024. What its ensemble does not
pass on is taken here, undeclared, under the names that `tensorrt_llm` has without `runtime_`.
"""

from types import MappingProxyType

from loraplex.frontends.kserve.models.kinds import (
    CACHE_OUTPUTS,
    ENCODER_DECODER,
    INLINE_LORA,
    OF_PROMPT_TUNING,
    PADS_BEAMS,
    PROMPT_TUNING,
    SEQUENCE_OUTPUTS,
    TIMING_OUTPUTS,
    UNDECLARED,
    ModelKind,
    OutputSpec,
    no_effect,
    or_uint32,
    refused,
    used,
)

_INPUTS = (
    used("text_input", "BYTES", required=True),
    refused("decoder_text_input", "BYTES", reason=ENCODER_DECODER, neutral=(b"",)),
    or_uint32(used("max_tokens", "INT32", required=True)),
    used("num_return_sequences", "INT32", field="n"),
    used("bad_words", "BYTES", (-1,)),
    used("stop_words", "BYTES", (-1,)),
    used("exclude_input_in_output", "BOOL", field="excludes_input"),
    or_uint32(used("end_id", "INT32")),
    or_uint32(no_effect("pad_id", "INT32", reason=PADS_BEAMS)),
    or_uint32(used("top_k", "INT32")),
    used("top_p", "FP32"),
    used("temperature", "FP32"),
    used("length_penalty", "FP32"),
    used("repetition_penalty", "FP32"),
    used("min_tokens", "INT32"),
    used("presence_penalty", "FP32"),
    used("frequency_penalty", "FP32"),
    used("seed", "UINT64"),
    used("return_log_probs", "BOOL", field="returns_log_probs"),
    used("return_context_logits", "BOOL"),
    used("return_generation_logits", "BOOL"),
    used("return_perf_metrics", "BOOL", field="returns_perf_metrics"),
    or_uint32(used("beam_width", "INT32")),
    used("stream", "BOOL", field="is_streamed"),
    refused("prompt_embedding_table", "FP16", (-1, -1), reason=PROMPT_TUNING),
    refused("prompt_table_extra_id", "UINT64", reason=PROMPT_TUNING, neutral=(0,)),
    or_uint32(no_effect("prompt_vocab_size", "INT32", reason=OF_PROMPT_TUNING)),
    used("embedding_bias_words", "BYTES", (-1,)),
    used("embedding_bias_weights", "FP32", (-1,)),
    used("lora_task_id", "UINT64"),
    *INLINE_LORA,
    used("guided_decoding_guide_type", "BYTES"),
    used("guided_decoding_guide", "BYTES"),
    or_uint32(used("min_length", "INT32", field="min_tokens", is_declared=False)),
    used("random_seed", "UINT64", field="seed", is_declared=False),
    *UNDECLARED,
)

_OUTPUTS = (
    OutputSpec("text_output", "BYTES", (-1,)),
    *SEQUENCE_OUTPUTS,
    *CACHE_OUTPUTS,
    *TIMING_OUTPUTS,
)

ENSEMBLE = ModelKind(
    name="ensemble",
    platform="ensemble",
    backend="",
    inputs=_INPUTS,
    outputs=_OUTPUTS,
    takes_text=True,
    ends_by_default=True,
    response_parameters=MappingProxyType(
        {"sequence_id": 0, "sequence_start": False, "sequence_end": False}
    ),
)
