"""Sockets between the stages of a pipeline. Each rank binds one, which other stages connect to."""

import hmac
import logging
import os
import time
from collections import deque
from collections.abc import Sequence
from typing import Final

import msgspec
import torch
import zmq

from loraplex.core.errors import DeviceLost
from loraplex.core.plan import RowResult
from loraplex.core.private_folder import PrivateFolder
from loraplex.models.stages import PipelineStage

logger = logging.getLogger(__name__)

_LOOK_MS: Final = 100
"""Interval at which a wait checks whether it was aborted."""
_MAX_MESSAGE_BYTES: Final = 1 << 30
"""Maximum size of a message: the hidden state of one step."""
_HIDDEN: Final = b"hidden"
_ROWS: Final = b"rows"
_DTYPES: Final = {
    str(dtype): dtype for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64)
}
_ROWS_DECODER: Final = msgspec.msgpack.Decoder(list[RowResult])


class _Shape(msgspec.Struct, frozen=True, array_like=True):
    num_tokens: int
    hidden_size: int
    dtype: str


_SHAPE_DECODER: Final = msgspec.msgpack.Decoder(_Shape)


class SocketLinks:
    """Implements StageLinks. Used by one thread, except `abort`.

    A rank has the same tensor rank as those it is linked to, because all of a stage have the same
    hidden state.
    """

    def __init__(self, stage: PipelineStage, token: str, host: str = "") -> None:
        """token: secret of the ranks. host: address of this machine for ranks on other machines;
        empty: none are. Raises zmq.ZMQError if no socket can be bound.
        """
        self.stage = stage
        self.wait_ns = 0
        """Time spent waiting for other stages."""
        self._token = token.encode()
        self._reason: str | None = None
        self._received: dict[bytes, deque[list[bytes]]] = {_HIDDEN: deque(), _ROWS: deque()}
        self._next: zmq.Socket[bytes] | None = None
        self._earlier: list[zmq.Socket[bytes]] = []
        self._folder = None if host else PrivateFolder()
        self._context = zmq.Context()
        self._context.setsockopt(zmq.LINGER, 0)
        self._inbox: zmq.Socket[bytes] = self._context.socket(zmq.PULL)
        self._inbox.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
        try:
            if self._folder is None:
                port = self._inbox.bind_to_random_port(f"tcp://{host}")
                self.address = f"tcp://{host}:{port}"
            else:
                self.address = f"ipc://{os.path.join(self._folder.path, 'stage')}"
                self._inbox.bind(self.address)
        except zmq.ZMQError:
            self.close()
            raise

    def connect(self, addresses: Sequence[str]) -> None:
        """Connect to the other stages. addresses: of the rank with this place in each stage."""
        if self.stage.is_last:
            self._earlier = [self._connected(address) for address in addresses[:-1]]
        else:
            self._next = self._connected(addresses[self.stage.index + 1])

    def send_hidden(self, hidden: torch.Tensor) -> None:
        assert self._next is not None, "connected, and not the last stage"
        values = hidden.contiguous().cpu()
        num_tokens, hidden_size = values.shape
        shape = _Shape(num_tokens, hidden_size, str(values.dtype))
        numbers = values.view(torch.uint8).numpy().data
        self._next.send_multipart([self._token, _HIDDEN, msgspec.msgpack.encode(shape), numbers])

    def receive_hidden(self, num_tokens: int) -> torch.Tensor:
        encoded, numbers = self._receive(_HIDDEN)
        shape = _SHAPE_DECODER.decode(encoded)
        if shape.num_tokens != num_tokens:
            raise DeviceLost(
                f"stage {self.stage.index - 1} sent {shape.num_tokens} tokens, and the step of "
                f"stage {self.stage.index} has {num_tokens}"
            )
        tensor = torch.frombuffer(bytearray(numbers), dtype=_DTYPES[shape.dtype])
        return tensor.view(num_tokens, shape.hidden_size)

    def send_rows(self, rows: Sequence[RowResult]) -> None:
        encoded = msgspec.msgpack.encode(rows)
        for socket in self._earlier:
            socket.send_multipart([self._token, _ROWS, encoded])

    def receive_rows(self) -> list[RowResult]:
        (encoded,) = self._receive(_ROWS)
        return _ROWS_DECODER.decode(encoded)

    def abort(self, reason: str) -> None:
        """End the waits of this rank, now and later. May be called from any thread."""
        self._reason = self._reason or reason

    def close(self) -> None:
        """Close the sockets. What was not delivered is dropped."""
        self._context.destroy()
        if self._folder is not None:
            self._folder.remove()

    def _connected(self, address: str) -> "zmq.Socket[bytes]":
        socket: zmq.Socket[bytes] = self._context.socket(zmq.PUSH)
        socket.setsockopt(zmq.SNDHWM, 0)  # the plans in flight limit what is sent
        socket.connect(address)
        return socket

    def _receive(self, kind: bytes) -> list[bytes]:
        """Return the oldest message of a kind. Raises DeviceLost after an abort."""
        messages, start_ns = self._received[kind], time.monotonic_ns()
        while not messages:
            if self._reason is not None:
                raise DeviceLost(self._reason)
            if self._inbox.poll(_LOOK_MS):
                self._take(self._inbox.recv_multipart())
        self.wait_ns += time.monotonic_ns() - start_ns
        return messages.popleft()

    def _take(self, frames: Sequence[bytes]) -> None:
        token, kind, *content = (*frames, b"", b"")[: max(2, len(frames))]
        if not hmac.compare_digest(token, self._token) or kind not in self._received:
            logger.warning("dropped a message of a process that is not a rank of this engine")
            return
        self._received[kind].append(content)
