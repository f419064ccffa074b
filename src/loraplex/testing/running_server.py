"""A real `loraplex serve` in its own process, with the shipped model, for tests of the whole."""

import contextlib
import dataclasses
import itertools
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from loraplex.demo import ADAPTER_PATHS, BASE_PATH

START_SECONDS = 90
STOP_SECONDS = 30
MODEL = "capitals"


@dataclasses.dataclass
class RunningServer:
    process: "subprocess.Popen[str]"
    http_port: int
    grpc_port: int
    metrics_port: int
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


# Below the ports that systems give to outgoing connections (from 32768 on Linux), so that none of
# those takes a port before its server does. Each process begins elsewhere.
_candidates = itertools.count(20_000 + os.getpid() % 120 * 100)


def free_ports(count: int) -> list[int]:
    """Return loopback ports on which no process listens, and which no later call returns."""
    ports: list[int] = []
    while len(ports) < count:
        port = next(_candidates)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            ports.append(port)
    return ports


@contextlib.contextmanager
def serving(
    state_dir: Path, *flags: str, model: Path = BASE_PATH, certificate: Path | None = None
) -> Iterator[RunningServer]:
    """`loraplex serve` with the shipped model (or a copy of it) and both adapters, until the
    context ends. certificate: what to trust, of one that the flags let speak TLS.
    """
    ports = free_ports(3)
    command = [sys.executable, "-m", "loraplex", "serve", str(model), "--name", MODEL]
    for task_id, (name, path) in enumerate(ADAPTER_PATHS.items(), start=1):
        command += ["--adapter", f"{name}={path},task_id={task_id}"]
    for kind, port in zip(("http", "grpc", "metrics"), ports, strict=True):
        command += [f"--{kind}-port", str(port)]
    command += ["--state-dir", str(state_dir), *flags]
    with running(command, ports, certificate=certificate) as server:
        yield server


@contextlib.contextmanager
def running(
    command: Sequence[str],
    ports: Sequence[int],
    stdout: IO[str] | None = None,
    certificate: Path | None = None,
) -> Iterator[RunningServer]:
    """A server's process, ready, until the context ends. ports: HTTP, gRPC, metrics."""
    process = subprocess.Popen(command, stdout=stdout, text=True)
    server = RunningServer(process, *ports, certificate=certificate)
    try:
        server.wait_until(ready=True)
        yield server
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
