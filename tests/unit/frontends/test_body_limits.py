"""Bodies of many values are refused before they are parsed, and long ones are parsed in threads."""

import json
import threading

import pytest

from loraplex.core.errors import PayloadTooLargeError
from loraplex.core.server_config import ServerConfig
from loraplex.frontends.body_limits import JsonLimits, Turns, off_loop, parsed
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


@pytest.mark.parametrize("num_bytes", [10, 100_000])
async def test_the_value_of_a_body_is_returned(num_bytes):
    def thread():
        return threading.current_thread()

    in_loop = await parsed(num_bytes, thread) is threading.current_thread()
    assert in_loop is (num_bytes == 10)


def test_a_pause_follows_each_long_body():
    """It is as long as the parser took, also of one that failed; later bodies need no pause."""
    time, pauses = [100.0], []

    def sleep(seconds):
        pauses.append(round(seconds, 6))
        time[0] += seconds

    def take(seconds):
        time[0] += seconds
        if seconds == 0.03:
            raise ValueError("no body")

    turns = Turns(lambda: time[0], sleep)
    turns.take(lambda: take(0.02))
    with pytest.raises(ValueError, match="no body"):
        turns.take(lambda: take(0.03))
    turns.take(lambda: take(5.0))
    turns.take(lambda: take(0.01))
    assert pauses == [0.02, 0.03, 0.1]
    time[0] += 0.02
    turns.take(lambda: take(0.0))
    assert len(pauses) == 3


def test_no_two_long_bodies_are_parsed_at_once():
    turns, parsing, most = Turns(), [], []

    def parse():
        parsing.append(1)
        threading.Event().wait(0.001)  # others would begin meanwhile
        most.append(len(parsing))
        parsing.pop()

    threads = [threading.Thread(target=turns.take, args=(parse,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 8
