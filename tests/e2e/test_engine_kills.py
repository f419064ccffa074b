"""The engine is killed at random points under load: no request is lost, no token changes."""

import sys

import pytest

from loraplex.testing.running_server import serving
from support.engine_kills import kill_engines

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(sys.platform != "linux", reason="finds child processes in /proc"),
    pytest.mark.xdist_group("restart"),
]

NUM_KILLS = 8


def test_no_client_notices(tmp_path):
    with serving(tmp_path) as server:
        outcome = kill_engines(server, NUM_KILLS, seed=5)
        assert outcome.num_kills == NUM_KILLS
        assert outcome.num_responses.total() > NUM_KILLS
        assert outcome.wrong == []
        assert server.stop() == 0
