"""What a client may send to /v1/responses. The text under a field is its row's note in the docs."""

from typing import Annotated, Any, Literal

from pydantic import Field

from loraplex.frontends.openai.schema import AdaptedBody, JsonBody, StreamOptions

Items = Annotated[list[dict[str, Any]], Field(fail_fast=True)]


class TextConfig(JsonBody):
    format: dict[str, Any] | None = None
    """Type text, json_object or json_schema (enforced, strict or not)."""
    verbosity: Literal["low", "medium", "high"] | None = None
    """No effect: use the instructions."""


class Reasoning(JsonBody):
    effort: str | None = None
    """The variable reasoning_effort of the chat template; `none` also sets enable_thinking to
    false."""
    summary: Literal["auto", "concise", "detailed"] | None = None
    """No effect: reasoning comes whole, nothing is summed up."""


class ResponsesBody(AdaptedBody):
    input: str | Items
    """A text, or a list of messages, function calls, their outputs and reasoning items."""
    instructions: str | None = None
    """A system message before the conversation; not carried over by previous_response_id."""
    max_output_tokens: int | None = None
    """Maximum for reasoning and message together. Default: the rest of the maximum length."""
    include: list[str] | None = None
    """message.output_text.logprobs; OpenAI's other names are for features that are not served."""
    top_logprobs: int | None = None
    """Likely tokens per position, 0 to 20, with include message.output_text.logprobs."""
    text: TextConfig | None = None
    """format: text, json_object or json_schema, enforced; verbosity has no effect."""
    tools: list[Any] | None = None
    """Up to 128 functions; `strict` ones and required ones are enforced by a grammar. Tools of
    OpenAI's other types are left out, with a note in the response's `loraplex.notes`."""
    tool_choice: str | dict[str, Any] | None = None
    """none, auto, required, a named function, or allowed_tools."""
    parallel_tool_calls: bool | None = None
    """False: at most one call in a message."""
    stream: bool | None = None
    """Server-sent events with a type each; no `[DONE]` at the end."""
    stream_options: StreamOptions | None = None
    """Taken with stream; the last event has the usage anyway."""
    truncation: Literal["auto", "disabled"] | None = None
    """`auto`: the oldest turns are left out until the rest fits; `disabled`: 400 if it does not."""
    metadata: dict[str, str] | None = None
    """Up to 16 pairs, 64 and 512 characters; comes back."""
    user: str | None = None
    """Returned as sent; tenants are distinguished by their API keys."""
    safety_identifier: str | None = None
    """Returned as sent, like user."""
    prompt_cache_key: str | None = None
    """Comes back; equal beginnings are found by themselves."""
    store: bool | None = None
    """True if absent: the response is kept in memory for a while, for its tenant only."""
    previous_response_id: str | None = None
    """The conversation up to that response comes before the input."""
    reasoning: Reasoning | None = None
    """effort is a variable of the chat template; summary has no effect."""
    service_tier: str | None = None
    """Any; there is one, `default`."""
    max_tool_calls: int | None = None
    """Comes back; it is for tools that OpenAI runs itself."""
    background: bool | None = None
    """False; true is refused: use stream."""
    include_reasoning: bool | None = None
    """False: the model's reasoning is left out."""
    documents: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    """Documents for templates that use them."""
    chat_template_kwargs: dict[str, Any] | None = None
    """More variables of the chat template."""
    cache_salt: str | None = None
    """1 to 1024 characters: only requests with an equal one share KV blocks."""
    request_id: str | None = None
    """The id in the server's log, where there is no x-request-id header."""
    rid: str | None = None
    """Synonym of request_id."""
