"""The format of log lines, the same in all processes of a server."""

import datetime
import json
import logging
import os
import sys
from pathlib import Path
from typing import Final

from loraplex.core.environment import has_colours, log_format
from loraplex.core.errors import ConfigError

_RED: Final = "\x1b[31m"
_YELLOW: Final = "\x1b[33m"
_TIME: Final = "%Y-%m-%d %H:%M:%S"


def log_to_standard_error(level: str, source: str = "%(name)s", more: str = "") -> None:
    """Log to standard error from this level on, in the format of the environment.

    source: the first word of a message, by default the logger's name; more: a format after the
    message.
    """
    handler = logging.StreamHandler()
    if log_format() == "json":
        handler.setFormatter(_Json(source))
    else:
        start = "%(levelname).1s"
        if has_colours(is_terminal=sys.stderr.isatty()):
            start = "%(colour)s%(levelname).1s\x1b[0m"
            handler.addFilter(_with_colour)
        text = f"{start} %(asctime)s.%(msecs)03d {source}: %(message)s{more}"
        handler.setFormatter(logging.Formatter(text, _TIME))
    logging.basicConfig(level=level.upper(), handlers=[handler])


class _Json(logging.Formatter):
    """One JSON object a line."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self._source = source

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        # The ids of a request, as app.launch adds them to a record: ` [REQUEST TRACE]`.
        ids = str(getattr(record, "request", "")).strip(" []").split()
        fields = {
            "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "source": self._source % vars(record),
            "message": record.getMessage(),
            **dict(zip(("request_id", "trace_id"), ids, strict=False)),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


def _with_colour(record: logging.LogRecord) -> bool:
    """Add the colour of a record's level for a terminal."""
    colour = _RED if record.levelno >= logging.ERROR else _YELLOW
    record.colour = colour if record.levelno >= logging.WARNING else ""
    return True


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
