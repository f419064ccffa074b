"""Every command and program of README.md and docs/ runs as it stands."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from loraplex.testing.running_server import RunningServer, running
from support.documentation import (
    FOLDERS,
    HUB,
    ROOT,
    RUN,
    TUTORIALS,
    blocks,
    ends_with_ctrl_c,
    is_followed,
    pages,
    sandbox,
    shared_command,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

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
    name = page.relative_to(ROOT).as_posix()
    shared = None if is_followed(name) else request.getfixturevalue("shared_server")
    with sandbox(tmp_path, shared, HUB if name.startswith(TUTORIALS) else FOLDERS) as opened:
        for block in blocks(page):
            if block.language in RUN and not block.reason:
                opened.run(block)


def test_the_tutorials_run_one_after_another_in_one_folder(tmp_path: Path) -> None:
    """A reader who goes on to the next tutorial has the files and the state of those before."""
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    [tutorials] = [part["Tutorials"] for part in nav if "Tutorials" in part]
    with sandbox(tmp_path, shared=None, folders=HUB) as opened:
        for entry in tutorials:
            [page] = [ROOT / "docs" / name for name in entry.values()]
            for block in blocks(page):
                if block.language in RUN and not block.reason:
                    opened.run(block)
            assert not opened.has_server or ends_with_ctrl_c(page), f"{page} leaves its server"
            opened.end_server()
