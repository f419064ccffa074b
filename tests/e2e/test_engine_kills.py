"""The engine process is killed at random points under load: no request is lost, no token changes.

Long runs: see engine_kills.
"""

import importlib.util
import sys
from pathlib import Path

import pytest

from loraplex.testing.running_server import serving

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(sys.platform != "linux", reason="finds child processes in /proc"),
    pytest.mark.xdist_group("restart"),
]

NUM_KILLS = 8


def load_kills():
    path = Path(__file__).with_name("engine_kills.py")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def test_no_client_notices(tmp_path):
    with serving(tmp_path) as server:
        outcome = load_kills().kill_engines(server, NUM_KILLS, seed=5)
        assert outcome.num_kills == NUM_KILLS
        assert outcome.num_responses.total() > NUM_KILLS
        assert outcome.wrong == []
        assert server.stop() == 0
