"""Sockets between stages: bits arrive as they were sent, and an abort ends every wait."""

import contextlib
import logging
import threading
from collections.abc import Iterator

import msgspec
import pytest
import torch
import zmq

from loraplex.core.errors import DeviceLost, ErrorInfo
from loraplex.core.output import TokenLogprob
from loraplex.core.plan import RowResult
from loraplex.execution.steps.socket_links import SocketLinks
from loraplex.models.stages import PipelineStage
from support.naming import naming


@contextlib.contextmanager
def connected(num_stages: int, host: str = "") -> Iterator[list[SocketLinks]]:
    """Yield the links of one rank in each stage."""
    stages = [PipelineStage(index, num_stages) for index in range(num_stages)]
    with contextlib.ExitStack() as stack:
        links = [SocketLinks(stage, "secret", host) for stage in stages]
        for one in links:
            stack.callback(one.close)
        for one in links:
            one.connect([other.address for other in links])
        yield links


@pytest.mark.parametrize("host", ["", "127.0.0.1"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_bits_of_a_hidden_state(dtype: torch.dtype, host: str) -> None:
    hidden = torch.randn(7, 10).to(dtype)[:, ::2]
    hidden[0, 0] = float("nan")
    with connected(2, host=host) as (first, second):
        first.send_hidden(hidden)
        received = second.receive_hidden(7)
        received += 1  # the stage may write there
        first.send_hidden(hidden)
        again = second.receive_hidden(7)
    assert again.dtype is dtype
    assert torch.equal(again.view(torch.uint8), hidden.contiguous().view(torch.uint8))


def test_rows_reach_all_stages_before_the_last_in_their_order() -> None:
    rows = [
        RowResult(3, (5, 6), (TokenLogprob(5, -0.5, 1, ((5, -0.5),)),), forced_token_ids=(9,)),
        RowResult(4, error=ErrorInfo("row_failed", "no")),
    ]
    with connected(3) as (first, second, last):
        last.send_rows(rows)
        last.send_rows([])
        first.send_hidden(torch.zeros(1, 2))
        assert second.receive_rows() == rows, "a hidden state that came first waits"
        assert second.receive_hidden(1).tolist() == [[0, 0]]
        assert second.receive_rows() == []
        assert first.receive_rows() == rows


def test_an_abort_ends_a_wait() -> None:
    with connected(2) as (first, second):
        threading.Timer(0.05, second.abort, ["rank 0 was killed"]).start()
        with pytest.raises(DeviceLost, match=naming(0)):
            second.receive_hidden(1)
        second.abort("later")
        with pytest.raises(DeviceLost, match=naming(0)):
            second.receive_rows()
        assert second.wait_ns >= 0
        first.abort("it, too")


def test_stages_that_compute_different_steps() -> None:
    with connected(2) as (first, second):
        first.send_hidden(torch.zeros(3, 2))
        with pytest.raises(DeviceLost, match=r"stage 0 sent 3 tokens, .* has 4"):
            second.receive_hidden(4)


@pytest.mark.parametrize("frames", [[b"other", b"rows", b""], [b"secret", b"odd"], [b""]])
def test_messages_of_others_are_dropped(
    frames: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    with connected(2) as (first, _), zmq.Context() as context, context.socket(zmq.PUSH) as other:
        other.connect(first.address)
        other.send_multipart(frames)
        other.send_multipart([b"secret", b"rows", msgspec.msgpack.encode([RowResult(1)])])
        with caplog.at_level(logging.WARNING):
            assert first.receive_rows() == [RowResult(1)]
    assert "dropped a message" in caplog.text
