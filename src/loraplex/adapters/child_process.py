"""Process with its standard streams on the event loop."""

import asyncio
import contextlib
import socket
import subprocess
from collections.abc import Sequence
from typing import Final

from loraplex.core.environment import child_environment

_POLL_SECONDS: Final = 0.01
"""Interval at which a process that is to end is looked at."""


class ChildProcess:
    """Process with sockets as its standard streams.

    uvloop copies the address space of this process to start another one (fork), on the event loop:
    12 ms of processor time for each GiB, and many times that on a busy machine. `subprocess` shares
    it until the program of the child begins (vfork), which takes half a millisecond.
    """

    def __init__(
        self,
        process: "subprocess.Popen[bytes]",
        output: asyncio.StreamReader,
        input_: asyncio.StreamWriter,
        errors: asyncio.StreamReader,
        unused: asyncio.StreamWriter,
    ) -> None:
        self.pid = process.pid
        self.stdin, self.stdout, self.stderr = input_, output, errors
        self._process = process
        self._unused = unused

    @classmethod
    async def start(cls, command: Sequence[str]) -> "ChildProcess":
        """Start a process without API keys in its environment. Raises OSError."""
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as on_failure:
            pairs = socket.socketpair(), socket.socketpair()
            for our_end, their_end in pairs:
                on_failure.enter_context(our_end)
                theirs.enter_context(their_end)
            (data, their_data), (errors, their_errors) = pairs
            process = subprocess.Popen(
                command,
                stdin=their_data.fileno(),
                stdout=their_data.fileno(),
                stderr=their_errors.fileno(),
                env=child_environment(),
            )
            on_failure.pop_all()
        return cls(
            process,
            *await asyncio.open_connection(sock=data),
            *await asyncio.open_connection(sock=errors),
        )

    @property
    def returncode(self) -> int | None:
        """Exit status, negative for a signal; None while the process runs."""
        return self._process.poll()

    def end_input(self) -> None:
        """Let the process read the end of its input."""
        with contextlib.suppress(OSError):  # it has ended
            self.stdin.write_eof()

    def kill(self) -> None:
        self._process.kill()

    async def wait(self) -> int:
        """Wait until the process has ended; return its exit status."""
        while (status := self.returncode) is None:
            await asyncio.sleep(_POLL_SECONDS)
        return status

    def close(self) -> None:
        """Close the streams."""
        self.stdin.close()
        self._unused.close()
