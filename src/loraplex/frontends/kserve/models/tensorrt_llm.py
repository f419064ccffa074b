"""The tensors of `tensorrt_llm`: token ids in, token ids out.

Names, types, dimensions and order are those of the TensorRT-LLM backend's repository (version of
May 2025, and `return_num_*_tokens` of its successor); `min_length` and `random_seed` are its names
of January 2024. `no_repeat_ngram_size`, `multimodal_embedding` and `return_kv_cache_reuse_stats`
its code reads, undeclared; `num_draft_tokens` is ours.
"""

from loraplex.frontends.kserve.models.kinds import (
    CACHE_OUTPUTS,
    ENCODER_DECODER,
    INLINE_LORA,
    MULTIMODAL,
    PROMPT_TUNING,
    TIMING_OUTPUTS,
    ModelKind,
    OutputSpec,
    no_effect,
    refused,
    scalar,
    used,
)

_SPECULATION = "speculative decoding from the request"

_INPUTS = (
    used("input_ids", "INT32", (-1,), ragged=True),
    refused("encoder_input_features", "FP16", (-1, -1), reason=ENCODER_DECODER, ragged=True),
    scalar(refused("encoder_output_lengths", "INT32", reason=ENCODER_DECODER, neutral=(0,))),
    scalar(used("input_lengths", "INT32", required=True)),
    scalar(used("request_output_len", "INT32", field="max_tokens", required=True)),
    scalar(used("num_return_sequences", "INT32", field="n")),
    refused("draft_input_ids", "INT32", (-1,), reason=_SPECULATION, ragged=True),
    no_effect("decoder_input_ids", "INT32", (-1,), ragged=True),  # preprocessing makes one pad id
    scalar(no_effect("decoder_input_lengths", "INT32")),
    refused("draft_logits", "FP32", (-1, -1), reason=_SPECULATION, ragged=True),
    scalar(no_effect("draft_acceptance_threshold", "FP32")),  # speculation with a draft only
    scalar(used("end_id", "INT32")),
    scalar(no_effect("pad_id", "INT32")),  # pads beams of unequal length; the answer pads with -1
    used("stop_words_list", "INT32", (2, -1), field="stop_words", ragged=True),
    used("bad_words_list", "INT32", (2, -1), field="bad_words", ragged=True),
    used("embedding_bias", "FP32", (-1,), ragged=True),
    scalar(used("beam_width", "INT32")),
    scalar(used("temperature", "FP32")),
    scalar(used("runtime_top_k", "INT32", field="top_k")),
    scalar(used("runtime_top_p", "FP32", field="top_p")),
    scalar(used("runtime_top_p_min", "FP32", field="top_p_min")),
    scalar(used("runtime_top_p_decay", "FP32", field="top_p_decay")),
    scalar(used("runtime_top_p_reset_ids", "INT32", field="top_p_reset_id")),
    scalar(used("len_penalty", "FP32", field="length_penalty")),
    scalar(used("early_stopping", "BOOL")),
    scalar(used("repetition_penalty", "FP32")),
    scalar(used("min_tokens", "INT32")),
    scalar(used("beam_search_diversity_rate", "FP32")),
    scalar(used("presence_penalty", "FP32")),
    scalar(used("frequency_penalty", "FP32")),
    scalar(used("seed", "UINT64")),
    scalar(used("return_log_probs", "BOOL", field="returns_log_probs")),
    scalar(used("return_context_logits", "BOOL")),
    scalar(used("return_generation_logits", "BOOL")),
    scalar(used("return_perf_metrics", "BOOL", field="returns_perf_metrics")),
    scalar(used("exclude_input_in_output", "BOOL", field="excludes_input")),
    scalar(used("stop", "BOOL")),
    scalar(used("streaming", "BOOL", field="is_streamed")),
    refused("prompt_embedding_table", "FP16", (-1, -1), reason=PROMPT_TUNING, ragged=True),
    refused(
        "prompt_table_extra_ids",
        "UINT64",
        (-1,),
        reason=PROMPT_TUNING,
        neutral=(0,),
        ragged=True,
    ),
    scalar(no_effect("prompt_vocab_size", "INT32")),  # describes prompt_embedding_table
    refused("cross_attention_mask", "BOOL", (-1, -1), reason=MULTIMODAL, ragged=True),
    refused("mrope_rotary_cos_sin", "FP32", (-1,), reason=MULTIMODAL, ragged=True),
    refused("mrope_position_deltas", "INT64", reason=MULTIMODAL, ragged=True),
    refused("skip_cross_attn_blocks", "BOOL", reason=MULTIMODAL, neutral=(False,), ragged=True),
    scalar(used("lora_task_id", "UINT64")),
    *INLINE_LORA,
    refused("context_phase_params", "UINT8", (-1,), reason="disaggregated serving", ragged=True),
    used("retention_token_range_starts", "INT32", (-1,), ragged=True),
    used("retention_token_range_ends", "INT32", (-1,), ragged=True),
    used("retention_token_range_priorities", "INT32", (-1,), ragged=True),
    used("retention_token_range_durations_ms", "INT32", (-1,), ragged=True),
    used("retention_decode_priority", "INT32", ragged=True),
    used("retention_decode_duration_ms", "INT32", ragged=True),
    used("guided_decoding_guide_type", "BYTES", ragged=True),
    used("guided_decoding_guide", "BYTES", ragged=True),
    used("lookahead_window_size", "INT32", ragged=True),
    used("lookahead_ngram_size", "INT32", ragged=True),
    used("lookahead_verification_set_size", "INT32", ragged=True),
    scalar(used("return_num_input_tokens", "BOOL", field="returns_num_input_tokens")),
    scalar(used("return_num_output_tokens", "BOOL", field="returns_num_output_tokens")),
    used("no_repeat_ngram_size", "INT32", is_declared=False),
    refused("multimodal_embedding", "FP16", (-1, -1), reason=MULTIMODAL, is_declared=False),
    no_effect("return_kv_cache_reuse_stats", "BOOL", is_declared=False),  # now perf metrics
    used("num_draft_tokens", "INT32", is_declared=False),
    used("min_length", "INT32", field="min_tokens", is_declared=False),
    used("random_seed", "UINT64", field="seed", is_declared=False),
)

_OUTPUTS = (
    OutputSpec("output_ids", "INT32", (-1, -1)),  # clients read it as the first output
    OutputSpec("sequence_length", "INT32", (-1,)),
    OutputSpec("cum_log_probs", "FP32", (-1,)),
    OutputSpec("output_log_probs", "FP32", (-1, -1)),
    OutputSpec("context_logits", "FP32", (-1, -1)),
    OutputSpec("generation_logits", "FP32", (-1, -1, -1)),
    OutputSpec("batch_index", "INT32"),
    OutputSpec("sequence_index", "INT32"),
    OutputSpec("context_phase_params", "UINT8", (-1,)),
    *CACHE_OUTPUTS,
    *TIMING_OUTPUTS,
    OutputSpec("num_input_tokens", "INT32"),
    OutputSpec("num_output_tokens", "INT32"),
)

TENSORRT_LLM = ModelKind(
    name="tensorrt_llm",
    platform="",
    backend="tensorrtllm",
    inputs=_INPUTS,
    outputs=_OUTPUTS,
    takes_text=False,
    ends_by_default=False,
)
