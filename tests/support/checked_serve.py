"""`loraplex` whose servers read and check their flags and files, and end before they load anything.

python -m support.checked_serve serve MODEL ...
"""

from typing import Any

from loraplex.app import launch
from loraplex.cli.main import app


def end_instead(*_: Any, **__: Any) -> None:
    """Take the place of `run_server`."""


if __name__ == "__main__":
    launch.run_server = end_instead
    app()
