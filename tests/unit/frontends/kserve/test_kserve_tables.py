"""The tables of the models against what the backends' repositories declare, row by row."""

import pytest

from loraplex.frontends.kserve.models.kinds import (
    BLS,
    ENSEMBLE,
    POSTPROCESSING,
    PREPROCESSING,
    TENSORRT_LLM,
    VLLM,
)

INPUTS = {
    "preprocessing": """
        QUERY* BYTES 1; DECODER_QUERY BYTES 1; IMAGE_BYTES UINT8 -1,-1,-1,-1; IMAGE_URL BYTES 1;
        VIDEO_BYTES UINT8 -1,-1,-1,-1; REQUEST_OUTPUT_LEN* INT32 1; BAD_WORDS_DICT BYTES -1;
        STOP_WORDS_DICT BYTES -1; EMBEDDING_BIAS_WORDS BYTES -1; EMBEDDING_BIAS_WEIGHTS FP32 -1;
        END_ID INT32 1; PAD_ID INT32 1; PROMPT_TABLE_EXTRA_ID UINT64 1""",
    "postprocessing": "TOKENS_BATCH* INT32 -1,-1; SEQUENCE_LENGTH* INT32 -1",
    "ensemble": """
        text_input* BYTES 1; decoder_text_input BYTES 1; max_tokens* INT32 1;
        num_return_sequences INT32 1; bad_words BYTES -1; stop_words BYTES -1;
        exclude_input_in_output BOOL 1; end_id INT32 1; pad_id INT32 1; top_k INT32 1; top_p FP32 1;
        temperature FP32 1; length_penalty FP32 1; repetition_penalty FP32 1; min_tokens INT32 1;
        presence_penalty FP32 1; frequency_penalty FP32 1; seed UINT64 1; return_log_probs BOOL 1;
        return_context_logits BOOL 1; return_generation_logits BOOL 1; return_perf_metrics BOOL 1;
        beam_width INT32 1; stream BOOL 1; prompt_embedding_table FP16 -1,-1;
        prompt_table_extra_id UINT64 1; prompt_vocab_size INT32 1; embedding_bias_words BYTES -1;
        embedding_bias_weights FP32 -1; lora_task_id UINT64 1; lora_weights FP16 -1,-1;
        lora_config INT32 -1,3; guided_decoding_guide_type BYTES 1;
        guided_decoding_guide BYTES 1""",
    "tensorrt_llm": """
        input_ids INT32 -1; encoder_input_features FP16 -1,-1; encoder_output_lengths INT32 1;
        input_lengths* INT32 1; request_output_len* INT32 1; num_return_sequences INT32 1;
        draft_input_ids INT32 -1; decoder_input_ids INT32 -1; decoder_input_lengths INT32 1;
        draft_logits FP32 -1,-1; draft_acceptance_threshold FP32 1; end_id INT32 1; pad_id INT32 1;
        stop_words_list INT32 2,-1; bad_words_list INT32 2,-1; embedding_bias FP32 -1;
        beam_width INT32 1; temperature FP32 1; runtime_top_k INT32 1; runtime_top_p FP32 1;
        runtime_top_p_min FP32 1; runtime_top_p_decay FP32 1; runtime_top_p_reset_ids INT32 1;
        len_penalty FP32 1; early_stopping BOOL 1; repetition_penalty FP32 1; min_tokens INT32 1;
        beam_search_diversity_rate FP32 1; presence_penalty FP32 1; frequency_penalty FP32 1;
        seed UINT64 1; return_log_probs BOOL 1; return_context_logits BOOL 1;
        return_generation_logits BOOL 1; return_perf_metrics BOOL 1; exclude_input_in_output BOOL 1;
        stop BOOL 1; streaming BOOL 1; prompt_embedding_table FP16 -1,-1;
        prompt_table_extra_ids UINT64 -1; prompt_vocab_size INT32 1;
        cross_attention_mask BOOL -1,-1; mrope_rotary_cos_sin FP32 -1;
        mrope_position_deltas INT64 1;
        skip_cross_attn_blocks BOOL 1; lora_task_id UINT64 1; lora_weights FP16 -1,-1;
        lora_config INT32 -1,3; context_phase_params UINT8 -1;
        retention_token_range_starts INT32 -1;
        retention_token_range_ends INT32 -1; retention_token_range_priorities INT32 -1;
        retention_token_range_durations_ms INT32 -1; retention_decode_priority INT32 1;
        retention_decode_duration_ms INT32 1; guided_decoding_guide_type BYTES 1;
        guided_decoding_guide BYTES 1; lookahead_window_size INT32 1; lookahead_ngram_size INT32 1;
        lookahead_verification_set_size INT32 1; return_num_input_tokens BOOL 1;
        return_num_output_tokens BOOL 1""",
    "vllm": """
        text_input* BYTES 1; image BYTES -1; stream BOOL 1; sampling_parameters BYTES 1;
        exclude_input_in_output BOOL 1; return_finish_reason BOOL 1;
        return_cumulative_logprob BOOL 1; return_logprobs BOOL 1; return_num_input_tokens BOOL 1;
        return_num_output_tokens BOOL 1; embedding_request BYTES 1""",
}
INPUTS["tensorrt_llm_bls"] = (
    INPUTS["ensemble"]
    + """;
        image_input FP16 -1,3,-1,-1; image_bytes_input UINT8 -1,-1,-1,-1; image_url_input BYTES 1;
        video_bytes_input UINT8 -1,-1,-1,-1; num_draft_tokens INT32 1; use_draft_logits BOOL 1"""
)

