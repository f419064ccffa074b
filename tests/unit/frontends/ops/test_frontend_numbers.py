"""Numbers of several processes as those of one server."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from loraplex.frontends.ops.frontend_numbers import FrontendNumbers, encoded_families


class Process:
    """What one process counts."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter("requests", "Help.", ["model"], registry=self.registry)
        self.open = Gauge("open", "Help.", registry=self.registry)
        self.times = Histogram("times", "Help.", buckets=(1, 2), registry=self.registry)


def text_of(numbers, process):
    registry = CollectorRegistry()
    registry.register(numbers.added_to(process.registry))
    return generate_latest(registry).decode().splitlines()


async def test_values_are_added_and_those_of_the_dead_stay():
    owner, other = Process(), Process()
    running = [other]

    async def count():
        return [encoded_families([process.registry]) for process in running]

    numbers = FrontendNumbers()
    numbers.count = count
    owner.requests.labels("a").inc(2)
    owner.times.observe(0.5)
    other.requests.labels("a").inc(3)
    other.requests.labels("b").inc()
    other.times.observe(1.5)
    other.open.set(7)
    await numbers.refresh()
    first = text_of(numbers, owner)
    for line in (
        'requests_total{model="a"} 5.0',
        'requests_total{model="b"} 1.0',
        "open 7.0",
        'times_bucket{le="1.0"} 1.0',
        'times_bucket{le="+Inf"} 2.0',
        "times_count 2.0",
        "times_sum 2.0",
    ):
        assert line in first
    created = next(line for line in first if line.startswith('requests_created{model="a"}'))
    assert float(created.split()[-1]) < 2e9

    running.clear()
    numbers.keep(encoded_families([other.registry]))
    numbers.keep(encoded_families([other.registry]))
    await numbers.refresh()
    later = text_of(numbers, owner)
    for line in ('requests_total{model="a"} 8.0', "open 0.0", "times_count 3.0"):
        assert line in later
    numbers.keep(b"")
