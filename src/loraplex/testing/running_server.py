"""A real `loraplex serve` in its own process, with the shipped model, for tests of the whole."""

import contextlib
import dataclasses
import json
import re
import signal
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from loraplex.core.python_process import module_command
from loraplex.demo import ADAPTER_PATHS, BASE_PATH

START_SECONDS = 300
"""Limit on a busy machine; an idle one takes a few seconds."""
STOP_SECONDS = 120
MODEL = "capitals"


PORT_FLAGS = ("--http-port=0", "--grpc-port=0", "--metrics-port=0")
"""Flags of a server on ports that the system chooses; it prints them when it is ready."""
_PORT_LINE = re.compile(r"Started (\S+?) ?Service at \S+:(\d+)$")
_PORTS = {"HTTP": "http_port", "GRPCInference": "grpc_port", "Metrics": "metrics_port"}
_LAST_PORT = "metrics_port"
"""The port that a server prints last, unless it has none."""


@dataclasses.dataclass
class RunningServer:
    process: "subprocess.Popen[str]"
    http_port: int = 0
    """0: not known yet, as for the others."""
    grpc_port: int = 0
    metrics_port: int = 0
    certificate: Path | None = dataclasses.field(default=None, kw_only=True)
    """Certificate of a server with TLS."""

    @property
    def url(self) -> str:
        return self._url(self.http_port)

    def _url(self, port: int) -> str:
        return f"http{'s' if self.certificate else ''}://127.0.0.1:{port}"

    def get(self, path: str, port: int | None = None) -> tuple[int, str]:
        """(status, body)."""
        return fetch(f"{self._url(port or self.http_port)}{path}", certificate=self.certificate)

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        status, text = fetch(f"{self.url}{path}", data, certificate=self.certificate)
        return status, json.loads(text) if text else None

    def delete(self, path: str) -> int:
        """The status."""
        return fetch(f"{self.url}{path}", method="DELETE", certificate=self.certificate)[0]

    def is_ready(self) -> bool:
        with contextlib.suppress(OSError):
            return self.get("/health/ready")[0] == 200
        return False

    def wait_until(self, ready: bool, seconds: float = START_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while self.is_ready() is not ready:
            assert self.process.poll() is None, f"the server ended: {self.process.returncode}"
            assert time.monotonic() < deadline, f"not {'ready' if ready else 'unready'} in time"
            time.sleep(0.05)

    def wait_until_printed(self, port: str = _LAST_PORT, seconds: float = START_SECONDS) -> None:
        """Wait for a port's line, which a server prints when it is ready."""
        deadline = time.monotonic() + seconds
        while not getattr(self, port):
            assert self.process.poll() is None, f"the server ended: {self.process.returncode}"
            assert time.monotonic() < deadline, "not ready in time"
            time.sleep(0.05)

    def read_lines(self, stdout: IO[str] | None) -> None:
        """Take the ports from the lines that the server prints, and copy the lines to `stdout`."""
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                if stdout is not None:
                    stdout.write(line)
                    stdout.flush()
                if match := _PORT_LINE.match(line.strip()):
                    setattr(self, _PORTS[match[1]], int(match[2]))

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_SECONDS)


def fetch(
    url: str,
    data: bytes | None = None,
    method: str | None = None,
    certificate: Path | None = None,
) -> tuple[int, str]:
    context = None if certificate is None else ssl.create_default_context(cafile=certificate)
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60, context=context) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


@contextlib.contextmanager
def serving(
    state_dir: Path,
    *flags: str,
    model: Path = BASE_PATH,
    certificate: Path | None = None,
    **options: Any,
) -> Iterator[RunningServer]:
    """`loraplex serve` with the shipped model (or a copy of it) and both adapters, until the
    context ends. certificate: what to trust, of one that the flags let speak TLS. `options` are
    those of Popen.
    """
    command = [*module_command("loraplex", "serve"), str(model), "--name", MODEL]
    for task_id, (name, path) in enumerate(ADAPTER_PATHS.items(), start=1):
        command += ["--adapter", f"{name}={path},task_id={task_id}"]
    command += [*PORT_FLAGS, "--state-dir", str(state_dir), *flags]
    with running(command, certificate=certificate, **options) as server:
        yield server


@contextlib.contextmanager
def running(
    command: Sequence[str],
    stdout: IO[str] | None = None,
    last_port: str = _LAST_PORT,
    certificate: Path | None = None,
    **options: Any,
) -> Iterator[RunningServer]:
    """A server's process with its ports, ready, until the context ends.

    The command has PORT_FLAGS; `last_port` is the last one that the server opens. `options` are
    those of Popen.
    """
    server, reader = start(command, stdout, **options)
    server.certificate = certificate
    try:
        server.wait_until_printed(last_port)
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
        server.process.wait()
        reader.join(STOP_SECONDS)


def start(
    command: Sequence[str], stdout: IO[str] | None = None, **options: Any
) -> tuple[RunningServer, threading.Thread]:
    """Start a server and a thread that reads what it prints. `options` are those of Popen."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options)
    server = RunningServer(process)
    reader = threading.Thread(target=server.read_lines, args=(stdout,), daemon=True)
    reader.start()
    return server, reader
