"""What fails on one rank fails on all: an adapter is there for every rank, or for none."""

from collections.abc import Callable
from typing import Final, TypeVar

import torch

from loraplex.core.errors import AdapterLoadError, LoraplexError
from loraplex.kernels.channel import Channel

_MESSAGE_BYTES: Final = 2048

_T = TypeVar("_T")


def agreed(channel: Channel, attempt: Callable[[], _T]) -> _T:
    """Return attempt()'s result once it succeeded on all ranks, which call this together.

    Raises this rank's LoraplexError, or AdapterLoadError with the message of the first rank that
    has one.
    """
    failure: LoraplexError | None = None
    try:
        result = attempt()
    except LoraplexError as error:
        failure = error
    messages = channel.gather(_message(failure))
    if failure is not None:
        raise failure
    for rank, message in enumerate(messages):
        text = bytes(message.numpy()).rstrip(b"\0").decode(errors="replace")
        if text:
            raise AdapterLoadError(f"rank {rank} of {channel.size}: {text}")
    return result


def _message(failure: LoraplexError | None) -> torch.Tensor:
    text = b"" if failure is None else failure.message.encode()[:_MESSAGE_BYTES]
    return torch.frombuffer(bytearray(text.ljust(_MESSAGE_BYTES, b"\0")), dtype=torch.uint8)
