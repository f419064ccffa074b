import asyncio
from collections.abc import AsyncGenerator, Sequence

import msgspec
import pytest

from loraplex.core.errors import EngineRestartedError
from loraplex.core.output import EngineOutput
from loraplex.deploy.relay import (
    MAX_LOSSES,
    MAX_RECORD_BYTES,
    Body,
    HttpCall,
    Message,
    Recorded,
    Relay,
    ReplicaLost,
    Start,
)
from loraplex.serving.continuation import Admitted, Taken, Unrecorded
from support.naming import naming

CALL = HttpCall("POST", "/v1/completions", b"", (), b"{}")
START = Start(200, ((b"content-type", b"text/event-stream"),))
TAKEN = Taken((EngineOutput(1),))


ADMITTED = Recorded.of(Admitted(b"f", 1, 2))
WHOLE: list[Message] = [
    ADMITTED,
    Recorded.of(TAKEN),
    START,
    Body(b"one "),
    Recorded.of(TAKEN),
    Body(b"two "),
    Recorded.of(TAKEN),
    Body(b"three"),
]


class Replicas:
    """Replicas that yield these messages one after another; each but the last is then lost."""

    def __init__(self, *responses: Sequence[Message]) -> None:
        self._responses = list(responses)
        self.calls: list[HttpCall] = []

    async def send(self, call: HttpCall) -> AsyncGenerator[list[Message], None]:
        self.calls.append(call)
        for message in self._responses.pop(0):
            yield [message]
        if self._responses:
            raise ReplicaLost("it was killed")


def relayed(replicas: Replicas, call: HttpCall = CALL) -> tuple[int, bytes]:
    async def relay() -> tuple[int, bytes]:
        messages = [message async for message in Relay(call, replicas.send).messages()]
        assert isinstance(messages[0], Start)
        return messages[0].status, b"".join(m.data for m in messages if isinstance(m, Body))

    return asyncio.run(relay())


@pytest.mark.parametrize("num_messages", range(1, len(WHOLE) + 1))
def test_a_response_continues_wherever_its_replica_ended(num_messages: int) -> None:
    replicas = Replicas(WHOLE[:num_messages], WHOLE)
    assert relayed(replicas) == (200, b"one two three")
    parts = [m.part for m in WHOLE[:num_messages] if isinstance(m, Recorded)]
    assert replicas.calls[1].former == tuple(parts)


def test_the_record_goes_on_at_the_second_replica() -> None:
    replicas = Replicas(WHOLE[:4], WHOLE[:6], WHOLE)
    assert relayed(replicas) == (200, b"one two three")
    assert [len(call.former) for call in replicas.calls] == [0, 2, 3]


def test_pieces_of_the_next_response_may_have_other_sizes() -> None:
    again = [*WHOLE[:3], Body(b"on"), Body(b"e tw"), Body(b"o three")]
    assert relayed(Replicas(WHOLE[:6], again)) == (200, b"one two three")


def test_another_response_is_not_sent_on() -> None:
    other = [*WHOLE[:3], Body(b"One two three")]
    with pytest.raises(EngineRestartedError, match="differs from what was sent"):
        relayed(Replicas(WHOLE[:4], other))
    with pytest.raises(EngineRestartedError, match="is shorter"):
        relayed(Replicas(WHOLE[:6], WHOLE[:4]))
    with pytest.raises(EngineRestartedError, match="responds 503"):
        relayed(Replicas(WHOLE[:4], [ADMITTED, Start(503, ())]))


def test_a_request_that_was_not_admitted_is_sent_again_only_if_it_is_safe() -> None:
    with pytest.raises(EngineRestartedError, match="send it again"):
        relayed(Replicas([], WHOLE))
    get = msgspec.structs.replace(CALL, method="GET")
    assert relayed(Replicas([], WHOLE[2:]), get) == (200, b"one two three")


def test_a_request_without_a_record_begins_again_until_the_client_has_something() -> None:
    several = Recorded.of(Unrecorded("it has several prompts"))
    more = Recorded.of(TAKEN)
    replicas = Replicas([ADMITTED, several, more], [ADMITTED, more, several, more], WHOLE)
    assert relayed(replicas) == (200, b"one two three")
    assert [call.former for call in replicas.calls] == [()] * 3
    with pytest.raises(EngineRestartedError, match="it has several prompts"):
        relayed(Replicas([ADMITTED, several, START, Body(b"o")], WHOLE))


def test_a_large_record_is_given_up() -> None:
    large = Recorded(bytes(MAX_RECORD_BYTES))
    with pytest.raises(EngineRestartedError, match=naming(8, "MiB")):
        relayed(Replicas([ADMITTED, large, large, START, Body(b"o")], WHOLE))


def test_a_reader_that_leaves_closes_the_response() -> None:
    closed = []

    async def send(call: HttpCall) -> AsyncGenerator[list[Message], None]:
        try:
            yield WHOLE
        finally:
            closed.append(call)

    async def leave() -> None:
        messages = Relay(CALL, send).messages()
        await anext(messages)
        await messages.aclose()
        assert closed == [CALL]

    asyncio.run(leave())


def test_a_request_that_ends_one_replica_after_another_is_given_up() -> None:
    replicas = Replicas(*[WHOLE[:4]] * (MAX_LOSSES + 2))
    with pytest.raises(EngineRestartedError, match=naming(MAX_LOSSES + 1, 4)):
        relayed(replicas)
    assert len(replicas.calls) == MAX_LOSSES + 1
