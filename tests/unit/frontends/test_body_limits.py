"""Bodies of many values are refused before they are parsed, and long ones are parsed in threads."""

import json
import threading

import pytest

from loraplex.core.errors import PayloadTooLargeError
from loraplex.core.server_config import ServerConfig
from loraplex.frontends.body_limits import JsonLimits, off_loop
from support.naming import naming

LIMITS = JsonLimits(max_bytes=10_000, max_values=400)


@pytest.mark.parametrize(
    "value",
    [
        [0] * 399,
        {str(number): 0.5 for number in range(199)},
        [[]] * 98,
        [{"a": 1}] * 98,
        ", [ {" * 500,
        ['", [' * 300, '\\", {' * 300, "\\"],
    ],
)
def test_what_is_within_the_limits(value):
    LIMITS.check(json.dumps(value, separators=(",", ":")).encode())


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ([0] * 400, ("400 values", "at most 400")),
        ({str(number): 0.5 for number in range(200)}, ("400 values", "max_request_values 400")),
        (["", '"', '\\"', '\\\\"'] * 100, ("400 values", "max_request_values 400")),
        ([[]] * 99, ("100 lists", "at most 100")),
        ([{"a": 1}] * 99, ("100 lists", "max_request_values 400")),
        ([[[[]]]] * 33, ("100 lists", "max_request_values 400")),
        ("x" * 10_000, (10002, 10000, "max_json_bytes")),
    ],
)
def test_what_is_beyond_the_limits(value, named):
    with pytest.raises(PayloadTooLargeError, match=naming(*named)):
        LIMITS.check(json.dumps(value, separators=(",", ":")).encode())


def test_a_smaller_body_has_less_json():
    assert JsonLimits.of(ServerConfig(max_body_bytes=1000)).max_bytes == 1000
    assert JsonLimits.of(ServerConfig()).max_bytes == 8 << 20


async def test_long_bodies_are_parsed_off_the_loop():
    here = threading.current_thread()
    assert await off_loop(1000, threading.current_thread) is here
    assert await off_loop(100_000, threading.current_thread) is not here
