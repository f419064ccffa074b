"""OpenAI's response object of /v1/responses, its items and its events."""

from collections.abc import Sequence
from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from loraplex.frontends.openai.responses import ContentLogprob, Details

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(Struct, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: Sequence[ContentLogprob] = []


class ReasoningText(Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning_text"):
    text: str


class MessageItem(Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    id: str
    role: Literal["assistant"] = "assistant"
    status: Status
    content: list[OutputText]


class ReasoningItem(Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    id: str
    status: Status
    summary: list[Any] = []
    content: list[ReasoningText]


class CallItem(Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    id: str
    status: Status
    call_id: str
    name: str
    arguments: str


OutputItem = MessageItem | ReasoningItem | CallItem


class InputTokensDetails(Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(Struct, frozen=True):
    reasoning_tokens: int


class ResponseUsage(Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(Struct, frozen=True):
    code: str
    message: str


class IncompleteDetails(Struct, frozen=True):
    reason: str


class ResponseObject(Struct, frozen=True, kw_only=True):
    """A response, of which `replace` makes the next state."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    """Unix seconds."""
    completed_at: int | None = None
    status: Status = "in_progress"
    background: bool = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: str = "default"
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None = None
    user: str | None
    loraplex: Details | UnsetType = UNSET


class Event(Struct, frozen=True, kw_only=True, tag_field="type"):
    """One event of a stream; its tag is its name."""

    sequence_number: int
    """Number of the event, starting at 0."""


class ResponseEvent(Event, frozen=True, kw_only=True):
    response: ResponseObject


class Created(ResponseEvent, frozen=True, tag="response.created"):
    pass


class InProgress(ResponseEvent, frozen=True, tag="response.in_progress"):
    pass


class Completed(ResponseEvent, frozen=True, tag="response.completed"):
    pass


class Incomplete(ResponseEvent, frozen=True, tag="response.incomplete"):
    pass


class Failed(ResponseEvent, frozen=True, tag="response.failed"):
    pass


class ErrorEvent(Event, frozen=True, kw_only=True, tag="error"):
    code: str | None
    message: str
    param: str | None


class ItemEvent(Event, frozen=True, kw_only=True):
    output_index: int


class ItemAdded(ItemEvent, frozen=True, kw_only=True, tag="response.output_item.added"):
    item: OutputItem


class ItemDone(ItemEvent, frozen=True, kw_only=True, tag="response.output_item.done"):
    item: OutputItem


class InItemEvent(ItemEvent, frozen=True, kw_only=True):
    item_id: str


class PartEvent(InItemEvent, frozen=True, kw_only=True):
    content_index: int = 0


class PartAdded(PartEvent, frozen=True, kw_only=True, tag="response.content_part.added"):
    part: OutputText | ReasoningText


class PartDone(PartEvent, frozen=True, kw_only=True, tag="response.content_part.done"):
    part: OutputText | ReasoningText


class TextDelta(PartEvent, frozen=True, kw_only=True, tag="response.output_text.delta"):
    delta: str
    logprobs: Sequence[ContentLogprob]


class TextDone(PartEvent, frozen=True, kw_only=True, tag="response.output_text.done"):
    text: str
    logprobs: Sequence[ContentLogprob]


class ReasoningDelta(PartEvent, frozen=True, kw_only=True, tag="response.reasoning_text.delta"):
    delta: str


class ReasoningDone(PartEvent, frozen=True, kw_only=True, tag="response.reasoning_text.done"):
    text: str


class ArgumentsDelta(
    InItemEvent, frozen=True, kw_only=True, tag="response.function_call_arguments.delta"
):
    delta: str


class ArgumentsDone(
    InItemEvent, frozen=True, kw_only=True, tag="response.function_call_arguments.done"
):
    name: str
    arguments: str


AnyEvent = (
    Created
    | InProgress
    | Completed
    | Incomplete
    | Failed
    | ErrorEvent
    | ItemAdded
    | ItemDone
    | PartAdded
    | PartDone
    | TextDelta
    | TextDone
    | ReasoningDelta
    | ReasoningDone
    | ArgumentsDelta
    | ArgumentsDone
)


class ItemList(Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Deleted(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class InputTokens(Struct, frozen=True, kw_only=True):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int
