"""Every command and program of README.md and docs/ runs as it stands."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from loraplex.testing.running_server import RunningServer, running
from support.documentation import ROOT, RUN, STARTING, blocks, pages, sandbox, shared_command

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PAGES = [
    page
    for page in pages()
    if any(block.language in RUN and not block.reason for block in blocks(page))
]


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running(shared_command(tmp_path_factory.mktemp("state"))) as server:
        yield server


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_blocks_of_a_page_run(
    page: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    starts = page.relative_to(ROOT).as_posix() in STARTING
    shared = None if starts else request.getfixturevalue("shared_server")
    with sandbox(tmp_path, shared) as opened:
        for block in blocks(page):
            if block.language in RUN and not block.reason:
                opened.run(block)
