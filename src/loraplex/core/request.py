"""A request, twice: as the client meant it, and as the engine is told."""

import enum
from collections.abc import Sequence
from typing import Final

import msgspec

from loraplex.core.adapter import AdapterChoice, AdapterUse, LoadPolicy
from loraplex.core.errors import (
    InvalidParameterError,
    InvalidRequestError,
    TokenOutOfVocabularyError,
)
from loraplex.core.retention import KVRetention
from loraplex.core.sampling_params import SamplingParams

RequestId = int
"""Ours: uint64, unique in a server's life. The client's own string is kept beside it."""

MAX_ADAPTERS: Final = 16
"""Of one request."""
MAX_SCALE: Final = 100.0
"""How strongly an adapter may be applied, either way. Far below, answers are noise already."""


class TruncationSide(enum.StrEnum):
    """Where tokens of a prompt go away."""

    LEFT = "left"
    RIGHT = "right"


class PromptTruncation(msgspec.Struct, frozen=True):
    """How much of a prompt is used, where it is longer."""

    max_tokens: int | None
    """None: as many as leave room for max_tokens new ones."""
    side: TruncationSide = TruncationSide.LEFT


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a client asked for, free of the protocol that it used."""

    request_id: RequestId
    model: str
    """Name of a served base model."""
    prompt: str | tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    adapters: tuple[AdapterChoice, ...] = ()
    """Empty: the base model. Several: what each of them changes is added up."""
    load_policy: LoadPolicy = LoadPolicy.AUTO
    client_request_id: str = ""
    """The client's own id: may be empty, may repeat."""
    shown_special_ids: tuple[int, ...] = ()
    """Special tokens that are part of the text although all others are skipped."""
    add_special_tokens: bool = True
    """False where the prompt text already holds them (a rendered chat template)."""
    truncation: PromptTruncation | None = None
    """None: a prompt that is too long is an error."""
    cache_salt: str = ""
    """Of the client's own: only requests with an equal one share KV blocks."""
    priority: int = 0
    """Lower is sooner."""
    timeout_seconds: float | None = None
    end_id: int | None = None
    """The end-of-text token instead of the model's own; -1: none."""
    retention: KVRetention | None = None


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """An admitted request: tokens, digests and absolute times only."""

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    """`max_tokens` and `seed` are set."""
    eos_token_ids: tuple[int, ...]
    adapters: tuple[AdapterUse, ...]
    """Each digest once, ascending; no scale is 0. So one composition has one salt."""
    kv_salt: bytes
    """Hashed into every KV block: prompts share blocks only if it is equal."""
    tenant: str
    priority: int
    share_weight: float = 1.0
    """More than 0. Of its adapter or tenant, whichever are served alike: one of weight 2 gets
    twice the tokens."""
    arrival_ns: int
    deadline_ns: int | None
    requires_resident: bool = False
    """Refuse it if an adapter would have to be read from its file first."""
    retention: KVRetention | None = None
    outputs: tuple[tuple[int, ...], ...] = ()
    """By sequence, the tokens that an engine gave before it died: they are not given again."""
    ended: tuple[int, ...] = ()
    """Indices of the sequences that had ended by then."""
    prompt_scores_told: bool = False
    """Its prompt log probabilities (and logits) were delivered by then."""
    num_restarts: int = 0
    """Engines that died while it was in them. Above 0, it is accepted already: no queue is too
    full for it."""


def check_adapters(adapters: Sequence[AdapterChoice]) -> None:
    """Raise InvalidParameterError for too many adapters, or a scale that is out of its range."""
    if len(adapters) > MAX_ADAPTERS:
        raise InvalidParameterError(
            f"adapters has {len(adapters)} entries; at most {MAX_ADAPTERS} are allowed in one "
            "request",
            param="adapters",
        )
    for adapter in adapters:
        if not abs(adapter.scale) <= MAX_SCALE:  # true for NaN, too
            raise InvalidParameterError(
                f"an adapter's scale must be in [{-MAX_SCALE:g}, {MAX_SCALE:g}], got "
                f"{adapter.scale:g}",
                param="adapters",
            )


def check_prompt_tokens(token_ids: tuple[int, ...], vocab_size: int) -> None:
    """Raise a LoraplexError for an empty prompt, or a token that the model does not have."""
    if not token_ids:
        raise InvalidRequestError("the prompt has no tokens; at least one is needed")
    for token_id in (min(token_ids), max(token_ids)):
        if not 0 <= token_id < vocab_size:
            raise TokenOutOfVocabularyError(
                f"token {token_id} is not in the model's vocabulary of {vocab_size} tokens"
            )
