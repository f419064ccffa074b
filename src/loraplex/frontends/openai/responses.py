"""OpenAI's response objects.

msgspec structs, because a field that is absent (UNSET) and one that is null differ on this wire,
and because a chunk is encoded for every token.
"""

from collections.abc import Sequence
from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

LogprobByToken = dict[str, float]


class PromptTokensDetails(Struct, frozen=True):
    cached_tokens: int


class Usage(Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET


class AdapterUsed(Struct, frozen=True):
    """An adapter that was used; the digest is that of its content."""

    name: str
    digest: str
    scale: float


class Timing(Struct, frozen=True, kw_only=True):
    """Times of one prompt's output in seconds; null where it did not happen."""

    queue_seconds: float | None
    """Time from arrival to the first step: waiting for a slot, KV blocks and adapters."""
    adapter_wait_seconds: float | None
    """Part of it until the last of its adapters was on the device."""
    adapter_load_seconds: float
    """Part of it for reading adapters into the host's memory."""
    adapter_copy_seconds: float
    """Part of it for copying adapters to the device."""
    prefill_seconds: float | None
    """Time from the first step to the first token."""
    first_token_seconds: float | None
    """Time from arrival to the first token."""
    seconds_per_token: float | None
    """The mean time from one token to the next."""
    total_seconds: float | None
    """Time from arrival to the last token."""
    preemptions: int
    cached_tokens: int
    """Prompt tokens whose KV was cached."""
    draft_tokens: int
    """Number of draft tokens."""
    accepted_draft_tokens: int
    """Number of draft tokens that were accepted."""
    restarts: int
    """Engines that died while it was in them."""


class Details(Struct, frozen=True):
    """Fields that OpenAI's responses do not have, under the key `loraplex`."""

    adapters: list[AdapterUsed]
    timing: list[Timing]
    """One for each prompt."""
    notes: list[str] | UnsetType = UNSET
    """What was left out of the request; absent if nothing was."""


class CompletionLogprobs(Struct, frozen=True):
    """The four lists are as long as each other; an offset counts characters of `text`."""

    tokens: Sequence[str]
    token_logprobs: Sequence[float | None]
    top_logprobs: Sequence[LogprobByToken | None]
    text_offset: Sequence[int]


class RankedLogprob(Struct, frozen=True):
    """vLLM's description of one candidate of a prompt position."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = Sequence[dict[str, RankedLogprob] | None]
"""Log probabilities by position; keys are token ids in decimal."""


class CompletionChoice(Struct, frozen=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    """Prompt tokens; in a stream, in the first chunk of the choice."""


class Completion(Struct, frozen=True, kw_only=True):
    """A whole response, or one chunk of it."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: Sequence[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    expanded_prompt: str | UnsetType = UNSET
    loraplex: Details | UnsetType = UNSET


class TopLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True):
    content: Sequence[ContentLogprob]
    refusal: None = None


class CalledFunction(Struct, frozen=True):
    name: str
    arguments: str
    """A JSON text."""


class ToolCall(Struct, frozen=True):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class ChatMessage(Struct, frozen=True):
    content: str | None
    """Null where there is none but tool calls."""
    role: str = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    """Reasoning before the message, under the name that most clients know."""
    reasoning: str | UnsetType = UNSET
    """The same, under the newer name."""
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Struct, frozen=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    prompt_text: str | UnsetType = UNSET
    expanded_prompt: str | UnsetType = UNSET
    loraplex: Details | UnsetType = UNSET


class FunctionDelta(Struct, frozen=True):
    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(Struct, frozen=True):
    """The first one of a call has its id, type and name; all have a piece of its arguments."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatDelta(Struct, frozen=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(Struct, frozen=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    """This and the next two: of the first chunk of all."""
    prompt_text: str | UnsetType = UNSET
    expanded_prompt: str | UnsetType = UNSET
    loraplex: Details | UnsetType = UNSET


class Capabilities(Struct, frozen=True, kw_only=True):
    """Kinds of requests that a base model accepts."""

    chat: bool
    """Whether it has a chat template."""
    tools: bool
    """Whether chats may have tools: a template without them gets them in the messages."""
    reasoning: bool
    """Whether its reasoning is returned apart from the content."""
    images: bool
    """Whether messages may have images."""
    completions: bool
    """Whether it generates text: it has an output layer."""
    embeddings: bool
    """Whether it gives vectors of texts, as its folder describes them."""
    scores: bool
    """Whether it scores pairs of texts without an adapter, as its folder states."""
    classification: bool
    """Whether it has a classification head. Adapters may have their own: see `num_labels`."""


class FieldDefaults(Struct, frozen=True, kw_only=True):
    """Default value of each field of a body, by route; null: nothing is applied, or the value
    depends on the request or on a setting."""

    compare: dict[str, Any]
    chat: dict[str, Any]
    completion: dict[str, Any]


class ModelEntry(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["loraplex"] = "loraplex"
    root: str
    """The base model, of a base model itself too."""
    parent: str | None
    """An adapter's base model."""
    max_model_len: int
    device: str | UnsetType = UNSET
    """cpu, cuda or cuda:N. This and the next are of base models only."""
    device_name: str | UnsetType | None = UNSET
    """Name of the GPU or processor; null until the engine has started once."""
    dtype: str | UnsetType = UNSET
    """Data type of the weights that are not quantized, and of the arithmetic."""
    quantization: str | UnsetType | None = UNSET
    """Precision or stored format of the linear weights; null: they have the type `dtype`."""
    num_labels: int | UnsetType = UNSET
    """Labels of the classification head, of a base model or an adapter that has one."""
    capabilities: Capabilities | UnsetType = UNSET
    defaults: FieldDefaults | UnsetType = UNSET


class ModelList(Struct, frozen=True):
    data: list[ModelEntry]
    object: Literal["list"] = "list"


class AdapterDeleted(Struct, frozen=True, kw_only=True):
    name: str
    object: Literal["adapter", "alias"]
    deleted: bool = True
    digest: str
    version: int
    """Version that the unload has in shared declarations, else the one that was unloaded."""
    num_ended: int
    """Requests that were ended with an error."""


class Tokens(Struct, frozen=True):
    """vLLM's response of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(Struct, frozen=True):
    prompt: str
