import pytest

from loraplex.core.errors import PayloadTooLargeError
from loraplex.core.principal import LOCAL
from loraplex.frontends.kserve.http.body import HttpRequest
from loraplex.frontends.streams import ClientDisconnectedError
from support.naming import refused


def request(*messages: dict, declared: str | None = None) -> HttpRequest:
    waiting = iter(messages)

    async def receive():
        return next(waiting)

    headers = {} if declared is None else {"content-length": declared}
    return HttpRequest(headers, receive, LOCAL)


def part(data: bytes, *, more: bool = False) -> dict:
    return {"type": "http.request", "body": data, "more_body": more}


async def test_a_body_in_pieces():
    parts = (part(b"ab", more=True), part(b"", more=True), part(b"c"))
    assert await request(*parts).body(3) == b"abc"
    assert await request({"type": "http.request"}).body(3) == b""


async def test_a_body_that_says_it_is_too_large_is_not_read():
    with refused(PayloadTooLargeError, 3):
        await request(declared="4").body(3)


@pytest.mark.parametrize("declared", ["3", "x", "-1", "9" * 30])
async def test_a_body_that_is_too_large_whatever_it_says(declared):
    with pytest.raises(PayloadTooLargeError):
        await request(part(b"ab", more=True), part(b"cd", more=True), declared=declared).body(3)


async def test_a_client_that_goes_before_its_body_came():
    with pytest.raises(ClientDisconnectedError):
        await request(part(b"ab", more=True), {"type": "http.disconnect"}).body(3)
