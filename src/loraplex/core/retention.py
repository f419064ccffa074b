"""Retention of a request's KV in the prefix cache, in the terms of TensorRT-LLM."""

import itertools
from typing import NamedTuple

import msgspec

from loraplex.core.errors import InvalidParameterError

DEFAULT_PRIORITY = 35
MAX_PRIORITY = 100
MAX_RANGES = 256
"""Maximum number of token ranges of one request."""

_NS_PER_MS = 1_000_000


class TokenRangeRetention(msgspec.Struct, frozen=True, omit_defaults=True):
    """Retention of the blocks of prompt tokens start .. end - 1."""

    start: int
    end: int | None = None
    """None: to the end of the prompt."""
    priority: int = DEFAULT_PRIORITY
    """0 to 100: blocks of lower priority leave the cache first."""
    duration_ms: int | None = None
    """Time without use after which the priority falls back to the default; None: never."""


class KVRetention(msgspec.Struct, frozen=True, omit_defaults=True):
    ranges: tuple[TokenRangeRetention, ...] = ()
    decode_priority: int = DEFAULT_PRIORITY
    """Priority of the blocks of generated tokens."""
    decode_duration_ms: int | None = None


class BlockRetention(NamedTuple):
    """Retention that a request sets for one block."""

    priority: int = DEFAULT_PRIORITY
    duration_ns: int | None = None
    """Time without use until the priority falls back; None: for ever."""


def block_retention(
    retention: KVRetention, first_token: int, num_prompt_tokens: int
) -> BlockRetention | None:
    """Return the retention of the block that begins with this token; None if none is set."""
    if first_token >= num_prompt_tokens:
        return _of_block(retention.decode_priority, retention.decode_duration_ms)
    for entry in retention.ranges:
        if entry.start <= first_token and (entry.end is None or first_token < entry.end):
            return _of_block(entry.priority, entry.duration_ms)
    return None


def check_retention(retention: KVRetention) -> None:
    """Raise InvalidParameterError for values out of range, and for ranges that overlap."""
    if not isinstance(retention, KVRetention):
        raise _refusal(f"must be a KVRetention, got {retention!r}")
    if len(retention.ranges) > MAX_RANGES:
        raise _refusal(f"has {len(retention.ranges)} token ranges; at most {MAX_RANGES} may be")
    for entry in retention.ranges:
        _check_range(entry)
    _check_values("decode", retention.decode_priority, retention.decode_duration_ms)
    ordered = sorted(retention.ranges, key=lambda entry: entry.start)
    for left, right in itertools.pairwise(ordered):
        if left.end is None or left.end > right.start:
            raise _refusal(f"has token ranges that overlap: {_words(left)} and {_words(right)}")


def _of_block(priority: int, duration_ms: int | None) -> BlockRetention:
    return BlockRetention(priority, None if duration_ms is None else duration_ms * _NS_PER_MS)


def _check_range(entry: TokenRangeRetention) -> None:
    ends = (entry.start, 1 if entry.end is None else entry.end)
    if not all(type(end) is int for end in ends):
        raise _refusal(f"has a token range of other things than integers: {_words(entry)}")
    if entry.start < 0:
        raise _refusal(
            f"has a token range that starts at {entry.start}; it must start at 0 or later"
        )
    if entry.end is not None and entry.end <= entry.start:
        raise _refusal(
            f"has an empty token range: {_words(entry)}; its end must be after its start"
        )
    _check_values(f"token range {_words(entry)}", entry.priority, entry.duration_ms)


def _check_values(where: str, priority: int, duration_ms: int | None) -> None:
    if type(priority) is not int or not 0 <= priority <= MAX_PRIORITY:
        raise _refusal(f"({where}): priority must be 0 to {MAX_PRIORITY}, got {priority!r}")
    if duration_ms is not None and (type(duration_ms) is not int or duration_ms < 0):
        raise _refusal(f"({where}): duration must be at least 0 ms, got {duration_ms!r}")


def _words(entry: TokenRangeRetention) -> str:
    return f"{entry.start} to {'the end' if entry.end is None else entry.end}"


def _refusal(what: str) -> InvalidParameterError:
    return InvalidParameterError(f"retention {what}", param="retention")
