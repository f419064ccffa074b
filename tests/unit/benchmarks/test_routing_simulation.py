import dataclasses

import routing

from loraplex.deploy.routing import AdapterRouting


def test_nine_of_ten_requests_find_their_adapter_and_more_than_by_random_routing() -> None:
    case = dataclasses.replace(routing.CASES[0], num_requests=8000)
    requests = routing.requests_of(case)
    routed = routing.Simulation(case, AdapterRouting()).run(requests)
    randomly = routing.Simulation(case, None).run(requests)
    assert routed.on_device >= 0.9
    assert routed.on_device > randomly.on_device + 0.1
    assert len(routed.waits) == len(randomly.waits) == len(requests)
