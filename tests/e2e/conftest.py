"""One running server for all tests that only send requests."""

from collections.abc import Iterator

import pytest

from loraplex.testing.running_server import RunningServer, serving


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with serving(tmp_path_factory.mktemp("state")) as running:
        yield running
