"""The real tritonserver, as `make .triton` installs it, over a repository, until a test ends."""

import contextlib
import dataclasses
import itertools
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from loraplex.testing.running_server import fetch

MISSING = "the real tritonserver is not installed: make .triton"
START_SECONDS = 180
STOP_SECONDS = 60
_KINDS = ("http", "grpc", "metrics")
_SHARED_MEMORY = Path("/dev/shm")
_BACKENDS = ("python", "vllm")


@dataclasses.dataclass
class RealTriton:
    """Addresses as `host:port`, as tritonclient takes them."""

    process: "subprocess.Popen[bytes]"
    http: str
    grpc: str
    metrics: str
    log: Path

    def is_ready(self) -> bool:
        with contextlib.suppress(OSError):
            return fetch(f"http://{self.http}/v2/health/ready")[0] == 200
        return False

    def stop(self) -> int:
        """Its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_SECONDS)


def tritonserver(root: Path) -> Path | None:
    """The program in the checkout `root`; None if it is not installed."""
    folder = root / ".triton"
    return folder / "tritonserver" if (folder / "installed").exists() else None


@contextlib.contextmanager
def running_triton(
    program: Path,
    repository: Path,
    log: Path,
    *flags: str,
    backend_directory: Path | None = None,
    wait: bool = True,
) -> Iterator[RealTriton]:
    """A server with every model of the repository, ready, until the context ends.

    backend_directory: instead of its own, whose backends are linked into it. wait: False for one
    that is not to become ready. What it writes goes to `log`.
    """
    if backend_directory is not None:
        _link_backends(program.parent / "backends", backend_directory)
        flags = (*flags, f"--backend-directory={backend_directory}")
    ports = free_ports(3)
    command: Sequence[str] = [
        str(program),
        f"--model-repository={repository}",
        *(f"--{kind}-address=127.0.0.1" for kind in _KINDS),
        *(f"--{kind}-port={port}" for kind, port in zip(_KINDS, ports, strict=True)),
        # So that it is known which regions are this server's.
        *(f"--backend-config={name},shm-region-prefix-name={_prefix(ports)}" for name in _BACKENDS),
        *flags,
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    http, grpc, metrics = (f"127.0.0.1:{port}" for port in ports)
    triton = RealTriton(process, http, grpc, metrics, log)
    try:
        if wait:
            _wait_until_ready(triton)
        yield triton
    finally:
        _end(process)
        for region in _SHARED_MEMORY.glob(f"{_prefix(ports)}*"):  # of a server that was killed
            region.unlink(missing_ok=True)


def _link_backends(own: Path, directory: Path) -> None:
    for backend in own.iterdir():
        link = directory / backend.name
        if not link.exists():
            link.symlink_to(backend)


def _wait_until_ready(triton: RealTriton) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not triton.is_ready():
        has_ended = triton.process.poll() is not None
        assert not has_ended, f"tritonserver ended:\n{triton.log.read_text()[-4000:]}"
        assert time.monotonic() < deadline, f"not ready:\n{triton.log.read_text()[-4000:]}"
        time.sleep(0.1)


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()


# Below the ports that systems give to outgoing connections (from 32768 on Linux), so that none of
# those takes a port before its server does. Each process begins elsewhere.
_candidates = itertools.count(20_000 + os.getpid() % 120 * 100)


def free_ports(count: int) -> list[int]:
    """Return loopback ports on which no process listens, and which no later call returns.

    For the real Triton, which does not report a port that the system chose.
    """
    ports: list[int] = []
    while len(ports) < count:
        port = next(_candidates)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            ports.append(port)
    return ports


def _prefix(ports: Sequence[int]) -> str:
    """Prefix of the names of a server's regions of shared memory."""
    return f"loraplex_test_{os.getpid()}_{ports[0]}_"
