"""Commands that are built once, and staging workers that tests share."""

import functools
from collections.abc import Iterator

import pytest
import typer.main
import typer.testing

from support.kept_staging import keeping_staging_processes


@pytest.fixture(autouse=True, scope="module")
def _built_commands() -> Iterator[None]:
    """Typer builds all commands with all flags for each command line that a test runs."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(typer.testing, "_get_command", _command)
        yield


_command = functools.cache(typer.main.get_command)


@pytest.fixture(autouse=True, scope="module")
def _shared_staging() -> Iterator[None]:
    with keeping_staging_processes():
        yield
