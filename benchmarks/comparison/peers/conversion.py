"""Files that a peer makes of the fixtures: made once, and kept whole or not at all."""

import asyncio
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from loraplex.core.environment import child_environment
from loraplex.core.errors import ConfigError

_LOG_TAIL_CHARACTERS = 2000
# A converter finds what it needs in the folder that it is given.
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


async def made_once(target: Path, command: Callable[[Path], Sequence[str]], log: Path) -> Path:
    """`target`; if it is not there, what the command writes to the path that it is given.

    Raises ConfigError with the end of what the command printed.
    """
    if not target.exists():
        draft = target.with_name(f"draft-{target.name}")
        _remove(draft)
        draft.parent.mkdir(parents=True, exist_ok=True)
        await _run(command(draft), log)
        if not draft.exists():
            raise ConfigError(f"{command(draft)[0]} made no {target.name}: {_tail(log)}")
        draft.rename(target)
    return target


async def _run(command: Sequence[str], log: Path) -> None:
    try:
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=child_environment() | _OFFLINE,
            )
    except OSError as error:
        raise ConfigError(f"cannot run {command[0]}: {error.strerror}") from error
    try:
        status = await process.wait()
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    if status:
        raise ConfigError(f"{' '.join(command)} ended with status {status}: {_tail(log)}")


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-_LOG_TAIL_CHARACTERS:].strip()
