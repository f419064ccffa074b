"""Ids that clients give their requests, and ours for those that have none.

Headers: `x-request-id`; `traceparent` and `tracestate` (W3C Trace Context, level 1).
"""

import random
import re
from collections.abc import Mapping

from loraplex.serving.wire_request import TraceParent

HEADER = "x-request-id"
MAX_LENGTH = 256

PATTERN = "^[!-~]+$"
"""Visible ASCII: it goes into headers and logs as it is."""


_random = random.Random()
"""Seeded by the system. Ids must be unique, but need not be unpredictable."""


def random_id() -> str:
    """Return 32 hexadecimal digits."""
    return f"{_random.getrandbits(128):032x}"


def problem(text: str, name: str = HEADER) -> str:
    """What is wrong with a client's id, as a sentence that calls it by `name`; empty: nothing."""
    if len(text) > MAX_LENGTH:
        return f"{name} has {len(text)} characters; at most {MAX_LENGTH} are allowed"
    if not re.fullmatch(PATTERN, text):
        return f"{name} must be of visible ASCII characters, without blanks"
    return ""


def request_id(given: str) -> str:
    """The client's id if there is one that can be used, else one of ours."""
    return given if given and not problem(given) else random_id()


_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_MAX_LENGTH = 512
_SAMPLED = 0x01


def trace_parent(headers: Mapping[str, str]) -> TraceParent:
    """Where a request stands; without a usable `traceparent` it begins a trace of its own.

    A later version's first four fields are read as ours, as the rule has it; version ff and ids
    of zeros are not usable.
    """
    given = headers.get("traceparent")
    if given is None:
        return _new()
    text = given.strip()
    match = _PARENT.fullmatch(text) if len(text) <= _MAX_LENGTH else None
    if match is None:
        return _new()
    version, trace_id, span_id, flags, rest = match.groups()
    is_usable = version != "ff" and not (version == "00" and rest)
    if not is_usable or not int(trace_id, 16) or not int(span_id, 16):
        return _new()
    state = headers.get("tracestate", "")
    return TraceParent(
        trace_id,
        span_id,
        is_sampled=bool(int(flags, 16) & _SAMPLED),
        state=state if len(state) <= _MAX_LENGTH else "",
    )


def _new() -> TraceParent:
    return TraceParent(random_id(), "")
