"""The names of request fields, by the system whose clients send them: kept by hand, and compared
with the `openai` package by a test. As of openai 3.54, vLLM 0.33, SGLang 0.5.23, LoRAX 0.12 and
llgtrt of April 2025.
"""

from typing import Final

Names = tuple[str, ...]


def _names(text: str) -> Names:
    return tuple(text.split())


OPENAI_COMPLETIONS: Final = _names(
    "model prompt best_of echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty "
    "seed stop stream stream_options suffix temperature top_p user"
)
OPENAI_CHAT: Final = _names(
    "messages model audio frequency_penalty function_call functions logit_bias logprobs "
    "max_completion_tokens max_tokens metadata modalities moderation n parallel_tool_calls "
    "prediction presence_penalty prompt_cache_key prompt_cache_options prompt_cache_retention "
    "reasoning_effort response_format safety_identifier seed service_tier stop store stream "
    "stream_options temperature tool_choice tools top_logprobs top_p user verbosity "
    "web_search_options"
)
OPENAI_STREAM_OPTIONS: Final = _names(
    "stream_options.include_usage stream_options.include_obfuscation"
)

OPENAI_EMBEDDINGS: Final = _names("input model dimensions encoding_format user")

VLLM_CLASSIFY: Final = _names(
    "model user truncate_prompt_tokens truncation_side request_id priority cache_salt "
    "add_special_tokens input messages use_activation add_generation_prompt chat_template_kwargs"
)

OPENAI_RESPONSES: Final = _names(
    "input model access_programs background background_options context_management conversation "
    "image include instructions max_output_tokens max_tool_calls metadata moderation "
    "parallel_tool_calls previous_response_id prompt prompt_cache_key prompt_cache_options "
    "prompt_cache_retention reasoning safety_identifier service_tier store stream stream_options "
    "temperature text tool_choice tools top_logprobs top_p truncation user"
)

VLLM: Final = _names(
    "stream_options.continuous_usage_stats use_beam_search top_k min_p repetition_penalty "
    "watermarking length_penalty stop_token_ids include_stop_str_in_output ignore_eos min_tokens "
    "skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens truncation_side "
    "prompt_logprobs logprob_token_ids allowed_token_ids bad_words add_special_tokens "
    "response_format structured_outputs guided_json guided_regex guided_choice guided_grammar "
    "guided_whitespace_pattern guided_decoding_backend structural_tag priority request_id "
    "session_id logits_processors return_tokens_as_token_ids return_token_ids "
    "routed_experts_prompt_start return_token_offsets return_mm_kwargs cache_salt "
    "kv_transfer_params ec_transfer_params vllm_xargs repetition_detection thinking_token_budget "
    "stream_interval"
)
"""Fields of completions and chat."""
VLLM_COMPLETIONS: Final = _names("prompt_embeds")
VLLM_CHAT: Final = _names(
    "best_of echo add_generation_prompt continue_final_message documents chat_template "
    "chat_template_kwargs mm_processor_kwargs media_io_kwargs include_reasoning "
    "return_prompt_text"
)
VLLM_TOKENIZE: Final = _names(
    "model prompt messages add_special_tokens add_generation_prompt continue_final_message "
    "return_token_strs chat_template chat_template_kwargs mm_processor_kwargs media_io_kwargs tools"
)
VLLM_DETOKENIZE: Final = _names("model tokens")
VLLM_STRUCTURED_OUTPUTS: Final = _names(
    "json regex choice grammar json_object disable_fallback disable_any_whitespace "
    "disable_additional_properties whitespace_pattern structural_tag"
)

SGLANG: Final = _names(
    "regex ebnf stop_regex no_stop_trim lora_path rid extra_key session_params custom_params "
    "custom_logit_processor images_config return_hidden_states return_routed_experts "
    "routed_experts_start_len return_cached_tokens_details bootstrap_host bootstrap_port "
    "bootstrap_room routed_dp_rank disagg_prefill_dp_rank data_parallel_rank ngram_corpus_id"
)
SGLANG_COMPLETIONS: Final = _names("json_schema custom_labels")
SGLANG_CHAT: Final = _names(
    "return_prompt_token_ids return_meta_info task separate_reasoning stream_reasoning reasoning "
    "max_dynamic_patch min_dynamic_patch use_audio_in_video input_ids"
)

LORAX: Final = _names(
    "ignore_eos_token adapter_id adapter_source merged_adapters api_token repetition_penalty top_k"
)
LORAX_PARAMETERS: Final = _names(
    "adapter_id adapter_source merged_adapters api_token best_of temperature repetition_penalty "
    "top_k top_p typical_p do_sample max_new_tokens ignore_eos_token return_full_text stop "
    "truncate watermark details decoder_input_details return_k_alternatives apply_chat_template "
    "seed response_format"
)
"""Fields of /generate, /generate_stream and /."""

LLAMA_CPP: Final = _names("cache_prompt id_slot timings_per_token return_progress keep_alive")
"""Those of llama.cpp's server, and Ollama's keep_alive."""
CODEX: Final = _names("client_metadata")
"""Sent by coding agents."""

LLGTRT: Final = _names(
    "lora_model load_lora_weights min_tokens min_p llg_log_level return_expanded_prompt "
    "response_format"
)
LLGTRT_CHAT: Final = _names("include_json_schema_in_prompt")
