"""The format of log lines, the same in all processes of a server."""

import contextlib
import datetime
import json
import logging
import os
import sys
from pathlib import Path
from typing import Final

from loraplex.core.environment import has_colours, log_format
from loraplex.core.errors import ConfigError
from loraplex.core.url_secrets import without_queries

_RED: Final = "\x1b[31m"
_YELLOW: Final = "\x1b[33m"
_TIME: Final = "%Y-%m-%d %H:%M:%S"
_FORMATTER: Final = logging.Formatter()
_LEAST_LEVELS: Final = {
    # Its messages are a line for each request that we send.
    "httpx": logging.WARNING,
    # Their debug messages are about themselves; some hold signatures.
    **dict.fromkeys(
        (
            *("asyncio", "grpc", "httpcore", "urllib3", "botocore", "aiobotocore", "s3fs"),
            *("fsspec", "gcsfs", "adlfs", "azure", "google", "filelock"),
        ),
        logging.INFO,
    ),
}


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
    _begin(level, handler)


def log_to_parent(level: str) -> None:
    """Log to standard error for the process that reads it and logs each line with its level."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    _begin(level, handler)


def _begin(level: str, handler: logging.Handler) -> None:
    logging.basicConfig(level=level.upper(), handlers=[handler])
    for each in logging.getLogger().handlers:
        each.addFilter(without_secrets)
    for name, least in _LEAST_LEVELS.items():
        logging.getLogger(name).setLevel(max(least, logging.getLogger().level))


def without_secrets(record: logging.LogRecord) -> bool:
    """Remove queries and users of URLs from a log record, whichever library made it."""
    with contextlib.suppress(Exception):  # a message that does not fit its arguments
        record.msg, record.args = without_queries(record.getMessage()), None
    if record.exc_info and not record.exc_text:
        record.exc_text = without_queries(_FORMATTER.formatException(record.exc_info))
    return True


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
            fields["exception"] = record.exc_text or self.formatException(record.exc_info)
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
