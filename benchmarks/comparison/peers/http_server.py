"""A peer's HTTP server: on a port of its own, waited for, and stopped."""

import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from comparison.processes import Launch, ServerProcess
from loraplex.bench.completions import StreamingClient

_HOST = "127.0.0.1"


class HttpServer:
    """A server's process and the client that speaks to it."""

    def __init__(self, process: ServerProcess, client: StreamingClient) -> None:
        self._process = process
        self.client = client

    @classmethod
    async def start(
        cls,
        command: Callable[[str, int], Sequence[str]],
        log: Path,
        variables: dict[str, str],
        *,
        ready_path: str,
        seconds: float,
        reuses_connections: bool = True,
    ) -> "HttpServer":
        """Run command(host, port) and wait until a GET of ready_path succeeds.

        reuses_connections: False for a server that closes them when it likes, so that a request
        on one may get no response. Raises ConfigError with the end of the log.
        """
        port = _free_port()
        client = StreamingClient(f"http://{_HOST}:{port}", reuses_connections=reuses_connections)
        process = await ServerProcess.start(command(_HOST, port), log, variables)
        server = cls(process, client)
        try:
            await process.wait_until(lambda: server.client.is_up(ready_path), seconds)
        except BaseException:
            await server.stop()
            raise
        return server

    @property
    def launch(self) -> Launch:
        return self._process.launch

    @property
    def pid(self) -> int:
        return self._process.pid

    async def stop(self) -> None:
        """Idempotent."""
        await self.client.close()
        await self._process.stop()


def _free_port() -> int:
    """Return a free port. A server with port 0 would not report its own."""
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port: int = probe.getsockname()[1]
        return port
