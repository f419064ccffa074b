"""Tests on a Ray cluster of two nodes on this machine: `make ray-test`."""

import importlib.util
from collections.abc import Iterator

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("ray") else ["test_*.py"]


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[None]:
    """Two nodes, each with the NODE_CPUS of the module."""
    import ray
    from ray.cluster_utils import Cluster

    node = {"num_cpus": request.module.NODE_CPUS, "object_store_memory": 100 << 20}
    made = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    try:
        made.add_node(**node)
        ray.init(address=made.address, log_to_driver=False)
        yield
    finally:
        ray.shutdown()
        made.shutdown()
