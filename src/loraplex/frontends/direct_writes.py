"""Parts of a response that are written in the turn in which they are made.

An ASGI application's `send` is awaited by a task. A step of a model has a part for each stream, and
a task for each part would take longer than the part itself.
"""

from typing import Final, Protocol

DIRECT: Final = "loraplex_direct"
"""Key of a scope under which the HTTP server puts the DirectWriter of the response, if it has
one."""


class DirectWriter(Protocol):
    """The connection of a response that has begun. Nothing is written while a task sends."""

    @property
    def is_writable(self) -> bool:
        """Whether the client has read enough that `send` would not wait."""
        ...

    def write(self, data: bytes) -> None:
        """Write a part of the body, which is not the last, while `is_writable`."""
        ...
