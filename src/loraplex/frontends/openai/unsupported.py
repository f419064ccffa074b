"""Known and not in the schema: fields that clients of OpenAI, vLLM, SGLang, LoRAX and llgtrt send
and that are refused, or have no effect here. A neutral value (null, an empty list,
the default) is never refused.
"""

import difflib
import itertools
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from loraplex.core.errors import InvalidParameterError, UnsupportedFeatureError
from loraplex.core.support import Feature, Support
from loraplex.frontends.openai.errors import MAX_FAULTS, raise_errors
from loraplex.frontends.openai.schema import ChatBody, CompletionBody, JsonBody, TokenizeBody


class RefusedField(NamedTuple):
    """A field, its neutral values, and what to do instead."""

    field: str
    harmless: tuple[Any, ...] = ()
    advice: str = ""


EMPTY: tuple[Any, ...] = (None, {}, [], "")

OFF: tuple[Any, ...] = (None, False)

REFUSED = (
    # OpenAI's
    RefusedField("suffix", EMPTY, "put the text after the gap into the prompt"),
    RefusedField("tools", EMPTY, "they are for /v1/chat/completions"),
    RefusedField("tool_choice", (*EMPTY, "none", "auto"), "it is for /v1/chat/completions"),
    RefusedField("functions", EMPTY, "use tools in /v1/chat/completions"),
    RefusedField("function_call", (*EMPTY, "none", "auto"), "use tool_choice"),
    RefusedField("modalities", (*EMPTY, ["text"]), "only ['text'] is served"),
    RefusedField("audio", EMPTY, "only text is served"),
    RefusedField("moderation", EMPTY, "nothing is moderated here"),
    RefusedField(
        "web_search_options", EMPTY, "nothing is searched: put what was found into messages"
    ),
    # vLLM's
    RefusedField("prompt_embeds", EMPTY, "send the prompt as text or token ids"),
    RefusedField("logprob_token_ids", EMPTY, "logprobs has up to 20 likely tokens"),
    RefusedField("watermarking", OFF),
    RefusedField("structural_tag", EMPTY, "use response_format"),
    RefusedField("guided_whitespace_pattern", EMPTY, "write the white space into a guided_grammar"),
    RefusedField("logits_processors", EMPTY, "use logit_bias, allowed_token_ids or bad_words"),
    RefusedField("chat_template", EMPTY, "the template of the served model is used"),
    RefusedField("repetition_detection", EMPTY, "use no_repeat_ngram_size or a penalty"),
    RefusedField("kv_transfer_params", EMPTY, "one server computes prompt and output"),
    RefusedField("ec_transfer_params", EMPTY, "one server computes prompt and output"),
    RefusedField("vllm_xargs", EMPTY, "there are no extensions to read them"),
    RefusedField(
        "thinking_token_budget", (None, -1), "max_tokens is for reasoning and message together"
    ),
    # SGLang's
    RefusedField("reasoning", EMPTY, "use reasoning_effort"),
    RefusedField("stop_regex", EMPTY, "use stop, or a regex for the whole output"),
    RefusedField("extra_key", EMPTY, "use cache_salt"),
    RefusedField("input_ids", EMPTY, "send them as the prompt of /v1/completions"),
    RefusedField("session_params", EMPTY, "send the whole conversation: its KV is found again"),
    RefusedField("custom_logit_processor", EMPTY, "use logit_bias, allowed_token_ids or bad_words"),
    RefusedField("custom_params", EMPTY, "there is no custom_logit_processor to read them"),
    RefusedField("return_hidden_states", OFF),
    RefusedField("return_routed_experts", OFF),
    RefusedField("return_prompt_token_ids", OFF, "use return_token_ids"),
    RefusedField("return_meta_info", OFF, "use return_token_ids, logprobs and usage"),
    RefusedField("bootstrap_host", EMPTY, "one server computes prompt and output"),
    RefusedField("bootstrap_port", EMPTY, "one server computes prompt and output"),
    RefusedField("bootstrap_room", EMPTY, "one server computes prompt and output"),
    # LoRAX's
    RefusedField(
        "merged_adapters",
        EMPTY,
        "use adapters, each with a scale: what they change is added up, nothing is merged",
    ),
)

BY_FIELD = {refused.field: refused for refused in REFUSED}

