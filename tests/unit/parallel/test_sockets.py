"""Sockets between ranks: who may speak, and what is dropped."""

import contextlib

import pytest
import zmq

from loraplex.core.errors import ErrorInfo
from loraplex.parallel.messages import Begin, Hello, LeaveLoop, LoadDone, RankFailed, encode
from loraplex.parallel.sockets import RankServer, RankSocket, RankUnreachable

HELLO = Hello("secret", 1, {}, b"address")
SECONDS = 60.0


@pytest.fixture(params=["", "127.0.0.1"])
def server(request):
    with contextlib.closing(RankServer("secret", request.param)) as made:
        yield made


@pytest.fixture
def connect(server):
    with contextlib.ExitStack() as stack:

        def make():
            return stack.enter_context(contextlib.closing(RankSocket(server.address)))

        yield make


def test_a_rank_is_known_by_its_first_message(server, connect):
    first, second = connect(), connect()
    second.send(Hello("secret", 2, {}, b""))
    assert server.receive(SECONDS) == (2, Hello("secret", 2, {}, b""))
    first.send(HELLO)
    assert server.receive(SECONDS) == (1, HELLO)
    first.send(LoadDone(7, None, 5))
    assert server.receive(SECONDS) == (1, LoadDone(7, None, 5))
    server.broadcast(Begin({0: b"x"}))
    server.send(2, LeaveLoop())
    assert first.receive(SECONDS) == Begin({0: b"x"})
    assert [second.receive(SECONDS), second.receive(SECONDS)] == [Begin({0: b"x"}), LeaveLoop()]


def test_a_rank_that_cannot_even_begin_may_say_why(server, connect):
    failed = RankFailed("secret", 1, ErrorInfo("x", "no memory"))
    connect().send(failed)
    assert server.receive(SECONDS) == (1, failed)


@pytest.mark.parametrize(
    "message",
    [
        Hello("guessed", 1, {}, b""),
        RankFailed("guessed", 1, ErrorInfo("x", "y")),
        LoadDone(7, None, 5),
        LeaveLoop(),
    ],
)
def test_others_are_not_heard(server, connect, message, caplog):
    connect().send(message)
    rank = connect()
    rank.send(HELLO)
    found = [server.receive(SECONDS)]
    assert found == [(1, HELLO)], "what came first was dropped"
    server.broadcast(LeaveLoop())
    assert rank.receive(SECONDS) == LeaveLoop()


@pytest.mark.parametrize("frames", [[b"\xc1"], [b""], [encode(HELLO), b"more"]])
def test_what_is_no_message_is_dropped(server, connect, frames):
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(server.address)
        socket.send_multipart(frames)
        rank = connect()
        rank.send(HELLO)
        assert server.receive(SECONDS) == (1, HELLO)


def test_no_second_process_takes_the_place_of_a_rank(server, connect):
    rank, other = connect(), connect()
    rank.send(HELLO)
    assert server.receive(SECONDS) == (1, HELLO)
    other.send(HELLO)
    rank.send(LoadDone(1, None, 1))
    assert server.receive(SECONDS) == (1, LoadDone(1, None, 1))
    server.send(1, LeaveLoop())
    assert rank.receive(SECONDS) == LeaveLoop()
    assert other.receive(0.01) is None


def send_until_noticed(server):
    while True:
        server.send(1, LeaveLoop())


def test_a_rank_that_is_gone_is_unreachable(server):
    rank = RankSocket(server.address)
    rank.send(HELLO)
    assert server.receive(SECONDS) == (1, HELLO)
    rank.close()
    with pytest.raises(RankUnreachable, match="rank 1"):
        send_until_noticed(server)


def test_an_address_that_is_taken():
    with pytest.raises(zmq.ZMQError):
        RankServer("secret", "192.0.2.254")
