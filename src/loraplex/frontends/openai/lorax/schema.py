"""The bodies of LoRAX's own routes, and what they answer."""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Struct, UnsetType
from pydantic import Field

from loraplex.frontends.openai.schema import Body


class Parameters(Body):
    adapter_id: str | None = None
    """An adapter of the base model."""
    adapter_source: Literal["hub", "local", "s3", "pbase"] | None = None
    """Without effect: adapters are loaded before."""
    api_token: str | None = None
    """Without effect."""
    max_new_tokens: int | None = None
    """Absent: as many as there is room for."""
    best_of: int | None = None
    """So many answers are made, the likeliest comes back."""
    do_sample: bool | None = None
    """Without this, temperature, top_k and top_p, the answer is greedy."""
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
    """The answer ends with the text that ended it."""
    ignore_eos_token: bool | None = None
    """The model's end token does not end the answer."""
    truncate: int | None = None
    """Of a longer prompt only the last tokens are used."""
    return_full_text: bool | None = None
    """The answer begins with the prompt."""
    details: bool | None = None
    """Tokens and counts beside the text."""
    decoder_input_details: bool | None = None
    """With details, the tokens of the prompt; not in a stream."""
    return_k_alternatives: int | None = None
    """With details or in a stream, the likeliest tokens at each position, up to 20."""
    apply_chat_template: bool | None = None
    """The prompt is a user's message."""
    response_format: dict[str, Any] | None = None
    """json_object, with a schema."""


class GenerateBody(Body):
    inputs: str
    """The prompt."""
    parameters: Parameters | None = None
    """See below."""
    stream: bool | None = None
    """Of POST /."""


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
    prefill: list[PrefillToken]
    tokens: list[Token]


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
