"""Lines of the log, alike in all processes of a server."""

import logging
from typing import Final

_TIME: Final = "%Y-%m-%d %H:%M:%S"


def log_to_standard_error(level: str, source: str = "%(name)s", more: str = "") -> None:
    """From a level of core.config on. source: who says it; more: behind the message."""
    logging.basicConfig(
        level=level.upper(),
        format=f"%(levelname).1s %(asctime)s.%(msecs)03d {source}: %(message)s{more}",
        datefmt=_TIME,
    )
