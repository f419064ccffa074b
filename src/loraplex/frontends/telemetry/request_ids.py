"""Ids that clients give their requests (x-request-id), and ours for those that have none."""

import random
import re

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