WITHOUT_EFFECT = (
    # OpenAI's
    Feature("user", Support.NO_EFFECT, "tenants are distinguished by their API keys"),
    Feature("safety_identifier", Support.NO_EFFECT, "as user"),
    Feature("metadata", Support.NO_EFFECT, "nothing is stored"),
    Feature("client_metadata", Support.NO_EFFECT, "nothing is stored"),
    Feature("store", Support.NO_EFFECT, "nothing is stored"),
    Feature("service_tier", Support.NO_EFFECT, "there is one; see priority"),
    Feature("prompt_cache_key", Support.NO_EFFECT, "equal beginnings are found by themselves"),
    Feature("prompt_cache_options", Support.NO_EFFECT, "as prompt_cache_key"),
    Feature("prompt_cache_retention", Support.NO_EFFECT, "as prompt_cache_key"),
    Feature(
        "prediction", Support.NO_EFFECT, "draft tokens come from the text; see num_draft_tokens"
    ),
    Feature("verbosity", Support.NO_EFFECT, "use a message, or chat_template_kwargs"),
    Feature("stream_options.include_obfuscation", Support.NO_EFFECT, "nothing is padded"),
    # vLLM's
    Feature("spaces_between_special_tokens", Support.NO_EFFECT, "the tokenizer's own spaces stay"),
    Feature("guided_decoding_backend", Support.NO_EFFECT, "llguidance is always used"),
    Feature("mm_processor_kwargs", Support.NO_EFFECT, "there are no images"),
    Feature("media_io_kwargs", Support.NO_EFFECT, "there are no images"),
    Feature("session_id", Support.NO_EFFECT, "requests of a session are found by their tokens"),
    Feature("stream_interval", Support.NO_EFFECT, "tokens are sent as they come"),
    Feature("routed_experts_prompt_start", Support.NO_EFFECT, "see return_routed_experts"),
    Feature("return_token_offsets", Support.NO_EFFECT, "nor has it in vLLM's responses"),
    Feature("return_mm_kwargs", Support.NO_EFFECT, "nor has it in vLLM's responses"),
    # SGLang's
    Feature("stream_reasoning", Support.NO_EFFECT, "a stream has reasoning as it comes"),
    Feature("routed_experts_start_len", Support.NO_EFFECT, "see return_routed_experts"),
    Feature("return_cached_tokens_details", Support.NO_EFFECT, "see usage.prompt_tokens_details"),
    Feature("images_config", Support.NO_EFFECT, "there are no images"),
    Feature("max_dynamic_patch", Support.NO_EFFECT, "there are no images"),
    Feature("min_dynamic_patch", Support.NO_EFFECT, "there are no images"),
    Feature("use_audio_in_video", Support.NO_EFFECT, "there are no videos"),
    Feature("routed_dp_rank", Support.NO_EFFECT, "there is one engine for a model"),
    Feature("disagg_prefill_dp_rank", Support.NO_EFFECT, "there is one engine for a model"),
    Feature("data_parallel_rank", Support.NO_EFFECT, "there is one engine for a model"),
    Feature("ngram_corpus_id", Support.NO_EFFECT, "draft tokens come from the text"),
    Feature("custom_labels", Support.NO_EFFECT, "metrics have the labels model and adapter"),
    Feature("task", Support.NO_EFFECT, "no served template reads it"),
    # LoRAX's
    Feature("adapter_source", Support.NO_EFFECT, "adapters are loaded before: POST /v1/adapters"),
    Feature("api_token", Support.NO_EFFECT, "not needed for an adapter that is loaded"),
    # llama.cpp's and Ollama's
    Feature("cache_prompt", Support.NO_EFFECT, "equal beginnings are found by themselves"),
    Feature("id_slot", Support.NO_EFFECT, "requests are not bound to a slot"),
    Feature("timings_per_token", Support.NO_EFFECT, "see /v1/requests for the times of a request"),
    Feature("return_progress", Support.NO_EFFECT, "see /v1/requests for the phase of a request"),
    Feature("keep_alive", Support.NO_EFFECT, "base models stay loaded"),
)
"""Fields that are accepted with any value: they change nothing that a response shows."""

_KNOWN = frozenset(
    [
        *(name for body in (CompletionBody, ChatBody, TokenizeBody) for name in body.model_fields),
        *BY_FIELD,
        *(feature.name for feature in WITHOUT_EFFECT),
    ]
)
"""Fields that some server defines, for any of the routes that generate."""


def refuse_unsupported(body: JsonBody, table: Mapping[str, RefusedField] = BY_FIELD) -> None:
    """Raise UnsupportedFeatureError for the fields (of those not in the schema) that we know
    and do not serve, unless their values are neutral."""
    raise_errors(
        [
            _unsupported(table[field])
            for field, value in (body.model_extra or {}).items()
            if field in table and not _is_harmless(value, table[field])
        ]
    )


def refuse_undefined(body: JsonBody, more_known: Collection[str] = ()) -> None:
    """Raise InvalidParameterError for fields that no supported server defines: a misspelt limit
    must not be a request without a limit. more_known: further fields of the route."""
    undefined = (
        field for field in body.model_extra or {} if field not in _KNOWN and field not in more_known
    )
    # The search for a near name takes a while for each.
    raise_errors([_undefined(body, field) for field in itertools.islice(undefined, MAX_FAULTS + 1)])


def refuse_unknown(body: JsonBody, accepted: Collection[str] = ()) -> None:
    """Raise InvalidParameterError for fields that are not in the schema, nor accepted: where a
    misspelt field must not be a request without it."""
    known = ", ".join(type(body).model_fields)
    raise_errors(
        [
            InvalidParameterError(f"there is no field {field!r}; known: {known}", param=field)
            for field in body.model_extra or {}
            if field not in accepted
        ]
    )


def _unsupported(refused: RefusedField) -> UnsupportedFeatureError:
    advice = f"; {refused.advice}" if refused.advice else ""
    return UnsupportedFeatureError(f"{refused.field} is not supported{advice}", param=refused.field)


def _undefined(body: JsonBody, field: str) -> InvalidParameterError:
    near = difflib.get_close_matches(field, type(body).model_fields, n=1)
    meant = f"; did you mean {near[0]}?" if near else ""
    return InvalidParameterError(
        f"there is no field {field!r}{meant} (the server's setting unknown_fields = ignore accepts "
        "any)",
        param=field,
    )


def _is_harmless(value: Any, refused: RefusedField) -> bool:
    # 0 == False in Python: a JSON 0 is not the false that is let through.
    return any(type(value) is type(harmless) and value == harmless for harmless in refused.harmless)
