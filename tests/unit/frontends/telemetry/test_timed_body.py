"""The time that a body may take, and who else cancels its reader."""

import asyncio

import pytest

from loraplex.core.errors import BodyTimeoutError
from loraplex.frontends.telemetry.http import TimedBody

PART = {"type": "http.request", "body": b"x", "more_body": True}
END = {"type": "http.request", "body": b"", "more_body": False}


def body(*messages: dict, seconds: float) -> TimedBody:
    """Whose last message is never followed by another."""
    waiting = list(messages)

    async def receive():
        if waiting:
            return waiting.pop(0)
        return await asyncio.Event().wait()

    return TimedBody(receive, seconds)


async def test_all_parts_share_one_limit():
    late = body(PART, PART, seconds=0.05)
    assert await late.receive() == PART
    assert await late.receive() == PART
    with pytest.raises(BodyTimeoutError, match=r"did not come within 0\.05 seconds"):
        await late.receive()
    assert late.is_late
    assert asyncio.current_task().cancelling() == 0


async def test_behind_the_body_nothing_is_late():
    whole = body(END, seconds=0.02)
    await whole.receive()
    waiting = asyncio.create_task(whole.receive())
    await asyncio.sleep(0.06)
    assert not waiting.done()
    waiting.cancel()


async def test_a_body_that_came_stops_the_clock():
    whole = body(END, seconds=0.02)
    await whole.receive()
    await asyncio.sleep(0.06)
    assert not whole.is_late


async def test_who_else_cancels_the_reader_does_cancel_it():
    reader = asyncio.create_task(body(seconds=60).receive())
    await asyncio.sleep(0.01)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader


async def test_late_and_cancelled_is_cancelled():
    late = body(seconds=60)
    reader = asyncio.create_task(late.receive())
    await asyncio.sleep(0.01)
    late._expire(reader)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader


async def test_an_error_of_its_own_passes():
    async def receive():
        raise TimeoutError

    with pytest.raises(TimeoutError):
        await TimedBody(receive, 60).receive()
