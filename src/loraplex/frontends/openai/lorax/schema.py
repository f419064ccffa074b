"""Bodies and responses of LoRAX's own routes."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import UNSET, Struct, UnsetType
from pydantic import Field

from loraplex.frontends.openai.schema import JsonBody


class Parameters(JsonBody):
    adapter_id: str | None = None
    """An adapter of the base model."""
    adapter_source: Literal["hub", "local", "s3", "pbase"] | None = None
    """No effect: adapters are loaded in advance."""
    api_token: str | None = None
    """No effect."""
    max_new_tokens: int | None = None
    """Default: the rest of the model's maximum length."""
    best_of: int | None = None
    """Number of outputs to generate; the likeliest is returned."""
    do_sample: bool | None = None
    """Sample; greedy if this, temperature, top_k and top_p are all absent."""
    temperature: float | None = None
    """0 is greedy."""
    top_k: int | None = None
    """-1 and 0 are all tokens."""
    top_p: float | None = None
    """More than 0, at most 1."""
    repetition_penalty: float | None = None
    """More than 0."""
    seed: int | None = None
    """64 bits."""
    stop: Annotated[list[str], Field(fail_fast=True)] | None = None
    """Include the stop string in the output."""
    ignore_eos_token: bool | None = None
    """The model's end token does not end the output."""
    truncate: int | None = None
    """Keep only the last so many tokens of a longer prompt."""
    return_full_text: bool | None = None
    """The output begins with the prompt."""
    details: bool | None = None
    """Return tokens and counts in addition to the text."""
    decoder_input_details: bool | None = None
    """Return the tokens of the prompt, if details is set; not in a stream."""
    return_k_alternatives: int | None = None
    """Number of likely tokens at each position, up to 20, with details or in a stream."""
    apply_chat_template: bool | None = None
    """The prompt is a user's message."""
    response_format: dict[str, Any] | None = None
    """json_object, with a schema."""


class GenerateBody(JsonBody):
    inputs: str
    """The prompt."""
    parameters: Parameters | None = None
    """See below."""
    stream: bool | None = None
    """Body of POST /."""


class AlternativeToken(Struct, frozen=True):
    id: int
    text: str
    logprob: float


class PrefillToken(Struct, frozen=True):
    id: int
    text: str
    logprob: float | None


class Token(Struct, frozen=True):
    id: int
    text: str
    logprob: float
    special: bool
    alternative_tokens: list[AlternativeToken] | UnsetType = UNSET


class Details(Struct, frozen=True):
    finish_reason: str
    prompt_tokens: int
    generated_tokens: int
    seed: int | None
    prefill: Sequence[PrefillToken]
    tokens: Sequence[Token]


class Generated(Struct, frozen=True):
    generated_text: str
    details: Details | UnsetType = UNSET


class StreamDetails(Struct, frozen=True):
    finish_reason: str
    prompt_tokens: int
    generated_tokens: int
    seed: int | None


class StreamedToken(Struct, frozen=True):
    """One event; the last has the whole text and the details."""

    token: Token
    generated_text: str | None = None
    details: StreamDetails | None = None
