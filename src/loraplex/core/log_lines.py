"""The format of log lines, the same in all processes of a server."""

import logging
import os
from pathlib import Path
from typing import Final

from loraplex.core.errors import ConfigError

_TIME: Final = "%Y-%m-%d %H:%M:%S"


def log_to_standard_error(level: str, source: str = "%(name)s", more: str = "") -> None:
    """Log to standard error from this level on. source: the first word of a message, by default the
    logger's name; more: a format after the message."""
    logging.basicConfig(
        level=level.upper(),
        format=f"%(levelname).1s %(asctime)s.%(msecs)03d {source}: %(message)s{more}",
        datefmt=_TIME,
    )


def send_standard_error_to(file: Path) -> None:
    """Append standard error to a file, for this process and those that it starts.

    Raises ConfigError if the file cannot be written.
    """
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        raise ConfigError(f"--log-file {file} cannot be written: {error.strerror}") from error
    os.dup2(descriptor, 2)
    os.close(descriptor)
