"""A request, twice: as the client meant it, and as the engine is told."""

import msgspec

from loraplex.core.adapter import AdapterChoice, AdapterUse
from loraplex.core.sampling_params import SamplingParams

RequestId = int
"""Ours: uint64, unique in a server's life. The client's own string is kept beside it."""


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a client asked for, free of the protocol that it used."""

    request_id: RequestId
    model: str
    """Name of a served base model."""
    prompt: str | tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    adapters: tuple[AdapterChoice, ...] = ()
    """Empty: the base model."""
    client_request_id: str = ""
    """The client's own id: may be empty, may repeat."""
    add_special_tokens: bool = True
    """False where the prompt text already holds them (a rendered chat template)."""
    priority: int = 0
    """Lower is sooner."""
    timeout_seconds: float | None = None


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """An admitted request: tokens, digests and absolute times only."""

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    """`max_tokens` and `seed` are set."""
    eos_token_ids: tuple[int, ...]
    adapters: tuple[AdapterUse, ...]
    kv_salt: bytes
    """Hashed into every KV block: prompts share blocks only if it is equal."""
    tenant: str
    priority: int
    arrival_ns: int
    deadline_ns: int | None
