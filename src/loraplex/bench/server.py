"""A `loraplex serve` of the benchmark's own, in a process of its own, from ready to stopped.

Talks to it as an operator does: by flags, by the lines that it prints, by a signal.
"""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from loraplex.core.environment import child_environment
from loraplex.core.errors import ConfigError
from loraplex.core.python_process import module_command

_START_SECONDS = 300.0
_STOP_SECONDS = 60.0
HTTP_LINE = re.compile(r"Started HTTPService at (\S+:\d+)")
LAST_LINE = "Started Metrics Service at"


def serve_command(
    model: Path, name: str, adapter_dir: Path, state_dir: Path, flags: Sequence[str]
) -> list[str]:
    """Return the command of a server on free ports. `flags` come last, so they win."""
    places = [str(model), "--name", name, "--adapter-dir", str(adapter_dir)]
    ports = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]
    quiet = ["--state-dir", str(state_dir), "--log-level", "warning"]
    return [*module_command("loraplex", "serve"), *places, *ports, *quiet, *flags]


@contextlib.asynccontextmanager
async def running_server(
    command: Sequence[str], start_seconds: float = _START_SECONDS
) -> AsyncIterator[str]:
    """Run the command while the context lasts; gives its HTTP address once it is ready.

    Its messages go to our standard error. Its settings are its flags: LORAPLEX_* variables do not
    reach it. Raises ConfigError if it does not start.
    """
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, env=child_environment()
    )
    try:
        yield await _started(process, start_seconds)
    finally:
        await _stop(process)


async def _started(process: asyncio.subprocess.Process, start_seconds: float) -> str:
    try:
        async with asyncio.timeout(start_seconds):
            return await _read_address(process)
    except TimeoutError:
        raise ConfigError(f"the server was not ready within {start_seconds:g} seconds") from None


async def _read_address(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    url = ""
    async for line in process.stdout:
        text = line.decode(errors="replace")
        if match := HTTP_LINE.search(text):
            url = f"http://{match[1]}"
        if LAST_LINE in text:
            return url
    status = await process.wait()
    raise ConfigError(f"the server ended with status {status} before it was ready")


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(_STOP_SECONDS):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