_MEASURED = """
        kv_cache_alloc_new_blocks INT32 1; kv_cache_reused_blocks INT32 1;
        kv_cache_alloc_total_blocks INT32 1; arrival_time_ns INT64 1;
        first_scheduled_time_ns INT64 1; first_token_time_ns INT64 1; last_token_time_ns INT64 1;
        acceptance_rate FP32 1; total_accepted_draft_tokens INT32 1; total_draft_tokens INT32 1"""
_LOGITS = """
        cum_log_probs FP32 -1; output_log_probs FP32 -1,-1; context_logits FP32 -1,-1;
        generation_logits FP32 -1,-1,-1; batch_index INT32 1; sequence_index INT32 1;"""
OUTPUTS = {
    "preprocessing": """
        INPUT_ID INT32 -1; REQUEST_INPUT_LEN INT32 1; DECODER_INPUT_ID INT32 -1;
        REQUEST_DECODER_INPUT_LEN INT32 1; BAD_WORDS_IDS INT32 2,-1; STOP_WORDS_IDS INT32 2,-1;
        EMBEDDING_BIAS FP32 -1; REQUEST_OUTPUT_LEN INT32 -1; OUT_END_ID INT32 1; OUT_PAD_ID INT32 1;
        OUT_PROMPT_TABLE_EXTRA_IDS UINT64 -1; PIXEL_VALUES FP16 -1,-1,-1,-1;
        ASPECT_RATIO_IDS INT64 -1; ASPECT_RATIO_MASK INT64 -1,-1;
        CROSS_ATTENTION_MASK INT64 -1,-1,-1;
        IMAGE_SIZES INT64 2; IS_VIDEO_INPUT BOOL 1; ATTENTION_MASK INT64 -1; IMAGE_GRID_THW INT64 3;
        VISION_INPUT_ID INT32 -1""",
    "postprocessing": "OUTPUT BYTES -1",
    "ensemble": f"text_output BYTES -1; {_LOGITS} {_MEASURED}",
    "tensorrt_llm_bls": f"text_output BYTES -1; {_LOGITS} {_MEASURED}",
    "tensorrt_llm": f"""
        output_ids INT32 -1,-1; sequence_length INT32 -1; {_LOGITS} context_phase_params UINT8 -1;
        {_MEASURED}; num_input_tokens INT32 1; num_output_tokens INT32 1""",
    "vllm": """
        text_output BYTES -1; finish_reason BYTES -1; cumulative_logprob FP32 -1; logprobs BYTES -1;
        num_input_tokens UINT32 1; num_output_tokens UINT32 -1""",
}
KINDS = {
    kind.name: kind for kind in (PREPROCESSING, TENSORRT_LLM, POSTPROCESSING, ENSEMBLE, BLS, VLLM)
}


def listed(text):
    return [" ".join(row.split()) for row in text.split(";") if row.strip()]


def row_of(spec, mark=""):
    return f"{spec.name}{mark} {spec.datatype} {','.join(map(str, spec.dims))}"


@pytest.mark.parametrize("name", KINDS)
def test_inputs(name):
    rows = [row_of(row, "*" if row.required else "") for row in KINDS[name].declared_inputs]
    assert rows == listed(INPUTS[name])


@pytest.mark.parametrize("name", KINDS)
def test_outputs(name):
    assert [row_of(row) for row in KINDS[name].declared_outputs] == listed(OUTPUTS[name])


@pytest.mark.parametrize("name", KINDS)
def test_no_name_is_there_twice(name):
    kind = KINDS[name]
    for rows in (kind.inputs, kind.outputs):
        names = [row.name for row in rows]
        assert len(names) == len(set(names))


def test_old_names_are_understood_everywhere_and_shown_nowhere():
    for kind in (ENSEMBLE, BLS, TENSORRT_LLM):
        for old, field in (("min_length", "min_tokens"), ("random_seed", "seed")):
            row = kind.inputs_by_name[old]
            assert (row.field, row.is_declared) == (field, False)
