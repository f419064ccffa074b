"""A small workload for the benchmark's tests, and the backend that serves it."""

from loraplex.bench.arrivals import ClosedLoop
from loraplex.bench.popularity import Distinct
from loraplex.bench.workload import Lengths, Workload
from support.echo_service import EchoService

WORKLOAD = Workload(
    num_requests=6,
    prompt_tokens=Lengths(4, 4),
    output_tokens=Lengths(5, 5),
    popularity=Distinct(),
    num_adapters=3,
    arrivals=ClosedLoop(2),
    seed=0,
)


def backend_of_workload() -> EchoService:
    """Return a backend with the adapters a0, a1, a2."""
    backend = EchoService()
    for index in range(WORKLOAD.num_adapters):
        backend.register(f"a{index}")
    return backend
