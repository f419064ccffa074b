"""traceparent and tracestate, as W3C's document has them."""

import pytest

from loraplex.frontends.telemetry.telemetry import (
    MAX_REQUEST_ID_LENGTH,
    request_id_problem,
    trace_parent,
    usable_request_id,
)

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize(("flags", "is_sampled"), [("01", True), ("00", False), ("03", True)])
def test_a_caller(flags, is_sampled):
    parent = trace_parent({"traceparent": f"00-{TRACE}-{SPAN}-{flags}", "tracestate": "a=b"})
    assert (parent.trace_id, parent.span_id, parent.state) == (TRACE, SPAN, "a=b")
    assert parent.is_sampled is is_sampled


def test_a_later_version():
    assert trace_parent({"traceparent": f"cc-{TRACE}-{SPAN}-01-what"}).trace_id == TRACE


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-what",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}",
        f"cc-{TRACE}-{SPAN}-01-" + "x" * 1000,
    ],
)
def test_what_cannot_be_used_begins_a_trace(text):
    first, second = trace_parent({"traceparent": text}), trace_parent({"traceparent": text})
    assert first.span_id == ""
    assert first.is_sampled
    assert len(first.trace_id) == 32
    assert first.trace_id not in (TRACE, second.trace_id)


def test_a_long_state_is_left_out():
    headers = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "a=" + "b" * 600}
    assert trace_parent(headers).state == ""


@pytest.mark.parametrize("text", ["abc", "~!", "a" * MAX_REQUEST_ID_LENGTH])
def test_ids_that_are_taken(text):
    assert (request_id_problem(text), usable_request_id(text)) == ("", text)


@pytest.mark.parametrize("text", ["a" * 257, "two words", "a\nb", "é", "\x7f"])
def test_ids_that_are_not(text):
    assert request_id_problem(text)
    assert len(usable_request_id(text)) == 32


def test_no_id():
    assert len(usable_request_id("")) == 32
