"""What a client may send: the request bodies of the OpenAI room, and their llgtrt and vLLM fields.

Types are strict (no "5" for 5) and every field may be null, which means absent. Ranges are not
checked here: SamplingParams knows them. A field that is not declared is kept aside, not refused:
`unsupported` names the ones that we know and do not serve, the rest is ignored as the originals do.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

EXPECTED = {
    "prompt": "a string, a list of strings, a list of token ids or a list of such lists",
    "stop": "a string or a list of strings",
    "messages": "a list of messages",
    "messages[]": "an object with a role and a content",
    "messages[].content": "a string or a list of content parts",
    "stop_token_ids": "a list of token ids",
    "tokens": "a list of token ids",
    "allowed_token_ids": "a list of token ids",
    "logit_bias": "an object of token ids and numbers",
    "bad_words": "a string or a list of strings",
    "guided_json": "a JSON schema",
    "guided_choice": "a list of strings",
    "early_stopping": 'true, false or "never"',
}
"""What is right where a field takes more than one type: texts for an error message."""

TokenIds = Annotated[list[int], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
# One bad item ends a branch: a prompt of a million token ids is not a million errors.
Prompt = Annotated[
    str | Texts | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)],
    Field(union_mode="left_to_right"),
]


class Body(BaseModel):
    """A JSON object of which unknown fields end up in `model_extra`."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)


class StreamOptions(Body):
    include_usage: bool | None = None


class SamplingBody(Body):
    """What everything that generates has in common: how tokens are drawn, and when it ends."""

    model: str | None = None
    load_lora_weights: Literal["auto", "always", "never"] | None = None
    """llgtrt's, see core.adapter.LoadPolicy."""
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | Texts | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    top_p_decay: float | None = None
    """This and the two below are TensorRT-LLM's."""
    top_p_min: float | None = None
    top_p_reset_ids: int | None = None
    no_repeat_ngram_size: int | None = None
    logit_bias: dict[str, float] | None = None
    """Token ids in decimal, as OpenAI has it."""
    allowed_token_ids: TokenIds | None = None
    bad_words: str | Texts | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    """vLLM's, as the guided_* are."""
    guided_json: str | dict[str, Any] | bool | None = None
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None
    num_draft_tokens: int | None = None
    priority: int | None = None
    timeout_seconds: float | None = None
    user: str | None = None


class GenerationBody(SamplingBody):
    """What completions and chat have in common."""

    lora_model: str | None = None
    """llgtrt's way to choose an adapter."""
    lora_scale: float | None = None
    """How strongly the one adapter is applied; 1 if it is absent."""
    adapters: list[Any] | None = None
    """Several, see frontends.adapter_choices. An empty list is none."""
    n: int | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    """vLLM's: the beams are best_of, or n."""
    beam_width: int | None = None
    """The same, if neither is meant."""
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    beam_search_diversity_rate: float | None = None
    prompt_logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionBody(GenerationBody):
    prompt: Prompt
    logprobs: int | None = None
    echo: bool | None = None


class ContentPart(Body):
    type: str
    text: str | None = None


class Message(Body):
    """One turn; what a chat template may read beside role and content is in `model_extra`."""

    role: str
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None


Messages = Annotated[list[Message], Field(fail_fast=True)]


class ChatBody(GenerationBody):
    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompareBody(SamplingBody):
    """POST /v1/compare: a prompt or a conversation. An unknown field is an error."""

    prompt: Prompt | None = None
    """One."""
    messages: Messages | None = None
    adapters: list[Any]
    """One answer each: null for the base model, an adapter, or a list of adapters."""
    logprobs: int | None = None
    """How many likely tokens are shown beside each one."""
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeBody(Body):
    """vLLM's: a prompt or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(Body):
    model: str | None = None
    tokens: TokenIds


class LoadLoraBody(Body):
    """vLLM's."""

    lora_name: str
    lora_path: str
    base_model_name: str | None = None
    load_inplace: bool | None = None


class UnloadLoraBody(Body):
    lora_name: str
    lora_int_id: int | None = None
    """vLLM's own number: taken, and of no use here."""


class AdapterBody(Body):
    """POST /v1/adapters. Of this body and those below an unknown field is an error."""

    name: str
    path: str
    model: str | None = None
    """The base model; None is the default one."""
    task_id: int | None = None
    replace: bool | None = None
    dry_run: bool | None = None
    canary: bool | None = None


class RollbackBody(Body):
    version: int | None = None
    """None: the one before the present."""


class PinBody(Body):
    version: int | None = None
    """None: the present one."""
    pinned: bool | None = None
    """False takes the pin away."""


class AliasBody(Body):
    alias: str
    replace: bool | None = None
    """Turn an alias of another adapter over to this one."""
