"""Files that a peer makes of the fixtures: made once, and kept whole or not at all."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from comparison.processes import ServerProcess
from loraplex.core.errors import ConfigError

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
            raise ConfigError(
                f"{command(draft)[0]} made no {target.name}; its messages are in {log}"
            )
        draft.rename(target)
    return target


async def _run(command: Sequence[str], log: Path) -> None:
    process = await ServerProcess.start(command, log, _OFFLINE)
    try:
        status = await process.wait()
    finally:
        await process.stop()
    if status:
        raise ConfigError(f"{' '.join(command)} ended with status {status}: {process.log_tail()}")


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
