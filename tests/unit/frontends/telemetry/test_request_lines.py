"""Log lines of requests."""

import logging

import pytest

from loraplex.core.errors import InvalidParameterError
from loraplex.frontends.telemetry.request_lines import (
    SAMPLED_PER_SECOND,
    RequestLines,
    request_line,
)
from loraplex.serving.wire_request import WireRequest
from loraplex.testing.fake_clock import FakeClock


def wire_request(**fields: object) -> WireRequest:
    """Return a request that has ended."""
    return WireRequest(
        **{
            "protocol": "http",
            "method": "POST",
            "path": "/v1/completions",
            "client": "127.0.0.1",
            "request_id": "r",
            "headers": {},
            "trace_of": lambda _: None,
            "on_begin": lambda _: None,
            "on_end": lambda _: None,
            "status": "200",
            "started_ns": 1_000_000_000,
            "ended_ns": 1_250_000_000,
            **fields,
        }
    )


FAILED = {"status": "400", "error": InvalidParameterError("no", param="n"), "tenant": "t"}


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO)
    return caplog


def test_a_line():
    assert request_line(wire_request(**FAILED)) == (
        "POST /v1/completions 400, 0.250 s, tenant t, invalid_parameter"
    )


def test_a_hostile_path_stays_on_its_line():
    line = request_line(wire_request(path="/a\nI 2026 forged\x1b[2J" + "x" * 10_000))
    assert "/a\\nI 2026 forged\\x1b[2J" in line
    assert line.isprintable()
    assert len(line) < 1000


def test_all_requests(logged: pytest.LogCaptureFixture):
    lines = RequestLines(is_sampled=False, clock=FakeClock())
    for _ in range(100):
        lines(wire_request())
    assert len(logged.records) == 100


def test_a_sample_is_of_requests_that_matter(logged: pytest.LogCaptureFixture):
    lines = RequestLines(is_sampled=True, clock=FakeClock())
    lines(wire_request(path="/health"))
    assert not logged.records
    lines(wire_request(**FAILED))
    assert len(logged.records) == 1


def test_a_sample_is_limited_and_counts_the_others(logged: pytest.LogCaptureFixture):
    clock = FakeClock(5_000_000_000)
    lines = RequestLines(is_sampled=True, clock=clock)
    for _ in range(SAMPLED_PER_SECOND + 3):
        lines(wire_request(**FAILED))
    assert len(logged.records) == SAMPLED_PER_SECOND
    clock.advance_seconds(1)
    lines(wire_request(**FAILED))
    assert logged.records[-1].message.endswith(" (3 more requests are not listed)")


@pytest.mark.parametrize("is_sampled", [True, False])
@pytest.mark.parametrize("status", ["200", "503"])
def test_probes_are_logged_only_at_debug(
    caplog: pytest.LogCaptureFixture, is_sampled: bool, status: str
):
    lines = RequestLines(is_sampled=is_sampled, probes=["/health/ready"], clock=FakeClock())
    caplog.set_level(logging.DEBUG)
    lines(wire_request(method="GET", path="/health/ready", status=status))
    lines(wire_request(**FAILED))
    assert [record.levelno for record in caplog.records] == [logging.DEBUG, logging.INFO]
