"""How long a request's KV is worth keeping, as TensorRT-LLM's retention inputs say it."""

import msgspec

DEFAULT_PRIORITY = 35
MAX_PRIORITY = 100


class TokenRangeRetention(msgspec.Struct, frozen=True, omit_defaults=True):
    """Of the blocks of prompt tokens start .. end - 1."""

    start: int
    end: int | None = None
    """None: to the end of the prompt."""
    priority: int = DEFAULT_PRIORITY
    """0 to 100: blocks of lower priority leave the cache first."""
    duration_ms: int | None = None
    """After so long without use the priority is the default one; None: never."""


class KVRetention(msgspec.Struct, frozen=True, omit_defaults=True):
    ranges: tuple[TokenRangeRetention, ...] = ()
    decode_priority: int = DEFAULT_PRIORITY
    """Of the blocks of generated tokens."""
    decode_duration_ms: int | None = None
