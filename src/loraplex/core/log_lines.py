"""The format of log lines, the same in all processes of a server."""

import logging
from typing import Final

_TIME: Final = "%Y-%m-%d %H:%M:%S"


def log_to_standard_error(level: str, source: str = "%(name)s", more: str = "") -> None:
    """Log to standard error from this level on. source: the first word of a message, by default the
    logger's name; more: a format after the message."""
    logging.basicConfig(
        level=level.upper(),
        format=f"%(levelname).1s %(asctime)s.%(msecs)03d {source}: %(message)s{more}",
        datefmt=_TIME,
    )
