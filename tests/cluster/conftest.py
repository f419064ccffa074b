"""Tests on a Ray cluster of two nodes on this machine: `make ray-test`."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("ray") else ["test_*.py"]
