"""The serving process of a request socket: joined if it is there, else started.

Next to the socket are a lock (only one starts it), the server's log, and a pipe with a name: every
model that uses the server holds it open for writing, and the server ends when its standard input,
the pipe, does: when the last of them has been unloaded or has died.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from .connection import Connection

_POLL_SECONDS = 0.1
_BIND_SECONDS = 120.0
"""A server that has been started listens within so long; its models may take longer."""
_END_SECONDS = 2.0
_TAIL_LINES = 20
_TAIL_BYTES = 4096
_OWN_FILE = os.O_CLOEXEC | os.O_NOFOLLOW
"""No link is followed: in a folder of all users it could be a trap."""
_DROPPED = ("LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONPATH")
"""Variables that are about Triton's own libraries and Python."""


class ServerUnavailable(Exception):
    """There is no server, and none could be started; the message has the reason."""


def default_socket(command: Sequence[str]) -> str:
    """The same for all models with one command, in a folder of this user alone.

    Raises ServerUnavailable if another user has made the folder.
    """
    folder = os.path.join(tempfile.gettempdir(), f"loraplex-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ServerUnavailable(
            f"{folder} must be a folder that only its owner, this user, may enter"
        )
    digest = hashlib.sha256(json.dumps(list(command)).encode()).hexdigest()
    return os.path.join(folder, f"{digest[:16]}.socket")


class ServerProcess:
    """One socket, and what may be started to listen there."""

    def __init__(self, path: str, command: Sequence[str] = ()) -> None:
        """command: without its --request-socket; empty: the server is started elsewhere."""
        self._path = path
        self._command = list(command)
        self._process: subprocess.Popen[bytes] | None = None
        self._leash: int | None = None

    @property
    def pid(self) -> int | None:
        """Id of the last process that this one has started."""
        return None if self._process is None else self._process.pid

    def connect(self, on_lost: Callable[[str], None], is_closing: Callable[[], bool]) -> Connection:
        """Connect. Raises ServerUnavailable, ConnectionLost. is_closing: whether to give up."""
        if not self._command:
            try:
                return Connection(self._path, on_lost)
            except OSError as error:
                raise ServerUnavailable(
                    f"no server listens on {self._path} ({error.strerror}); start one: loraplex "
                    f"triton --model-repository DIR --request-socket {self._path}"
                ) from error
        with self._locked():
            connection = self._connected(on_lost) or self._started(on_lost, is_closing)
            self._hold_leash()
            return connection

    def last_words(self) -> str:
        """How the server ended, as far as this process knows: its status, and its log's end."""
        status = self._exit_status()
        ended = "" if status is None else f" (exit status {status})"
        tail = self._tail()
        return f"{ended}; the end of {self._log} is:\n{tail}" if tail else ended

    def _exit_status(self) -> int | None:
        """None: it runs, or another process has started it. One that ends is waited for."""
        if self._process is None:
            return None
        try:
            return self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            return None

    def release(self) -> None:
        """This model needs the server no longer. Idempotent."""
        if self._leash is not None:
            os.close(self._leash)
            self._leash = None

    @property
    def _log(self) -> str:
        return f"{self._path}.log"

    @property
    def _pipe(self) -> str:
        return f"{self._path}.leash"

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            lock = os.open(f"{self._path}.lock", os.O_CREAT | os.O_RDWR | _OWN_FILE, 0o600)
        except OSError as error:
            raise ServerUnavailable(
                f"cannot write next to {self._path}: {error.strerror}"
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def _connected(self, on_lost: Callable[[str], None]) -> Connection | None:
        """Connection to the socket; None: no server listens."""
        try:
            return Connection(self._path, on_lost)
        except (FileNotFoundError, ConnectionRefusedError):
            return None
        except OSError as error:
            raise ServerUnavailable(f"cannot open {self._path}: {error.strerror}") from error

    def _started(
        self, on_lost: Callable[[str], None], is_closing: Callable[[], bool]
    ) -> Connection:
        process = self._start()
        deadline = time.monotonic() + _BIND_SECONDS
        while time.monotonic() < deadline and not is_closing():
            if process.poll() is not None:
                raise ServerUnavailable(f"the server could not start{self.last_words()}")
            connection = self._connected(on_lost)
            if connection is not None:
                return connection
            time.sleep(_POLL_SECONDS)
        process.terminate()
        raise ServerUnavailable(
            f"the server does not listen on {self._path} after {_BIND_SECONDS:.0f} s"
            f"{self.last_words()}"
        )

    def _start(self) -> "subprocess.Popen[bytes]":
        environment = {k: v for k, v in os.environ.items() if k not in _DROPPED}
        environment["PYTHONSAFEPATH"] = "1"  # no module of the current folder runs in it
        command = [*self._command, f"--request-socket={self._path}"]
        self.release()
        try:
            log = os.open(self._log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | _OWN_FILE, 0o600)
            with contextlib.closing(os.fdopen(log, "wb")) as output:
                reading = self._new_pipe()
                try:
                    self._process = subprocess.Popen(
                        command,
                        stdin=reading,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        env=environment,
                        start_new_session=True,
                    )
                finally:
                    os.close(reading)
        except OSError as error:
            raise ServerUnavailable(f"cannot start {command[0]}: {error.strerror}") from error
        # Reaps it whenever it ends: perhaps long after this model was unloaded.
        threading.Thread(target=self._process.wait, name="loraplex-server", daemon=True).start()
        return self._process

    def _new_pipe(self) -> int:
        """The reading end, for the server; this process has the writing end, too."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._pipe)
        os.mkfifo(self._pipe, 0o600)
        reading = os.open(self._pipe, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._leash = os.open(self._pipe, os.O_WRONLY | os.O_CLOEXEC)
        os.set_blocking(reading, True)
        return reading

    def _hold_leash(self) -> None:
        """Hold the pipe of the server that is there now, if it has one.

        The pipe of the last server is let go after that: it may be the same one.
        """
        last, self._leash = self._leash, None
        try:
            self._leash = os.open(self._pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENXIO):
                raise ServerUnavailable(f"cannot open {self._pipe}: {error.strerror}") from error
        finally:
            if last is not None:
                os.close(last)

    def _tail(self) -> str:
        try:
            with open(self._log, "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join(lines[-_TAIL_LINES:])
